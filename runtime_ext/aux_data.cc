// SPDX-License-Identifier: Apache-2.0
/*!
 * \file aux_data.cc
 * \brief The int32 arrays of a step.
 */
#include "aux_data.h"

#include <tvm/runtime/device_api.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <numeric>
#include <utility>

#include "red_zone.h"

namespace pagedkv {

using tvm::runtime::DeviceAPI;

namespace {

constexpr int64_t kAlignment = 16 / sizeof(int32_t);           // elements
constexpr int64_t kRedZone = kRedZoneBytes / sizeof(int32_t);  // elements

int64_t RoundUp(int64_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; }

bool HasStreams(DLDevice device) {
  return device.device_type == kDLCUDA || device.device_type == kDLROCM;
}

}  // namespace

AuxData::AuxData(bool is_merged, DLDevice device, const std::vector<int64_t>& sizes,
                 ByteCounter counter, const std::vector<std::vector<int64_t>>& row_shapes)
    : is_merged_(is_merged), device_(device), counter_(std::move(counter)) {
  buffers_.resize(is_merged ? 1 : sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    const std::vector<int64_t> shape =
        i < row_shapes.size() ? row_shapes[i] : std::vector<int64_t>();
    const int64_t row_size =
        std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>());
    arrays_.push_back({is_merged ? 0 : i, row_size, 0, nullptr, StepView(kInt32, shape)});
  }
  Layout(sizes);
  if (HasStreams(device_)) copy_stream_ = DeviceAPI::Get(device_)->CreateStream(device_);
}

AuxData::~AuxData() {
  if (device_.device_type == kDLCPU) return;
  // Best effort: a device that fails here has failed before, where it could be told.
  try {
    WaitForCopy();
    if (copy_stream_ != nullptr) DeviceAPI::Get(device_)->FreeStream(device_, copy_stream_);
  } catch (const std::exception&) {
  }
}

int64_t AuxData::num_bytes() const {
  int64_t num_elements = 0;
  for (const Buffer& buffer : buffers_) num_elements += buffer.capacity;
  return num_elements * static_cast<int64_t>(sizeof(int32_t));
}

void AuxData::Reserve(Buffer* buffer, int64_t num_elements) {
  // A buffer of its own for an array that begins empty still needs an address.
  num_elements = std::max<int64_t>(num_elements, 1);
  if (num_elements <= buffer->capacity) return;
  int64_t capacity = std::max(num_elements, 2 * buffer->capacity);
  ffi::Tensor device = AllocateTensor({capacity}, kInt32, device_, counter_);
  ffi::Tensor host = device;
  if (device_.device_type != kDLCPU) {
    host = AllocateTensor({capacity}, kInt32, StagingDevice(device_),
                          std::make_shared<std::atomic<int64_t>>(0));
    if (buffer->capacity > 0) retired_.push_back(buffer->device);
  }
  buffer->capacity = capacity;
  buffer->host = std::move(host);
  buffer->device = std::move(device);
}

void AuxData::WaitForCopy() {
  // The copy waited for all kernels before it, so these no longer read a retired buffer either.
  if (!is_copy_pending_) return;
  DeviceAPI::Get(device_)->StreamSync(device_, copy_stream_);
  is_copy_pending_ = false;
  retired_.clear();
}

void AuxData::Layout(const std::vector<int64_t>& sizes) {
  WaitForCopy();  // the host is about to write what the last copy reads
  for (Buffer& buffer : buffers_) buffer.size = 0;
  for (size_t i = 0; i < arrays_.size(); ++i) {
    Buffer& buffer = buffers_[arrays_[i].buffer];
    arrays_[i].offset = buffer.size;
    buffer.size += RoundUp(sizes[i] * arrays_[i].row_size) + kRedZone;
  }
  for (Buffer& buffer : buffers_) {
    Reserve(&buffer, buffer.size);
    Forbid(buffer.host.data_ptr(), buffer.capacity * sizeof(int32_t));
  }
  for (size_t i = 0; i < arrays_.size(); ++i) {
    Array& array = arrays_[i];
    const Buffer& buffer = buffers_[array.buffer];
    array.host = static_cast<int32_t*>(buffer.host.data_ptr()) + array.offset;
    Allow(array.host, sizes[i] * array.row_size * sizeof(int32_t));
    array.view.Set(buffer.device, array.offset * static_cast<int64_t>(sizeof(int32_t)), sizes[i]);
  }
}

ffi::Tensor AuxData::Matrix(size_t i, int64_t num_rows, int64_t num_columns) const {
  const Array& array = arrays_[i];
  const int64_t byte_offset = array.offset * static_cast<int64_t>(sizeof(int32_t));
  return StepView(kInt32, {num_columns}).Set(buffers_[array.buffer].device, byte_offset, num_rows);
}

void AuxData::Upload() {
  if (device_.device_type == kDLCPU) return;
  DeviceAPI* api = DeviceAPI::Get(device_);
  void* compute_stream = copy_stream_ ? api->GetCurrentStream(device_) : nullptr;
  // The kernels of the last step must have read the buffer before it is overwritten.
  if (copy_stream_) api->SyncStreamFromTo(device_, compute_stream, copy_stream_);
  is_copy_pending_ = true;
  for (const Buffer& buffer : buffers_) {
    if (buffer.size == 0) continue;
    int64_t num_bytes = buffer.size * static_cast<int64_t>(sizeof(int32_t));
    CopyBytes(buffer.host, 0, buffer.device, 0, num_bytes, copy_stream_);
    num_bytes_copied_ += num_bytes;
  }
  if (copy_stream_) api->SyncStreamFromTo(device_, copy_stream_, compute_stream);
}

}  // namespace pagedkv
