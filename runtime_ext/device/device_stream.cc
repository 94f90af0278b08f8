// SPDX-License-Identifier: Apache-2.0
/*!
 * \file device_stream.cc
 * \brief Streams through the functions of TVM's FFI.
 */
#include "device/device_stream.h"

#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <cstdint>
#include <exception>

#include "device/device_memory.h"

namespace pagedkv {

namespace {

/*! \brief A function of the runtime. Never destroyed: streams may be freed at exit. */
const ffi::Function& Required(const char* name) {
  return *new ffi::Function(ffi::Function::GetGlobalRequired(name));
}

int64_t Handle(void* stream) { return reinterpret_cast<int64_t>(stream); }

}  // namespace

bool HasStreams(DLDevice device) {
  return device.device_type == kDLCUDA || device.device_type == kDLROCM;
}

void* CurrentStream(DLDevice device) {
  if (!HasStreams(device)) return nullptr;
  return TVMFFIEnvGetStream(device.device_type, device.device_id);
}

void Synchronize(DLDevice device, void* stream) {
  static const ffi::Function& synchronize = Required("runtime.Device_StreamSync");
  synchronize(device, Handle(stream));
}

ffi::Tensor BytesOnHost(const ffi::Tensor& tensor) {
  const auto num_bytes = static_cast<int64_t>(ffi::GetDataSize(*tensor.GetDLTensorPtr()));
  ffi::Tensor bytes = AllocateTensor({num_bytes}, kByte, {kDLCPU, 0}, UncountedBytes());
  const DLDevice device = tensor.device();
  void* stream = CurrentStream(device);
  CopyBytes(tensor, 0, bytes, 0, num_bytes, stream);
  if (!IsHost(device)) Synchronize(device, stream);
  return bytes;
}

void OrderStreams(DLDevice device, void* before, void* after) {
  static const ffi::Function& order = Required("runtime.Device_StreamSyncFromTo");
  order(device, Handle(before), Handle(after));
}

DeviceStream::DeviceStream(DLDevice device) : device_(device) {
  static const ffi::Function& create = Required("runtime.Device_StreamCreate");
  stream_ = reinterpret_cast<void*>(create(device).cast<int64_t>());
}

DeviceStream::~DeviceStream() {
  if (!process_.IsThis()) return;
  static const ffi::Function& free = Required("runtime.Device_StreamFree");
  // A device that fails here has failed in a call before, which reported it.
  try {
    free(device_, Handle(stream_));
  } catch (const std::exception&) {
  }
}

StreamOrder::Call::Call(StreamOrder* order)
    : order_(order), num_exceptions_(std::uncaught_exceptions()) {
  if (!order->has_streams_) return;
  stream_ = CurrentStream(order->device_);
  is_elsewhere_ = stream_ != order->home_;
  if (is_elsewhere_) OrderStreams(order->device_, order->home_, stream_);
}

StreamOrder::Call::~Call() noexcept(false) {
  // begin_forward has made its own stream the home stream.
  if (!is_elsewhere_ || stream_ == order_->home_) return;
  try {
    OrderStreams(order_->device_, stream_, order_->home_);
  } catch (const std::exception&) {
    if (std::uncaught_exceptions() == num_exceptions_) throw;
  }
}

void StreamOrder::BeginStep() { home_ = CurrentStream(device_); }

void StreamOrder::EndStep() {
  if (home_ == nullptr) return;
  if (between_steps_ == nullptr) between_steps_ = std::make_unique<DeviceStream>(device_);
  if (home_ == between_steps_->get()) return;
  OrderStreams(device_, home_, between_steps_->get());
  home_ = between_steps_->get();
}

void StreamOrder::Synchronize() const {
  if (has_streams_) pagedkv::Synchronize(device_, home_);
}

}  // namespace pagedkv
