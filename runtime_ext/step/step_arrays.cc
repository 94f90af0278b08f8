// SPDX-License-Identifier: Apache-2.0
/*!
 * \file step_arrays.cc
 * \brief The int32 arrays of a step: sizes, content, copy to the device.
 */
#include "step/step_arrays.h"

#include <algorithm>
#include <utility>

namespace pagedkv {

StepArrays::StepArrays(const CacheConfig& config, const SequenceTable& table,
                       const ForwardPlan& plan, std::vector<int64_t> num_taps,
                       const ByteCounter& counter)
    : table_(table),
      plan_(plan),
      plan_arrays_(plan),
      num_groups_(table.num_groups()),
      num_taps_(std::move(num_taps)),
      is_inline_(config.has_inline_rope),
      sizes_(InitialSizes(config)),
      arrays_(config.has_merged_aux, config.device, sizes_, counter, {{2}}) {
  static_assert(kTreeOrder == 0, "the shape of its rows is given for the first array");
}

std::vector<int64_t> StepArrays::InitialSizes(const CacheConfig& config) const {
  const SequenceTable& table = table_;
  // Enough for every step of sequences that share no pages, with trees of one round.
  // KVCacheConfig.memory_bytes computes the same.
  const int64_t num_rows = config.prefill_chunk_size;
  const int64_t num_sequences = std::min(config.max_num_sequences, num_rows);
  std::vector<int64_t> sizes(SegmentIndex(0, SegmentArray{}));
  sizes[kTreeOrder] = num_rows;
  sizes[kTreeOrderIndptr] = num_sequences + 1;
  sizes[kQueryIndptr] = num_sequences + 1;
  sizes[kQueryPositions] = num_rows;
  sizes[kTextPositions] = num_rows;
  sizes[kPastLengths] = num_sequences;
  sizes[kRowReach] = config.can_have_spans() ? num_rows : 0;
  for (int32_t g = 0; g < table.num_groups(); ++g) {
    sizes[Index(g, kPageIndptr)] = num_sequences + 1;
    sizes[Index(g, kPageIds)] = table.pool(g).num_pages();
    const bool has_windows = config.has_sequence_windows && !table.geometry().HasWindow(g);
    sizes[Index(g, kLengths)] = (has_windows ? 4 : 1) * num_sequences;
    sizes[Index(g, kFirstPositions)] = num_sequences;
    sizes[Index(g, kSlots)] = num_rows;
    if (num_taps_[g] > 0) sizes[TapIndex(g)] = num_rows * num_taps_[g];
  }
  for (int32_t s = 0; s < table.num_state_groups(); ++s) {
    const int64_t num_kept = num_rows / table.geometry().state_group(s).interval;
    sizes[StateIndex(s, StateArray::kSegmentIndptr)] = num_sequences + 1;
    sizes[StateIndex(s, StateArray::kRowIndptr)] = num_sequences + num_kept + 1;
    sizes[StateIndex(s, StateArray::kSlots)] = num_rows;
    sizes[StateIndex(s, StateArray::kRows)] = num_rows;
    sizes[StateIndex(s, StateArray::kReadPages)] = num_sequences + num_kept;
    sizes[StateIndex(s, StateArray::kWritePages)] = num_sequences + num_kept;
  }
  return sizes;
}

PageTable StepArrays::page_table(int32_t group) const {
  return {PageRange::kWithStep,  view(group, kPageIndptr),
          view(group, kPageIds), view(group, kLengths),
          tree_order(),          &arrays_,
          Index(group, kLengths)};
}

void StepArrays::Fill() {
  SetSizes();
  SetSegmentSizes();
  arrays_.Layout(sizes_);
  Write();
  if (has_segments_) WriteSegments();
  arrays_.Upload();
}

void StepArrays::SetSizes() {
  const int64_t num_sequences = plan_.num_sequences();
  sizes_[kTreeOrder] = plan_.needs_tree_mask() ? plan_.num_tree_nodes() : 0;
  sizes_[kTreeOrderIndptr] = plan_.needs_tree_mask() ? num_sequences + 1 : 0;
  sizes_[kQueryIndptr] = num_sequences + 1;
  sizes_[kQueryPositions] = plan_.num_rows();
  sizes_[kTextPositions] = counts_text() ? plan_.num_rows() : 0;
  sizes_[kPastLengths] = num_sequences;
  sizes_[kRowReach] = plan_.has_spans() ? plan_.num_rows() : 0;
  for (int32_t g = 0; g < num_groups_; ++g) {
    sizes_[Index(g, kPageIndptr)] = num_sequences + 1;
    sizes_[Index(g, kPageIds)] = plan_arrays_.NumPages(g, PageRange::kWithStep);
    sizes_[Index(g, kLengths)] = plan_arrays_.NumLengthRows(g) * num_sequences;
    sizes_[Index(g, kFirstPositions)] = num_sequences;
    sizes_[Index(g, kSlots)] = plan_.num_rows();
    if (num_taps_[g] > 0) sizes_[TapIndex(g)] = plan_.num_rows() * num_taps_[g];
  }
  for (int32_t s = 0; s < table_.num_state_groups(); ++s) {
    const int64_t num_segments = plan_arrays_.NumStateSegments(s);
    const int64_t num_rows = plan_arrays_.NumStateRows(s);
    sizes_[StateIndex(s, StateArray::kSegmentIndptr)] = num_sequences + 1;
    sizes_[StateIndex(s, StateArray::kRowIndptr)] = num_segments + 1;
    sizes_[StateIndex(s, StateArray::kSlots)] = num_rows;
    sizes_[StateIndex(s, StateArray::kRows)] = num_rows;
    sizes_[StateIndex(s, StateArray::kReadPages)] = num_segments;
    sizes_[StateIndex(s, StateArray::kWritePages)] = num_segments;
  }
}

void StepArrays::SetSegmentSizes() {
  const bool had_segments = has_segments_;
  has_segments_ = false;
  for (int32_t g = 0; g < num_groups_; ++g) {
    has_segments_ = has_segments_ || !plan_.shared_prefix(g).segments().empty();
  }
  const size_t first = SegmentIndex(0, SegmentArray{});
  if (!has_segments_) {
    if (had_segments) std::fill(sizes_.begin() + first, sizes_.end(), 0);
    return;
  }
  if (sizes_.size() == first) {  // the first step that has any
    const size_t count = SegmentIndex(num_groups_, SegmentArray{}) - first;
    arrays_.AddArrays(count);
    sizes_.resize(first + count);
  }
  for (int32_t g = 0; g < num_groups_; ++g) {
    const auto num_segments = static_cast<int64_t>(plan_.shared_prefix(g).segments().size());
    sizes_[SegmentIndex(g, SegmentArray::kPageIndptr)] = num_segments + 1;
    sizes_[SegmentIndex(g, SegmentArray::kPageIds)] = plan_arrays_.NumSegmentPages(g);
    sizes_[SegmentIndex(g, SegmentArray::kFirstPositions)] = num_segments;
    sizes_[SegmentIndex(g, SegmentArray::kRowIndptr)] = num_segments + 1;
    sizes_[SegmentIndex(g, SegmentArray::kRows)] = plan_arrays_.NumSegmentRows(g);
  }
}

void StepArrays::Write() {
  if (plan_.needs_tree_mask()) {
    plan_arrays_.FillTreeOrderIndptr(arrays_.host(kTreeOrderIndptr));
    plan_arrays_.FillTreeOrder(PageRange::kWithStep, arrays_.host(kTreeOrder));
  }
  plan_arrays_.FillQueryIndptr(arrays_.host(kQueryIndptr));
  plan_arrays_.FillQueryPositions(arrays_.host(kQueryPositions));
  if (counts_text()) plan_arrays_.FillTextPositions(arrays_.host(kTextPositions));
  plan_arrays_.FillPastLengths(arrays_.host(kPastLengths));
  if (plan_.has_spans()) {
    std::copy(plan_.row_reach().begin(), plan_.row_reach().end(), arrays_.host(kRowReach));
  }
  for (int32_t g = 0; g < num_groups_; ++g) {
    auto host = [&](GroupArray array) { return arrays_.host(Index(g, array)); };
    plan_arrays_.FillPageIndptr(g, PageRange::kWithStep, host(kPageIndptr));
    plan_arrays_.FillPageIds(g, PageRange::kWithStep, host(kPageIds));
    plan_arrays_.FillLengths(g, PageRange::kWithStep, host(kLengths));
    plan_arrays_.FillFirstPositions(g, host(kFirstPositions));
    if (plan_.is_decode()) {
      plan_arrays_.FillLastSlots(host(kPageIndptr), host(kPageIds), host(kLengths), host(kSlots));
    } else {
      plan_arrays_.FillSlots(g, host(kSlots));
    }
    if (num_taps_[g] > 0) plan_arrays_.FillTaps(g, num_taps_[g], arrays_.host(TapIndex(g)));
  }
  for (int32_t s = 0; s < table_.num_state_groups(); ++s) {
    auto host = [&](StateArray array) { return arrays_.host(StateIndex(s, array)); };
    plan_arrays_.FillStates(s, {host(StateArray::kSegmentIndptr), host(StateArray::kRowIndptr),
                                host(StateArray::kSlots), host(StateArray::kRows),
                                host(StateArray::kReadPages), host(StateArray::kWritePages)});
  }
}

void StepArrays::WriteSegments() {
  for (int32_t g = 0; g < num_groups_; ++g) {
    auto host = [&](SegmentArray array) { return arrays_.host(SegmentIndex(g, array)); };
    plan_arrays_.FillSegmentPageIndptr(g, host(SegmentArray::kPageIndptr));
    plan_arrays_.FillSegmentPageIds(g, host(SegmentArray::kPageIds));
    plan_arrays_.FillSegmentFirstPositions(g, host(SegmentArray::kFirstPositions));
    plan_arrays_.FillSegmentRowIndptr(g, host(SegmentArray::kRowIndptr));
    plan_arrays_.FillSegmentRows(g, host(SegmentArray::kRows));
  }
}

}  // namespace pagedkv
