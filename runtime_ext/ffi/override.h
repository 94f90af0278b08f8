// SPDX-License-Identifier: Apache-2.0
/*!
 * \file override.h
 * \brief Global functions that apache-tvm has, too: ours for our objects, the stock ones for
 * others.
 */
#ifndef TVM_PAGEDKV_FFI_OVERRIDE_H_
#define TVM_PAGEDKV_FFI_OVERRIDE_H_

#include <tvm/ffi/function.h>

#include <atomic>
#include <optional>
#include <string>

namespace pagedkv {

namespace ffi = tvm::ffi;

/*! \brief Whether the stock constructors make stock objects; set by pagedkv.use_stock_runtime. */
inline std::atomic<bool> use_stock_runtime{false};

/*!
 * \brief Overrides a function: `ours` serves objects of type Obj, the function that has had the
 * name before serves all others.
 * \param what The object in an error message, such as "a KV cache".
 */
template <typename Obj>
void Override(const std::string& name, const std::string& what, ffi::Function ours) {
  std::optional<ffi::Function> other = ffi::Function::GetGlobal(name);
  auto dispatch = [name, what, other, ours](ffi::PackedArgs args, ffi::Any* result) {
    if (args.size() > 0 && args[0].as<Obj>() != nullptr) {
      ours.CallPacked(args, result);
    } else if (args.size() == 0 || args[0] == nullptr || !other) {
      throw ffi::Error("TypeError", name + " needs " + what + " as its first argument", "");
    } else {
      other->CallPacked(args, result);
    }
  };
  ffi::Function::SetGlobal(name, ffi::Function::FromPacked(dispatch), /*override=*/true);
}

/*! \brief Overrides a constructor, unless the stock runtime is to be used. */
inline void OverrideCreate(const char* name, ffi::Function ours) {
  std::optional<ffi::Function> stock = ffi::Function::GetGlobal(name);
  auto create = [stock, ours](ffi::PackedArgs args, ffi::Any* result) {
    if (use_stock_runtime && stock) return stock->CallPacked(args, result);
    ours.CallPacked(args, result);
  };
  ffi::Function::SetGlobal(name, ffi::Function::FromPacked(create), /*override=*/true);
}

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_FFI_OVERRIDE_H_
