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
    : is_merged_(is_merged),
      device_(device),
      counter_(std::move(counter)),
      has_streams_(HasStreams(device)),
      turns_(has_streams_ ? 2 : 1) {
  for (Turn& turn : turns_) {
    turn.buffers.resize(is_merged ? 1 : sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i) {
      const std::vector<int64_t> shape =
          i < row_shapes.size() ? row_shapes[i] : std::vector<int64_t>();
      const int64_t row_size =
          std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>());
      turn.arrays.push_back({is_merged ? 0 : i, row_size, 0, nullptr, StepView(kInt32, shape)});
    }
    turn_ = &turn;
    Layout(sizes);  // memory for every step now: to allocate may stop the device
  }
  turn_ = &turns_.front();
  if (!has_streams_) return;
  DeviceAPI* api = DeviceAPI::Get(device_);
  for (Turn& turn : turns_) turn.copy_stream = api->CreateStream(device_);
}

AuxData::~AuxData() {
  if (device_.device_type == kDLCPU) return;
  // Best effort: a device that fails here has failed before, where it could be told.
  try {
    DeviceAPI* api = DeviceAPI::Get(device_);
    if (has_streams_ && turn_->is_uploaded) {
      api->SyncStreamFromTo(device_, api->GetCurrentStream(device_), turn_->copy_stream);
    }
    for (Turn& turn : turns_) {
      WaitForReaders(&turn);
      if (turn.copy_stream != nullptr) api->FreeStream(device_, turn.copy_stream);
    }
  } catch (const std::exception&) {
  }
}

int64_t AuxData::num_bytes() const {
  int64_t num_elements = 0;
  for (const Turn& turn : turns_) {
    for (const Buffer& buffer : turn.buffers) num_elements += buffer.capacity;
  }
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
  }
  buffer->capacity = capacity;
  buffer->host = std::move(host);
  buffer->device = std::move(device);
}

void AuxData::NextTurn() {
  if (has_streams_) {
    // All kernels are queued that read the arrays of this turn. What follows on its stream, the
    // copy of its next step, may overwrite them once these are through; later kernels do not count.
    DeviceAPI* api = DeviceAPI::Get(device_);
    api->SyncStreamFromTo(device_, api->GetCurrentStream(device_), turn_->copy_stream);
    turn_ = turn_ == &turns_.front() ? &turns_.back() : &turns_.front();
  }
  if (turn_->is_uploaded) WaitForReaders(turn_);
}

void AuxData::WaitForReaders(Turn* turn) {
  // The host is about to write what the last copy of this turn reads, or to free it.
  if (turn->is_uploaded) DeviceAPI::Get(device_)->StreamSync(device_, turn->copy_stream);
  turn->is_uploaded = false;
}

void AuxData::Layout(const std::vector<int64_t>& sizes) {
  if (turn_->is_uploaded) NextTurn();
  std::vector<Array>& arrays = turn_->arrays;
  std::vector<Buffer>& buffers = turn_->buffers;
  for (Buffer& buffer : buffers) buffer.size = 0;
  for (size_t i = 0; i < arrays.size(); ++i) {
    Buffer& buffer = buffers[arrays[i].buffer];
    arrays[i].offset = buffer.size;
    buffer.size += RoundUp(sizes[i] * arrays[i].row_size) + kRedZone;
  }
  for (Buffer& buffer : buffers) {
    Reserve(&buffer, buffer.size);
    Forbid(buffer.host.data_ptr(), buffer.capacity * sizeof(int32_t));
  }
  for (size_t i = 0; i < arrays.size(); ++i) {
    Array& array = arrays[i];
    const Buffer& buffer = buffers[array.buffer];
    array.host = static_cast<int32_t*>(buffer.host.data_ptr()) + array.offset;
    Allow(array.host, sizes[i] * array.row_size * sizeof(int32_t));
    array.view.Set(buffer.device, array.offset * static_cast<int64_t>(sizeof(int32_t)), sizes[i]);
  }
}

ffi::Tensor AuxData::Matrix(size_t i, int64_t num_rows, int64_t num_columns) const {
  const Array& array = turn_->arrays[i];
  const int64_t byte_offset = array.offset * static_cast<int64_t>(sizeof(int32_t));
  return StepView(kInt32, {num_columns})
      .Set(turn_->buffers[array.buffer].device, byte_offset, num_rows);
}

void AuxData::Upload() {
  if (device_.device_type == kDLCPU) return;
  turn_->is_uploaded = true;
  for (const Buffer& buffer : turn_->buffers) {
    if (buffer.size == 0) continue;
    int64_t num_bytes = buffer.size * static_cast<int64_t>(sizeof(int32_t));
    CopyBytes(buffer.host, 0, buffer.device, 0, num_bytes, turn_->copy_stream);
    num_bytes_copied_ += num_bytes;
  }
  if (!has_streams_) return;
  DeviceAPI* api = DeviceAPI::Get(device_);
  api->SyncStreamFromTo(device_, turn_->copy_stream, api->GetCurrentStream(device_));
}

}  // namespace pagedkv
