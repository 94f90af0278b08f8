// SPDX-License-Identifier: Apache-2.0
/*!
 * \file device_memory.cc
 * \brief Tensors over DeviceAPI.
 */
#include "device_memory.h"

#include <tvm/runtime/device_api.h>

#include <exception>
#include <iomanip>
#include <utility>

#ifdef __unix__
#include <unistd.h>
#endif

#include "error.h"
#include "huge_pages.h"

namespace pagedkv {

using tvm::runtime::DeviceAPI;

namespace {

struct CountedAllocator {
  ByteCounter counter;

  void AllocData(DLTensor* tensor) {
    auto num_bytes = static_cast<int64_t>(ffi::GetDataSize(*tensor));
    const bool is_huge = tensor->device.device_type == kDLCPU && WantsHugePages(num_bytes);
    const size_t alignment = is_huge ? kHugePageBytes : tvm::runtime::kAllocAlignment;
    try {
      tensor->data = DeviceAPI::Get(tensor->device)
                         ->AllocDataSpace(tensor->device, num_bytes, alignment, tensor->dtype);
    } catch (const std::exception& error) {
      Raise(kMemoryError, "cannot allocate ", num_bytes, " bytes: ", error.what());
    }
    if (is_huge) PreferHugePages(tensor->data, num_bytes);
    *counter += num_bytes;
  }
  void FreeData(DLTensor* tensor) {
    *counter -= static_cast<int64_t>(ffi::GetDataSize(*tensor));
    DeviceAPI::Get(tensor->device)->FreeDataSpace(tensor->device, tensor->data);
  }
};

struct SharedAllocator {
  std::shared_ptr<SharedMemory> memory;
  int64_t byte_offset;
  ByteCounter counter;

  void AllocData(DLTensor* tensor) {
    tensor->data = memory->data() + byte_offset;
    *counter += static_cast<int64_t>(ffi::GetDataSize(*tensor));
  }
  void FreeData(DLTensor* tensor) {
    *counter -= static_cast<int64_t>(ffi::GetDataSize(*tensor));
    memory.reset();
  }
};

struct ViewAllocator {
  ffi::Tensor buffer;

  void AllocData(DLTensor* tensor) { tensor->data = buffer.data_ptr(); }
  void FreeData(DLTensor*) {}
};

}  // namespace

void RequireHostMemory(double num_bytes) {
#ifdef _SC_PHYS_PAGES
  const double available =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  if (available > 0 && num_bytes > available) {
    Raise(kMemoryError, std::fixed, std::setprecision(0), "cannot allocate ", num_bytes,
          " bytes: this machine has ", available);
  }
#endif
}

ffi::Tensor AllocateTensor(ffi::ShapeView shape, DLDataType dtype, DLDevice device,
                           ByteCounter counter) {
  return ffi::Tensor::FromNDAlloc(CountedAllocator{std::move(counter)}, shape, dtype, device);
}

ffi::Tensor TensorIn(std::shared_ptr<SharedMemory> memory, int64_t byte_offset,
                     ffi::ShapeView shape, DLDataType dtype, ByteCounter counter) {
  return ffi::Tensor::FromNDAlloc(
      SharedAllocator{std::move(memory), byte_offset, std::move(counter)}, shape, dtype,
      DLDevice{kDLCPU, 0});
}

DLDevice StagingDevice(DLDevice device) {
  if (device.device_type == kDLCUDA) return {kDLCUDAHost, 0};
  if (device.device_type == kDLROCM) return {kDLROCMHost, 0};
  return {kDLCPU, 0};
}

bool HasStreams(DLDevice device) {
  return device.device_type == kDLCUDA || device.device_type == kDLROCM;
}

DeviceStream::DeviceStream(DLDevice device)
    : device_(device), stream_(DeviceAPI::Get(device)->CreateStream(device)) {}

DeviceStream::~DeviceStream() {
  // A device that fails here has failed before, where it could be told.
  try {
    DeviceAPI::Get(device_)->FreeStream(device_, stream_);
  } catch (const std::exception&) {
  }
}

void CopyBytes(const ffi::Tensor& source, int64_t source_offset, const ffi::Tensor& destination,
               int64_t destination_offset, int64_t num_bytes, void* stream) {
  DLTensor from = *source.GetDLTensorPtr();
  DLTensor to = *destination.GetDLTensorPtr();
  from.ndim = to.ndim = 1;
  from.shape = to.shape = &num_bytes;
  from.strides = to.strides = nullptr;
  from.dtype = to.dtype = DLDataType{kDLUInt, 8, 1};
  from.byte_offset += source_offset;
  to.byte_offset += destination_offset;
  // The call goes to the device that is not the host.
  DLDevice device = from.device.device_type == kDLCPU ? to.device : from.device;
  if (device.device_type == kDLCUDAHost || device.device_type == kDLROCMHost) device = to.device;
  DeviceAPI::Get(device)->CopyDataFromTo(&from, &to, stream);
}

StepView::StepView(DLDataType dtype, std::vector<int64_t> row_shape) : dtype_(dtype) {
  shape_.push_back(0);
  shape_.insert(shape_.end(), row_shape.begin(), row_shape.end());
}

const ffi::Tensor& StepView::Set(const ffi::Tensor& buffer, int64_t byte_offset, int64_t num_rows) {
  shape_[0] = num_rows;
  if (!view_.unique() || !buffer_.same_as(buffer)) {
    view_ = ffi::Tensor::FromNDAlloc(ViewAllocator{buffer},
                                     ffi::ShapeView(shape_.data(), shape_.size()), dtype_,
                                     buffer.device());
    buffer_ = buffer;
  }
  auto* tensor = const_cast<DLTensor*>(view_.GetDLTensorPtr());
  tensor->shape[0] = num_rows;
  tensor->byte_offset = byte_offset;
  return view_;
}

}  // namespace pagedkv
