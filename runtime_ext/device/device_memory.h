// SPDX-License-Identifier: Apache-2.0
/*!
 * \file device_memory.h
 * \brief Tensors on the host and on devices: counted allocations, byte copies, and views whose
 * first dimension changes.
 */
#ifndef TVM_PAGEDKV_DEVICE_DEVICE_MEMORY_H_
#define TVM_PAGEDKV_DEVICE_DEVICE_MEMORY_H_

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "device/device_stream.h"
#include "device/shared_memory.h"

namespace pagedkv {

inline constexpr DLDataType kByte{kDLUInt, 8, 1};
inline constexpr DLDataType kInt32{kDLInt, 32, 1};
inline constexpr DLDataType kFloat32{kDLFloat, 32, 1};

/*! \brief Bytes of an element. */
constexpr int64_t ItemSize(DLDataType dtype) { return (dtype.bits + 7) / 8; }

/*! \brief Allocated bytes. Shared with the tensors, which may outlive the cache. */
using ByteCounter = std::shared_ptr<std::atomic<int64_t>>;

/*! \brief A counter that nobody reads, for memory that does not count as a cache's. */
ByteCounter UncountedBytes();

/*! \brief Whether the CPU can read the memory, pinned memory included. */
bool IsHost(DLDevice device);
inline bool IsSame(DLDevice a, DLDevice b) {
  return a.device_type == b.device_type && a.device_id == b.device_id;
}

/*!
 * \brief Refuses sizes that can never fit. A system that overcommits memory would otherwise kill
 * the process later, when the pages fill.
 * \throws Error (MemoryError) when the machine, or the control group of the process (the limit of a
 *   container), has less than `num_bytes`.
 */
void RequireHostMemory(double num_bytes);

/*! \brief A new uninitialised tensor; `counter` includes it until it is freed. */
ffi::Tensor AllocateTensor(ffi::ShapeView shape, DLDataType dtype, DLDevice device,
                           ByteCounter counter);

/*! \brief A tensor at an offset in shared memory, which it keeps alive. */
ffi::Tensor TensorIn(std::shared_ptr<SharedMemory> memory, int64_t byte_offset,
                     ffi::ShapeView shape, DLDataType dtype, ByteCounter counter);

/*!
 * \brief A property of a device.
 * \param kind One of tvm::runtime::DeviceAttrKind.
 */
ffi::Any DeviceAttribute(DLDevice device, int kind);
/*! \brief Whether the machine has the device and the process has its runtime. */
bool DeviceExists(DLDevice device);

/*! \brief The device type of pinned host memory, if any: copies from it are asynchronous. */
DLDevice StagingDevice(DLDevice device);

/*! \brief Copies bytes between tensors; asynchronous on devices with streams. */
void CopyBytes(const ffi::Tensor& source, int64_t source_offset, const ffi::Tensor& destination,
               int64_t destination_offset, int64_t num_bytes, void* stream);

/*!
 * \brief A view of the first rows of a buffer that is reused from step to step without allocation.
 *
 * The view keeps the buffer alive. While someone else holds the tensor, Set makes a new one and
 * leaves theirs as it is.
 */
class StepView {
 public:
  /*! \param row_shape Shape of a row. */
  StepView(DLDataType dtype, std::vector<int64_t> row_shape);

  const ffi::Tensor& Set(const ffi::Tensor& buffer, int64_t byte_offset, int64_t num_rows);
  const ffi::Tensor& get() const { return view_; }

 private:
  DLDataType dtype_;
  std::vector<int64_t> shape_;
  ffi::Tensor buffer_;
  ffi::Tensor view_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_DEVICE_DEVICE_MEMORY_H_
