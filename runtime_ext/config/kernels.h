// SPDX-License-Identifier: Apache-2.0
/*!
 * \file kernels.h
 * \brief A kernel set: the kernels that some layers share, by name.
 */
#ifndef TVM_PAGEDKV_CONFIG_KERNELS_H_
#define TVM_PAGEDKV_CONFIG_KERNELS_H_

#include <tvm/ffi/any.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <array>
#include <string>

namespace pagedkv {

namespace ffi = tvm::ffi;

enum class KernelName : int {
#define KERNEL(id, name) id,
#include "config/kernel_names.inc"
#undef KERNEL
  kNumNames,
};

class KernelSet {
 public:
  /*!
   * \brief Reads a map from kernel names to values that Set takes.
   * \throws Error (ValueError, TypeError).
   */
  static KernelSet FromMap(const ffi::Map<ffi::String, ffi::Any>& map);

  /*!
   * \brief Adds a kernel.
   * \param value A function of this project, ["tirx", function] of the stock cache, ["flashinfer",
   *   run, plan], or None or an empty array for no kernel.
   */
  void Set(KernelName name, const ffi::AnyView& value);

  bool Has(KernelName name) const { return entry(name).function != nullptr; }
  /*! \brief Whether the kernel is of this project. */
  bool IsOwn(KernelName name) const { return Has(name) && !IsStock(name) && !IsFlashInfer(name); }
  /*! \brief Whether the kernel is of the stock cache, with its assumptions on alignment. */
  bool IsStock(KernelName name) const { return entry(name).is_stock; }
  /*! \brief Whether the kernel is of FlashInfer: `Get` is its `run`, `Plan` its `plan`. */
  bool IsFlashInfer(KernelName name) const { return entry(name).plan != nullptr; }
  const ffi::Function& Plan(KernelName name) const { return entry(name).plan; }
  /*! \throws Error (ValueError) that names the kernel when there is none. */
  const ffi::Function& Get(KernelName name) const;

 private:
  struct Entry {
    ffi::Function function{nullptr};
    ffi::Function plan{nullptr};
    bool is_stock = false;
  };
  void SetFlashInfer(KernelName name, const ffi::Array<ffi::Any>& array);
  const Entry& entry(KernelName name) const { return entries_[static_cast<int>(name)]; }

  std::array<Entry, static_cast<int>(KernelName::kNumNames)> entries_;
};

/*! \brief The name of the kernel in kernel maps. */
const char* ToString(KernelName name);
/*! \throws Error (ValueError) that lists the known names. */
KernelName KernelNameOf(const std::string& name);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_CONFIG_KERNELS_H_
