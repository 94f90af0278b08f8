// SPDX-License-Identifier: Apache-2.0
/*!
 * \file layer_storage.cc
 * \brief Groups of layers and the memory of their pages.
 */
#include "storage/layer_storage.h"

#include <utility>

#include "base/error.h"

namespace pagedkv {

LayerStorage::LayerStorage(const CacheConfig& config)
    : config_(config), counter_(std::make_shared<std::atomic<int64_t>>(0)) {
  MakeGroups();
  RequireMemory();
  if (config.enable_kv_transfer && config.device.device_type == kDLCPU) {
    int64_t total_bytes = 0;
    for (const LayerConfig& layer : config.layers) total_bytes += PoolBytes(layer);
    shared_pages_ = std::make_shared<SharedMemory>(total_bytes);
  }
  layers_.resize(config.layers.size());
  int64_t offset = 0;
  for (int32_t g = 0; g < num_groups(); ++g) {
    for (int64_t i : groups_[g].layers) {
      const LayerConfig& layer = config.layers[i];
      layers_[i] = {layer,
                    i,
                    g,
                    &config.kernel_sets[layer.kernel_set],
                    LayoutOf(layer),
                    AllocatePages(layer, offset)};
      offset += PoolBytes(layer);
    }
  }
  num_bytes_ = *counter_;
}

void LayerStorage::MakeGroups() {
  for (size_t i = 0; i < config_.layers.size(); ++i) {
    const LayerConfig& layer = config_.layers[i];
    size_t g = 0;
    while (g < groups_.size() && !groups_[g].shape.SharesGroupWith(layer)) ++g;
    if (g == groups_.size()) groups_.push_back({layer, {}});
    groups_[g].layers.push_back(static_cast<int64_t>(i));
  }
}

void LayerStorage::RequireMemory() const {
  if (config_.device.device_type != kDLCPU) return;     // other devices fail at once when full
  constexpr double kStateBytes = 12 * sizeof(int32_t);  // of a page: pool, plan and page tables
  double num_bytes = 0;
  for (const LayerGroup& group : groups_) {
    const LayerConfig& shape = group.shape;
    const auto page_bytes = static_cast<double>(LayoutOf(shape).page_bytes);
    const double num_pages = static_cast<double>(config_.NumPages(shape));
    num_bytes += num_pages * (kStateBytes + page_bytes * static_cast<double>(group.layers.size()));
  }
  RequireHostMemory(num_bytes);
}

SlotLayout LayerStorage::LayoutOf(const LayerConfig& layer) const {
  const int64_t page_size = config_.page_size, rows_per_slot = layer.rows_per_slot();
  if (layer.codec) {
    return SlotLayout::Quantized(page_size, rows_per_slot, *layer.codec);
  }
  return SlotLayout::Plain(page_size, rows_per_slot,
                           layer.qk_head_dim * ItemSize(layer.page_dtype));
}

int64_t LayerStorage::PoolBytes(const LayerConfig& layer) const {
  constexpr int64_t kAlignment = 4096;  // of a page of memory, so that each pool can be mapped
  const int64_t num_bytes = config_.NumPages(layer) * LayoutOf(layer).page_bytes;
  return (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
}

ffi::Tensor LayerStorage::AllocatePages(const LayerConfig& layer, int64_t shared_offset) const {
  std::vector<int64_t> shape{config_.NumPages(layer)};
  if (layer.codec) {
    shape.push_back(layer.codec->page_bytes);
  } else {
    if (!layer.is_mla()) shape.insert(shape.end(), {2, layer.num_kv_heads});
    shape.insert(shape.end(), {config_.page_size, layer.qk_head_dim});
  }
  if (shared_pages_ == nullptr) {
    return AllocateTensor(ffi::Shape(shape), layer.page_dtype, config_.device, counter_);
  }
  return TensorIn(shared_pages_, shared_offset, ffi::Shape(shape), layer.page_dtype, counter_);
}

const StoredLayer& LayerStorage::At(int64_t layer_id) const {
  config_.stage.RequireOwn(layer_id);
  const int64_t index = config_.layer_index[layer_id - config_.stage.begin()];
  if (index < 0) {
    Raise(kValueError, "layer ", layer_id,
          " is a linear attention layer: it keeps no K and V here");
  }
  return layers_[index];
}

std::vector<int32_t> LayerStorage::NumPages() const {
  std::vector<int32_t> num_pages;
  for (const LayerGroup& group : groups_) {
    num_pages.push_back(static_cast<int32_t>(config_.NumPages(group.shape)));
  }
  return num_pages;
}

std::vector<int64_t> LayerStorage::Windows() const {
  std::vector<int64_t> windows;
  for (const LayerGroup& group : groups_) windows.push_back(group.shape.window);
  return windows;
}

ffi::Shape LayerStorage::SharedPages() const {
  if (shared_pages_ == nullptr) return {-1, 0};
  return {shared_pages_->descriptor(), shared_pages_->num_bytes()};
}

}  // namespace pagedkv
