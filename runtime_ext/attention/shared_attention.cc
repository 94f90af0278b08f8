// SPDX-License-Identifier: Apache-2.0
/*!
 * \file shared_attention.cc
 * \brief Attention to pages that sequences of a batch have in common, once for all of them.
 *
 * The page tables of a step begin after the shared pages, so the plain kernels come first and see
 * what each sequence has for itself. Then, level by level, one call attends with all rows of every
 * segment to its pages and merges the result into o and lse.
 */
#include <algorithm>

#include "ffi/paged_kv_cache.h"

namespace pagedkv {

bool PagedKVCacheObj::CanSharePrefixes(const Group& group) const {
  // All rows see all of a shared page: not so where a window may end within it.
  if (!config_.share_prefix || group.shape.window > 0) return false;
  for (int64_t l : group.layers) {
    const KernelSet& kernels = KernelsOf(layers_[l]);
    const LayerConfig& layer = layers_[l].config;
    if (!kernels.Has(layer.prefill_shared())) return false;
    if (layer.is_mla()) continue;
    // Kernels of others are not told where the table begins, or plan by themselves.
    for (KernelName name : {layer.prefill(), layer.decode(), layer.tree()}) {
      if (kernels.IsStock(name) || kernels.IsFlashInfer(name)) return false;
    }
  }
  return true;
}

void PagedKVCacheObj::ShareEveryPrefix() {
  RequireIdle("share_every_prefix");
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (CanSharePrefixes(groups_[g])) plan_.SharePrefixes(static_cast<int32_t>(g), 1);
  }
}

void PagedKVCacheObj::SizeSegments() {
  const int32_t num_groups = table_.num_groups();
  const bool had_segments = has_segments_;
  has_segments_ = false;
  for (int32_t g = 0; g < num_groups; ++g) {
    has_segments_ = has_segments_ || !plan_.shared_prefix(g).segments().empty();
  }
  const size_t first = SegmentIndex(0, SegmentArray{});
  if (!has_segments_) {
    if (had_segments) std::fill(array_sizes_.begin() + first, array_sizes_.end(), 0);
    return;
  }
  if (array_sizes_.size() == first) {  // the first step that has any
    aux_->AddArrays(num_groups * kNumSegmentArrays);
    array_sizes_.resize(first + num_groups * kNumSegmentArrays);
  }
  for (int32_t g = 0; g < num_groups; ++g) {
    const auto num_segments = static_cast<int64_t>(plan_.shared_prefix(g).segments().size());
    array_sizes_[SegmentIndex(g, kSegmentPageIndptr)] = num_segments + 1;
    array_sizes_[SegmentIndex(g, kSegmentPageValues)] = plan_.NumSegmentPages(g);
    array_sizes_[SegmentIndex(g, kSegmentFirstPositions)] = num_segments;
    array_sizes_[SegmentIndex(g, kSegmentRowIndptr)] = num_segments + 1;
    array_sizes_[SegmentIndex(g, kSegmentRows)] = plan_.NumSegmentRows(g);
  }
}

void PagedKVCacheObj::FillSegments() {
  for (int32_t g = 0; g < table_.num_groups(); ++g) {
    auto host = [&](SegmentArray array) { return aux_->host(SegmentIndex(g, array)); };
    plan_.FillSegmentPageIndptr(g, host(kSegmentPageIndptr));
    plan_.FillSegmentPageValues(g, host(kSegmentPageValues));
    plan_.FillSegmentFirstPositions(g, host(kSegmentFirstPositions));
    plan_.FillSegmentRowIndptr(g, host(kSegmentRowIndptr));
    plan_.FillSegmentRows(g, host(kSegmentRows));
  }
}

void PagedKVCacheObj::CountPagesRead() {
  step_pages_read_ = step_pages_read_without_sharing_ = 0;
  for (int32_t g = 0; g < table_.num_groups(); ++g) {
    const int64_t num_own = array_sizes_[ArrayIndex(g, kPageValues)];
    step_pages_read_ += num_own + plan_.NumSegmentPages(g);
    step_pages_read_without_sharing_ += num_own + plan_.NumSharedPages(g);
  }
  pages_read_ += step_pages_read_;
  pages_read_without_sharing_ += step_pages_read_without_sharing_;
}

void PagedKVCacheObj::AttendToSegments(const Layer& layer, double sm_scale, const ffi::Tensor& q,
                                       const ffi::Tensor& o, const ffi::Tensor& lse) const {
  const SharedPrefix& shared = plan_.shared_prefix(layer.group);
  if (shared.segments().empty()) return;
  const LayerConfig& config = layer.config;
  const ffi::Function& kernel = KernelsOf(layer).Get(config.prefill_shared());
  auto array = [&](SegmentArray a) -> const ffi::Tensor& {
    return aux_->view(SegmentIndex(layer.group, a));
  };
  for (size_t level = 0; level < shared.num_levels(); ++level) {
    const auto first = static_cast<int64_t>(shared.level_begins()[level]);
    const auto last = static_cast<int64_t>(shared.level_begins()[level + 1]);
    if (config.is_mla()) {
      kernel(q, layer.pages, array(kSegmentPageIndptr), array(kSegmentPageValues),
             array(kSegmentRowIndptr), array(kSegmentRows), o, lse, first, last, sm_scale);
    } else {
      kernel(q, layer.pages, array(kSegmentPageIndptr), array(kSegmentPageValues),
             array(kSegmentFirstPositions), array(kSegmentRowIndptr), array(kSegmentRows),
             common(kQueryPositions), o, lse, first, last, rotary_mode(), config.rope_scale,
             config.rope_theta, sm_scale);
    }
  }
}

}  // namespace pagedkv
