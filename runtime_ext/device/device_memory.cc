// SPDX-License-Identifier: Apache-2.0
/*!
 * \file device_memory.cc
 * \brief Tensors on the host and on devices, and copies between them.
 */
#include "device/device_memory.h"

#include <tvm/ffi/function.h>
#include <tvm/runtime/device_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <optional>
#include <utility>

#ifdef __unix__
#include <unistd.h>
#endif

#include "base/error.h"
#include "base/process.h"
#include "device/cgroup.h"
#include "device/huge_pages.h"

namespace pagedkv {

namespace {

/*! \brief Host memory, aligned as TVM's kernels expect; large arrays on huge pages. */
struct HostAllocator {
  ByteCounter counter;

  void AllocData(DLTensor* tensor) {
    const auto num_bytes = static_cast<int64_t>(ffi::GetDataSize(*tensor));
    const bool is_huge = WantsHugePages(num_bytes);
    const size_t alignment = is_huge ? kHugePageBytes : tvm::runtime::kAllocAlignment;
    const size_t room = std::max<size_t>(num_bytes, 1);
    tensor->data = std::aligned_alloc(alignment, (room + alignment - 1) / alignment * alignment);
    if (tensor->data == nullptr) {
      Raise(kMemoryError, "cannot allocate ", num_bytes, " bytes on the host");
    }
    if (is_huge) PreferHugePages(tensor->data, num_bytes);
    *counter += num_bytes;
  }
  void FreeData(DLTensor* tensor) {
    *counter -= static_cast<int64_t>(ffi::GetDataSize(*tensor));
    std::free(tensor->data);
  }
};

/*! \brief Device memory, held by a tensor of the runtime. */
struct DeviceAllocator {
  ByteCounter counter;
  ffi::Tensor memory;
  OwnProcess process{};

  void AllocData(DLTensor* tensor) {
    static const auto& allocate =
        *new ffi::Function(ffi::Function::GetGlobalRequired("runtime.TVMTensorAllocWithScope"));
    const auto num_bytes = static_cast<int64_t>(ffi::GetDataSize(*tensor));
    try {
      memory = allocate(ffi::Shape{num_bytes}, kByte, tensor->device, nullptr).cast<ffi::Tensor>();
    } catch (const std::exception& error) {
      Raise(kMemoryError, "cannot allocate ", num_bytes, " bytes: ", error.what());
    }
    tensor->data = memory.data_ptr();
    *counter += num_bytes;
  }
  void FreeData(DLTensor* tensor) {
    *counter -= static_cast<int64_t>(ffi::GetDataSize(*tensor));
    if (!process.IsThis()) new ffi::Tensor(std::move(memory));  // not the child's to free
    memory = ffi::Tensor();
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

ByteCounter UncountedBytes() { return std::make_shared<std::atomic<int64_t>>(0); }

bool IsHost(DLDevice device) {
  return device.device_type == kDLCPU || device.device_type == kDLCUDAHost ||
         device.device_type == kDLROCMHost;
}

void RequireHostMemory(double num_bytes) {
  auto require = [&](double available, const char* who) {
    if (num_bytes <= available) return;
    char message[160];
    std::snprintf(message, sizeof message, "cannot allocate %.0f bytes: %s %.0f", num_bytes, who,
                  available);
    Raise(kMemoryError, message);
  };
#ifdef _SC_PHYS_PAGES
  const double memory =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  if (memory > 0) require(memory, "this machine has");
#endif
  const std::optional<double> limit = CgroupMemoryLimit();
  if (limit) require(*limit, "the control group of this process allows");
}

ffi::Tensor AllocateTensor(ffi::ShapeView shape, DLDataType dtype, DLDevice device,
                           ByteCounter counter) {
  if (device.device_type == kDLCPU) {
    return ffi::Tensor::FromNDAlloc(HostAllocator{std::move(counter)}, shape, dtype, device);
  }
  return ffi::Tensor::FromNDAlloc(DeviceAllocator{std::move(counter), ffi::Tensor()}, shape, dtype,
                                  device);
}

ffi::Tensor TensorIn(std::shared_ptr<SharedMemory> memory, int64_t byte_offset,
                     ffi::ShapeView shape, DLDataType dtype, ByteCounter counter) {
  return ffi::Tensor::FromNDAlloc(
      SharedAllocator{std::move(memory), byte_offset, std::move(counter)}, shape, dtype,
      DLDevice{kDLCPU, 0});
}

ffi::Any DeviceAttribute(DLDevice device, int kind) {
  static const auto& get =
      *new ffi::Function(ffi::Function::GetGlobalRequired("runtime.GetDeviceAttr"));
  return get(static_cast<int64_t>(device.device_type), static_cast<int64_t>(device.device_id),
             static_cast<int64_t>(kind));
}

bool DeviceExists(DLDevice device) {
  return DeviceAttribute(device, tvm::runtime::kExist).try_cast<int64_t>().value_or(0) != 0;
}

DLDevice StagingDevice(DLDevice device) {
  if (device.device_type == kDLCUDA) return {kDLCUDAHost, 0};
  if (device.device_type == kDLROCM) return {kDLROCMHost, 0};
  return {kDLCPU, 0};
}

void CopyBytes(const ffi::Tensor& source, int64_t source_offset, const ffi::Tensor& destination,
               int64_t destination_offset, int64_t num_bytes, void* stream) {
  if (num_bytes == 0) return;
  DLTensor from = *source.GetDLTensorPtr();
  DLTensor to = *destination.GetDLTensorPtr();
  if (from.device.device_type == kDLCPU && to.device.device_type == kDLCPU) {
    std::memmove(static_cast<char*>(to.data) + to.byte_offset + destination_offset,
                 static_cast<const char*>(from.data) + from.byte_offset + source_offset, num_bytes);
    return;
  }
  from.ndim = to.ndim = 1;
  from.shape = to.shape = &num_bytes;
  from.strides = to.strides = nullptr;
  from.dtype = to.dtype = DLDataType{kDLUInt, 8, 1};
  from.byte_offset += source_offset;
  to.byte_offset += destination_offset;
  // The call goes to the device that is not the host.
  DLDevice device = from.device.device_type == kDLCPU ? to.device : from.device;
  if (device.device_type == kDLCUDAHost || device.device_type == kDLROCMHost) device = to.device;
  // The FFI has no copy with a stream, so this is the only call of the C++ interface.
  tvm::runtime::DeviceAPI::Get(device)->CopyDataFromTo(&from, &to, stream);
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
  // Not in `byte_offset`: compiled functions refuse one, and other libraries forget to add it.
  tensor->data = static_cast<char*>(buffer.data_ptr()) + byte_offset;
  return view_;
}

}  // namespace pagedkv
