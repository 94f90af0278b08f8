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
    for (const LayerConfig& layer : config.layers) {
      total_bytes += PoolBytes(layer) + StatePoolBytes(layer);
    }
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
                    AllocatePages(layer, offset),
                    {}};
      offset += PoolBytes(layer);
    }
  }
  const std::vector<StateGroup> state_groups = StateGroups();
  for (size_t s = 0; s < state_groups.size(); ++s) {
    for (int64_t i : groups_[state_groups[s].ingredients].layers) {
      layers_[i].state_group = static_cast<int32_t>(s);
      AllocateStates(&layers_[i], offset);
      offset += StatePoolBytes(layers_[i].config);
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
    const auto num_layers = static_cast<double>(group.layers.size());
    num_bytes += num_pages * (kStateBytes + page_bytes * num_layers);
    if (!shape.recurrent) continue;
    const RecurrentShape& state = *shape.recurrent;
    num_bytes += num_layers * static_cast<double>(config_.NumStates(state)) *
                 static_cast<double>(state.state_bytes());
  }
  RequireHostMemory(num_bytes);
}

SlotLayout LayerStorage::LayoutOf(const LayerConfig& layer) const {
  const int64_t page_size = config_.page_size, rows_per_slot = layer.rows_per_slot();
  if (layer.codec) {
    return SlotLayout::Quantized(page_size, rows_per_slot, *layer.codec);
  }
  if (layer.has_two_widths()) {
    const int64_t item_bytes = ItemSize(layer.page_dtype);
    return SlotLayout::TwoWidths(page_size, layer.num_kv_heads, layer.qk_head_dim * item_bytes,
                                 layer.v_head_dim * item_bytes);
  }
  return SlotLayout::Plain(page_size, rows_per_slot,
                           layer.qk_head_dim * ItemSize(layer.page_dtype));
}

namespace {

/*! \brief Rounds up to a page of memory, so that each pool can be mapped. */
int64_t Aligned(int64_t num_bytes) {
  constexpr int64_t kAlignment = 4096;
  return (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

int64_t LayerStorage::PoolBytes(const LayerConfig& layer) const {
  return Aligned(config_.NumPages(layer) * LayoutOf(layer).page_bytes);
}

int64_t LayerStorage::StatePoolBytes(const LayerConfig& layer) const {
  if (!layer.recurrent) return 0;
  return Aligned(config_.NumStates(*layer.recurrent) * layer.recurrent->state_bytes());
}

ffi::Tensor LayerStorage::AllocatePages(const LayerConfig& layer, int64_t shared_offset) const {
  std::vector<int64_t> shape{config_.NumPages(layer)};
  if (layer.codec) {
    shape.push_back(layer.codec->page_bytes);
  } else if (layer.has_two_widths()) {
    shape.push_back(LayoutOf(layer).page_bytes / ItemSize(layer.page_dtype));
  } else {
    if (layer.is_mha()) shape.insert(shape.end(), {2, layer.num_kv_heads});
    shape.insert(shape.end(), {config_.page_size, layer.qk_head_dim});
  }
  if (shared_pages_ == nullptr) {
    return AllocateTensor(ffi::Shape(shape), layer.page_dtype, config_.device, counter_);
  }
  return TensorIn(shared_pages_, shared_offset, ffi::Shape(shape), layer.page_dtype, counter_);
}

void LayerStorage::AllocateStates(StoredLayer* layer, int64_t shared_offset) const {
  const RecurrentShape& shape = *layer->config.recurrent;
  const ffi::Shape extents{config_.NumStates(shape), shape.num_heads, shape.key_dim,
                           shape.value_dim};
  layer->states =
      shared_pages_ == nullptr
          ? AllocateTensor(extents, shape.state_dtype, config_.device, counter_)
          : TensorIn(shared_pages_, shared_offset, extents, shape.state_dtype, counter_);
}

int64_t LayerStorage::PartAt(int64_t layer_id, int64_t LayerParts::* part) const {
  config_.stage.RequireOwn(layer_id);
  return config_.layer_parts[layer_id - config_.stage.begin()].*part;
}

const StoredLayer& LayerStorage::At(int64_t layer_id) const {
  const int64_t index = PartAt(layer_id, &LayerParts::attention);
  if (index >= 0) return layers_[index];
  if (PartAt(layer_id, &LayerParts::recurrent) >= 0) {
    Raise(kValueError, "layer ", layer_id, " is a recurrent layer: it keeps no K and V");
  }
  if (PartAt(layer_id, &LayerParts::conv) >= 0) {
    Raise(kValueError, "layer ", layer_id, " is a short convolution: it keeps no K and V");
  }
  Raise(kValueError, "layer ", layer_id, " is a linear attention layer: it keeps no K and V here");
}

const StoredLayer& LayerStorage::Recurrent(int64_t layer_id) const {
  const int64_t index = PartAt(layer_id, &LayerParts::recurrent);
  if (index < 0) Raise(kValueError, "layer ", layer_id, " is no recurrent layer");
  return layers_[index];
}

const StoredLayer& LayerStorage::Conv(int64_t layer_id) const {
  const int64_t index = PartAt(layer_id, &LayerParts::conv);
  if (index < 0) Raise(kValueError, "layer ", layer_id, " has no short convolution");
  return layers_[index];
}

ffi::Tensor LayerStorage::PoolOf(int64_t page_group) const {
  auto num_left = page_group - static_cast<int64_t>(layers_.size());
  if (page_group >= 0 && num_left < 0) return layers_[page_group].pages;
  for (const StoredLayer& layer : layers_) {
    if (num_left >= 0 && layer.config.recurrent && num_left-- == 0) return layer.states;
  }
  Raise(kIndexError, "no page group ", page_group, " in the cache");
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
  for (const LayerGroup& group : groups_) windows.push_back(group.shape.signed_window());
  return windows;
}

std::vector<StateGroup> LayerStorage::StateGroups() const {
  std::vector<StateGroup> state_groups;
  for (int32_t g = 0; g < num_groups(); ++g) {
    const LayerConfig& shape = groups_[g].shape;
    if (shape.recurrent) state_groups.push_back({g, shape.recurrent->interval});
  }
  return state_groups;
}

std::vector<int32_t> LayerStorage::NumStates() const {
  std::vector<int32_t> num_states;
  for (const StateGroup& group : StateGroups()) {
    const LayerConfig& shape = groups_[group.ingredients].shape;
    num_states.push_back(static_cast<int32_t>(config_.NumStates(*shape.recurrent)));
  }
  return num_states;
}

std::vector<int64_t> LayerStorage::NumTaps() const {
  std::vector<int64_t> num_taps;
  for (const LayerGroup& group : groups_) {
    const bool is_conv = group.shape.kind == LayerKind::kConv;
    num_taps.push_back(is_conv ? group.shape.window - 1 : 0);
  }
  return num_taps;
}

ffi::Shape LayerStorage::SharedPages() const {
  if (shared_pages_ == nullptr) return {-1, 0};
  return {shared_pages_->descriptor(), shared_pages_->num_bytes()};
}

}  // namespace pagedkv
