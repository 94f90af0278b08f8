// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_groups.cc
 * \brief The page groups of a checkpoint, and the layout that they have in this cache.
 */
#include "checkpoint/page_groups.h"

#include <tvm/ffi/dtype.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/text_stream.h"
#include "device/device_stream.h"

namespace pagedkv {

namespace {

const char* ToString(RopeMode mode) {
  constexpr const char* kNames[] = {"none", "normal", "inline"};
  return kNames[static_cast<int>(mode)];
}

std::string HashOf(const ffi::Tensor& tensor) {
  const ffi::Tensor bytes = BytesOnHost(tensor);
  return HexHash(std::string(static_cast<const char*>(bytes.data_ptr()), bytes.numel()));
}

/*! \brief What decides the rotation besides theta and scale, in words. */
std::string RopeDetails(const CacheConfig& config, const LayerConfig& layer) {
  const ffi::Tensor& factors = config.rope_ext_factors;
  if (!factors.defined() || !layer.has_normal_rope()) return layer.rope_details;
  return layer.rope_details + " factors=" + HashOf(factors);
}

/*! \brief Of a recurrent layer or a short convolution. */
void DescribeRows(const LayerConfig& config, CheckpointLayout::Layer* layer) {
  ClassicText text;
  if (config.recurrent) {
    const RecurrentShape& shape = *config.recurrent;
    text << "num_heads=" << shape.num_heads << " num_key_heads=" << shape.num_key_heads
         << " key_dim=" << shape.key_dim << " value_dim=" << shape.value_dim
         << " decay=" << (shape.decays_by_channel ? "channel" : "head")
         << (shape.has_beta ? " beta" : "") << " checkpoint_tokens=" << shape.interval;
    layer->state_dtype = ffi::DLDataTypeToString(shape.state_dtype);
    if (layer->state_dtype != "float32") text << " state_dtype=" << layer->state_dtype;
    layer->interval = shape.interval;
    layer->state_shape = {shape.num_heads, shape.key_dim, shape.value_dim};
    layer->state_item_bytes = ItemSize(shape.state_dtype);
  } else {
    text << "channels=" << config.qk_head_dim << " width=" << config.window;
  }
  layer->details = text.str();
}

CheckpointLayout LayoutOf(const LayerStorage& storage) {
  const CacheConfig& config = storage.config();
  CheckpointLayout layout;
  layout.page_size = config.page_size;
  for (const StoredLayer& layer : storage.layers()) {
    const LayerConfig& shape = layer.config;
    layout.layers.push_back({pagedkv::ToString(shape), shape.window, shape.num_kv_heads,
                             shape.qk_head_dim, shape.v_head_dim,
                             RopeText(ToString(shape.rope_mode), shape.rope_theta, shape.rope_scale,
                                      RopeDetails(config, shape)),
                             shape.codec ? shape.codec->Format() : shape.kv_dtype(),
                             ItemSize(shape.page_dtype),
                             shape.codec ? shape.codec->page_bytes : 0});
    if (!shape.is_attention()) DescribeRows(shape, &layout.layers.back());
    if (shape.kv_scales.defined()) layout.layers.back().kv_scales = HashOf(shape.kv_scales);
  }
  // Layers of one stage may look like those of another.
  if (layout.num_layers() < config.stage.num_layers()) {
    layout.part = "of " + std::to_string(config.stage.num_layers()) + " layers:";
    for (const StoredLayer& layer : storage.layers()) {
      layout.part += " " + std::to_string(layer.config.id);
    }
  }
  return layout;
}

}  // namespace

PageGroups::PageGroups(const LayerStorage& storage)
    : storage_(storage), layout_(LayoutOf(storage)) {
  for (int64_t index : layout_.LayersOfGroups()) {
    const StoredLayer& layer = storage.layers()[index];
    const bool has_states = groups_.size() >= storage.layers().size();
    groups_.push_back(
        {&layer, has_states ? storage.num_groups() + layer.state_group : layer.group, has_states});
  }
}

const PageGroup& PageGroups::At(int64_t id, const char* what) const {
  const auto num_groups = static_cast<int64_t>(groups_.size());
  if (id < 0 || id >= num_groups) {
    Raise(kIndexError, what, " ", id, " is not in [0, ", num_groups,
          "): there is one for each layer",
          num_groups > layout_.num_layers() ? ", and one for the states of each recurrent layer"
                                            : "");
  }
  return groups_[id];
}

void PageGroups::CheckTensor(const char* name, const ffi::Tensor& tensor, int64_t id,
                             int64_t num_pages) const {
  if (!tensor.defined()) Raise(kTypeError, name, " must be a tensor, got None");
  const PageGroup& group = groups_[id];
  const int64_t layer = group.layer->index;
  const std::vector<int64_t> expected = group.has_states ? layout_.StatesShape(layer, num_pages)
                                                         : layout_.GroupShape(layer, num_pages);
  ffi::ShapeView actual = tensor.shape();
  if (!std::equal(actual.begin(), actual.end(), expected.begin(), expected.end())) {
    auto text = [](const auto& shape) {
      std::string list;
      for (int64_t extent : shape) list += (list.empty() ? "" : ", ") + std::to_string(extent);
      return "[" + list + "]";
    };
    Raise(kValueError, name, " must have shape ", text(expected), ", got ", text(actual));
  }
  const std::string dtype = ffi::DLDataTypeToString(tensor.dtype());
  const std::string expected_dtype =
      group.has_states ? layout_.layers[layer].state_dtype : layout_.layers[layer].GroupDtype();
  if (dtype != expected_dtype) {
    Raise(kValueError, name, " must be ", expected_dtype, ", got ", dtype);
  }
  const DLDevice device = storage_.device();
  if (!IsHost(tensor.device()) && !IsSame(tensor.device(), device)) {
    Raise(kValueError, name, " must be on the cache's device (type ", device.device_type, ", id ",
          device.device_id, ") or on the host, got type ", tensor.device().device_type, ", id ",
          tensor.device().device_id);
  }
  if (!tensor.IsContiguous()) Raise(kValueError, name, " must be contiguous");
}

}  // namespace pagedkv
