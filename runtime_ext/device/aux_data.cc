// SPDX-License-Identifier: Apache-2.0
/*!
 * \file aux_data.cc
 * \brief The int32 arrays of a step.
 */
#include "device/aux_data.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <numeric>
#include <utility>

#include "device/red_zone.h"

namespace pagedkv {

namespace {

// Elements. Compiled functions rely on tensors that begin at a multiple of as many bytes.
constexpr int64_t kAlignment = 64 / sizeof(int32_t);
constexpr size_t kNumTurns = 4, kTurnsOfStream = 2;
constexpr int64_t kRedZone = kRedZoneBytes / sizeof(int32_t);  // elements

int64_t RoundUp(int64_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

AuxData::AuxData(bool is_merged, DLDevice device, const std::vector<int64_t>& sizes,
                 ByteCounter counter, const std::vector<std::vector<int64_t>>& row_shapes)
    : is_merged_(is_merged),
      device_(device),
      counter_(std::move(counter)),
      has_streams_(HasStreams(device)),
      turns_(has_streams_ ? kNumTurns : 1) {
  AddArrays(sizes.size(), row_shapes);
  for (Turn& turn : turns_) {
    turn_ = &turn;
    Layout(sizes);  // memory for every step now: to allocate may stop the device
  }
  turn_ = &turns_.front();
  if (!has_streams_) return;
  for (size_t i = 0; i < kNumTurns; ++i) {
    turns_[i].copies =
        i % kTurnsOfStream == 0 ? std::make_shared<DeviceStream>(device_) : turns_[i - 1].copies;
  }
}

void AuxData::AddArrays(size_t count, const std::vector<std::vector<int64_t>>& row_shapes) {
  for (Turn& turn : turns_) {
    if (is_merged_) turn.buffers.resize(1);
    for (size_t i = 0; i < count; ++i) {
      const std::vector<int64_t> shape =
          i < row_shapes.size() ? row_shapes[i] : std::vector<int64_t>();
      const int64_t row_size =
          std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>());
      if (!is_merged_) turn.buffers.emplace_back();
      turn.arrays.push_back(
          {turn.buffers.size() - 1, row_size, 0, nullptr, StepView(kInt32, shape)});
    }
  }
}

AuxData::~AuxData() {
  if (device_.device_type == kDLCPU) return;
  // Best effort: a device that fails here has failed before, where it could be told.
  try {
    if (has_streams_ && turn_->is_uploaded) OrderAfterReaders(*turn_);
    for (const Turn& turn : turns_) WaitForCopies(turn);
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
    host = AllocateTensor({capacity}, kInt32, StagingDevice(device_), UncountedBytes());
  }
  buffer->capacity = capacity;
  buffer->host = std::move(host);
  buffer->device = std::move(device);
}

void AuxData::OrderAfterReaders(const Turn& turn) {
  // All kernels are queued that read the arrays of the pair. What follows on its stream, the copy
  // of its next step, may overwrite them once these are through; later kernels do not count.
  OrderStreams(device_, CurrentStream(device_), turn.copies->get());
}

void AuxData::WaitForCopies(const Turn& turn) {
  void* stream = turn.copies == nullptr ? nullptr : turn.copies->get();
  if (turn.is_uploaded) Synchronize(device_, stream);
}

void AuxData::NextTurn() {
  // The host is about to write what the last copy of the next turn reads.
  if (!has_streams_) {
    WaitForCopies(*turn_);
    turn_->is_uploaded = false;
    return;
  }
  const auto next = static_cast<size_t>(turn_ - turns_.data() + 1) % turns_.size();
  if (next % kTurnsOfStream == 0) {
    OrderAfterReaders(*turn_);
    WaitForCopies(turns_[next]);
  }
  turn_ = &turns_[next];
  turn_->is_uploaded = false;
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
  void* stream = turn_->copies == nullptr ? nullptr : turn_->copies->get();
  for (const Buffer& buffer : turn_->buffers) {
    if (buffer.size == 0) continue;
    int64_t num_bytes = buffer.size * static_cast<int64_t>(sizeof(int32_t));
    CopyBytes(buffer.host, 0, buffer.device, 0, num_bytes, stream);
    num_bytes_copied_ += num_bytes;
  }
  if (!has_streams_) return;
  OrderStreams(device_, stream, CurrentStream(device_));
}

}  // namespace pagedkv
