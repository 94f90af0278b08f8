// SPDX-License-Identifier: Apache-2.0
/*!
 * \file checkpoint_layout.cc
 * \brief The layout of checkpoints as text, and the shapes of their page groups.
 */
#include "checkpoint/checkpoint_layout.h"

#include <limits>
#include <numeric>

#include "base/text_stream.h"

namespace pagedkv {

std::string RopeText(const std::string& mode, double theta, double scale,
                     const std::string& details) {
  if (mode == "none") return mode;
  ClassicText text;
  text.precision(std::numeric_limits<double>::max_digits10);
  text << mode << " theta=" << theta << " scale=" << scale;
  if (!details.empty()) text << " " << details;
  return text.str();
}

std::string CheckpointLayout::Layer::Text() const {
  ClassicText text;
  text << kind;
  if (!is_attention()) return kind + " " + details;
  if (window) text << " window=" << window;
  if (!has_one_row()) text << " num_kv_heads=" << num_kv_heads;
  text << " qk_head_dim=" << qk_head_dim << " v_head_dim=" << v_head_dim;
  if (!has_one_row()) text << " rope=" << rope;
  if (!kv_scales.empty()) text << " kv_scales=" << kv_scales;
  return text.str();
}

std::string CheckpointLayout::Types() const {
  ClassicText text;
  for (size_t i = 0, end; i < layers.size(); i = end) {
    for (end = i + 1; end < layers.size() && layers[end].kv_dtype == layers[i].kv_dtype;) ++end;
    if (end - i == layers.size()) return layers[i].kv_dtype;
    text << (i ? ", " : "") << end - i << " x " << layers[i].kv_dtype;
  }
  return text.str();
}

std::string CheckpointLayout::Text() const {
  ClassicText text;
  text << "page_size=" << page_size << " dtype=" << Types();
  for (size_t i = 0, end; i < layers.size(); i = end) {
    const std::string layer = layers[i].Text();
    for (end = i + 1; end < layers.size() && layers[end].Text() == layer;) ++end;
    text << "; " << end - i << " x " << layer;
  }
  if (!part.empty()) text << "; " << part;
  return text.str();
}

std::string CheckpointLayout::Hash() const { return HexHash(Text()); }

std::string HexHash(const std::string& bytes) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (unsigned char c : bytes) hash = (hash ^ c) * 1099511628211u;
  std::string digits(16, '0');
  for (auto it = digits.rbegin(); it != digits.rend(); ++it, hash >>= 4) {
    *it = "0123456789abcdef"[hash & 15];
  }
  return digits;
}

std::vector<int64_t> CheckpointLayout::GroupShape(int64_t layer, int64_t num_pages) const {
  const Layer& l = layers[layer];
  if (l.codec_page_bytes) return {1, num_pages, l.codec_page_bytes};
  if (l.has_one_row()) return {1, num_pages, page_size, l.qk_head_dim};
  if (l.qk_head_dim != l.v_head_dim) {  // the rows of K, then those of V
    return {1, num_pages, l.num_kv_heads * page_size * (l.qk_head_dim + l.v_head_dim)};
  }
  return {1, num_pages, 2, l.num_kv_heads, page_size, l.qk_head_dim};
}

std::vector<int64_t> CheckpointLayout::StatesShape(int64_t layer, int64_t num_pages) const {
  std::vector<int64_t> shape{1, num_pages};
  const std::vector<int64_t>& state = layers[layer].state_shape;
  shape.insert(shape.end(), state.begin(), state.end());
  return shape;
}

std::vector<int64_t> CheckpointLayout::LayersOfGroups() const {
  std::vector<int64_t> of_groups(layers.size());
  std::iota(of_groups.begin(), of_groups.end(), 0);
  for (int64_t l = 0; l < num_layers(); ++l) {
    if (layers[l].interval > 0) of_groups.push_back(l);
  }
  return of_groups;
}

int64_t CheckpointLayout::PageBytes(int64_t layer) const {
  int64_t bytes = layers[layer].codec_page_bytes ? 1 : layers[layer].item_bytes;
  for (int64_t extent : GroupShape(layer, 1)) bytes *= extent;
  return bytes;
}

}  // namespace pagedkv
