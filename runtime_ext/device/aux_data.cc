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

// In elements. Compiled functions rely on tensors that start at a multiple of 64 bytes.
constexpr int64_t kAlignment = 64 / sizeof(int32_t);
constexpr size_t kNumStages = 4, kStagesPerStream = 2;
constexpr int64_t kRedZone = kRedZoneBytes / sizeof(int32_t);  // elements

int64_t RoundUp(int64_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

AuxData::AuxData(bool is_merged, DLDevice device, const std::vector<int64_t>& sizes,
                 ByteCounter counter, const std::vector<std::vector<int64_t>>& row_shapes)
    : is_merged_(is_merged),
      device_(device),
      counter_(std::move(counter)),
      has_streams_(HasStreams(device)),
      stages_(has_streams_ ? kNumStages : 1) {
  AddArrays(sizes.size(), row_shapes);
  for (Stage& stage : stages_) {
    stage_ = &stage;
    Layout(sizes);  // allocate now: an allocation may synchronise the device
  }
  stage_ = &stages_.front();
  if (!has_streams_) return;
  for (size_t i = 0; i < kNumStages; ++i) {
    stages_[i].copies =
        i % kStagesPerStream == 0 ? std::make_shared<DeviceStream>(device_) : stages_[i - 1].copies;
  }
}

void AuxData::AddArrays(size_t count, const std::vector<std::vector<int64_t>>& row_shapes) {
  for (Stage& stage : stages_) {
    if (is_merged_) stage.buffers.resize(1);
    for (size_t i = 0; i < count; ++i) {
      const std::vector<int64_t> shape =
          i < row_shapes.size() ? row_shapes[i] : std::vector<int64_t>();
      const int64_t row_size =
          std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>());
      if (!is_merged_) stage.buffers.emplace_back();
      stage.arrays.push_back(
          {stage.buffers.size() - 1, row_size, 0, nullptr, StepView(kInt32, shape)});
    }
  }
}

AuxData::~AuxData() {
  if (device_.device_type == kDLCPU || !process_.IsThis()) return;
  // Best effort: a device that fails here has failed in a call before, which reported it.
  try {
    if (has_streams_ && stage_->is_uploaded) OrderAfterReaders(*stage_);
    for (const Stage& stage : stages_) WaitForCopies(stage);
  } catch (const std::exception&) {
  }
}

int64_t AuxData::num_bytes() const {
  int64_t num_elements = 0;
  for (const Stage& stage : stages_) {
    for (const Buffer& buffer : stage.buffers) num_elements += buffer.capacity;
  }
  return num_elements * static_cast<int64_t>(sizeof(int32_t));
}

void AuxData::Reserve(Buffer* buffer, int64_t num_elements) {
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

void AuxData::OrderAfterReaders(const Stage& stage) {
  // All kernels that read the arrays of the pair are queued. The next copy on the pair's stream may
  // overwrite the arrays once those kernels are done; it need not wait for later ones.
  OrderStreams(device_, CurrentStream(device_), stage.copies->get());
}

void AuxData::WaitForCopies(const Stage& stage) {
  void* stream = stage.copies == nullptr ? nullptr : stage.copies->get();
  if (stage.is_uploaded) Synchronize(device_, stream);
}

void AuxData::NextStage() {
  // The host is about to write memory that the last copy of the next stage reads.
  if (!has_streams_) {
    WaitForCopies(*stage_);
    stage_->is_uploaded = false;
    return;
  }
  Stage* next = &stages_[static_cast<size_t>(stage_ - stages_.data() + 1) % stages_.size()];
  if (next->copies != stage_->copies) {
    OrderAfterReaders(*stage_);
    WaitForCopies(*next);
  }
  stage_ = next;
  stage_->is_uploaded = false;
}

void AuxData::Layout(const std::vector<int64_t>& sizes) {
  if (stage_->is_uploaded) NextStage();
  std::vector<Array>& arrays = stage_->arrays;
  std::vector<Buffer>& buffers = stage_->buffers;
  for (Buffer& buffer : buffers) buffer.size = 0;
  for (size_t i = 0; i < arrays.size(); ++i) {
    Buffer& buffer = buffers[arrays[i].buffer];
    arrays[i].offset = buffer.size;
    buffer.size += RoundUp(sizes[i] * arrays[i].row_size) + kRedZone;
  }
  for (Buffer& buffer : buffers) {
    // The first buffer has an address for those that have always been empty.
    Reserve(&buffer, &buffer == &buffers.front() ? std::max<int64_t>(buffer.size, 1) : buffer.size);
    if (buffer.capacity > 0) Forbid(buffer.host.data_ptr(), buffer.capacity * sizeof(int32_t));
  }
  for (size_t i = 0; i < arrays.size(); ++i) {
    Array& array = arrays[i];
    const Buffer& buffer = stage_->buffer_of(array);
    array.host = static_cast<int32_t*>(buffer.host.data_ptr()) + array.offset;
    array.view.Set(buffer.device, array.offset * static_cast<int64_t>(sizeof(int32_t)), sizes[i]);
    Allow(array.host, sizes[i] * array.row_size * sizeof(int32_t));
  }
}

ffi::Tensor AuxData::Matrix(size_t i, int64_t num_rows, int64_t num_columns) const {
  const Array& array = stage_->arrays[i];
  const int64_t byte_offset = array.offset * static_cast<int64_t>(sizeof(int32_t));
  return StepView(kInt32, {num_columns})
      .Set(stage_->buffer_of(array).device, byte_offset, num_rows);
}

void AuxData::Upload() {
  if (device_.device_type == kDLCPU) return;
  stage_->is_uploaded = true;
  void* stream = stage_->copies == nullptr ? nullptr : stage_->copies->get();
  for (const Buffer& buffer : stage_->buffers) {
    if (buffer.size == 0) continue;
    const int64_t num_bytes = buffer.size * static_cast<int64_t>(sizeof(int32_t));
    CopyBytes(buffer.host, 0, buffer.device, 0, num_bytes, stream);
    num_bytes_copied_ += num_bytes;
  }
  if (has_streams_) OrderStreams(device_, stream, CurrentStream(device_));
}

}  // namespace pagedkv
