// SPDX-License-Identifier: Apache-2.0
/*!
 * \file host_memory_object.h
 * \brief Host memory as a store's worker holds it: the object does not keep the cache alive.
 */
#ifndef TVM_PAGEDKV_PREFIXES_HOST_MEMORY_OBJECT_H_
#define TVM_PAGEDKV_PREFIXES_HOST_MEMORY_OBJECT_H_

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/object.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/process.h"
#include "state/host_memory/host_memory.h"

namespace pagedkv {

namespace ffi = tvm::ffi;

/*! \brief Options of the tiers below the pools of a cache. */
struct LowerTierOptions {
  int64_t host_bytes = 0;  // 0: as little as a store needs
  std::string model_id;
  std::string write_policy;  // "through", "back" or "selective"
  int64_t min_hits = 1;
  double lookup_timeout = 0;  // seconds for which a new sequence waits for the store
  bool has_store = false;

  /*! \throws Error (ValueError, TypeError) that names the field. */
  static LowerTierOptions FromMap(const ffi::Map<ffi::String, ffi::Any>& map);
};

class HostMemoryObj : public ffi::Object {
 public:
  /*!
   * \param sizes [group] of values.
   * \param device The device of the pages: copies to it are from pinned memory.
   * \throws Error (ValueError, MemoryError).
   */
  HostMemoryObj(const LowerTierOptions& options, int32_t page_size,
                const std::vector<ValueSize>& sizes, DLDevice device);

  ~HostMemoryObj();

  HostMemory* host_memory() { return host_memory_.get(); }
  const OwnProcess& process() const { return process_; }
  const ffi::Tensor& memory() const { return memory_; }

  // What is called without the cache. Each may block, without Python's global lock. Workers call
  // NextJob, in threads that get no signals; Wait and Flush let Python handle its signals.
  /*! \return The job's kind, id, keys, addresses and sizes; kind "none" or "closed" without one. */
  ffi::Map<ffi::String, ffi::Any> NextJob(double seconds);
  /*! \param results A byte for each key: 0 no, 1 yes, 2 verified by the store. \return Lines to
   * log. */
  ffi::Array<ffi::String> FinishJob(int64_t id, const ffi::Bytes& results);
  bool Wait(int64_t ticket, double seconds);
  bool Flush(double seconds);
  void Close() { host_memory_->Close(); }
  /*! \brief Address and size of the memory that jobs read and write. */
  ffi::Shape MemoryRange();

  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("pagedkv.HostMemory", HostMemoryObj, ffi::Object);

 private:
  OwnProcess process_;
  ffi::Tensor memory_;
  std::unique_ptr<HostMemory> host_memory_;
};

class HostMemoryRef : public ffi::ObjectRef {
 public:
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NULLABLE(HostMemoryRef, ffi::ObjectRef, HostMemoryObj);
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_PREFIXES_HOST_MEMORY_OBJECT_H_
