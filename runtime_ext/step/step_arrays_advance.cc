// SPDX-License-Identifier: Apache-2.0
/*!
 * \file step_arrays_advance.cc
 * \brief The arrays of a step that continues the last one: those of the last step moved forward.
 */
#include <algorithm>
#include <limits>

#include "step/array_changes.h"
#include "step/step_arrays.h"

namespace pagedkv {

int64_t StepArrays::NumPageIdsLeft() const {
  if (!is_host_ && advance_arrays_ == nullptr) return -1;
  int64_t num_left = std::numeric_limits<int32_t>::max();
  // On a device the buffer grows with the page tables, and the kernel counts its elements.
  if (!is_host_) return (num_left - 2 * arrays_.num_elements()) / std::max(num_groups_, 1);
  for (int32_t g = 0; g < num_groups_; ++g) {
    const size_t i = Index(g, kPageIds);
    num_left = std::min(num_left, room_[i] - sizes_[i]);
  }
  return num_left;
}

void StepArrays::Advance() {
  for (int32_t g = 0; g < num_groups_; ++g) {
    sizes_[Index(g, kPageIds)] += plan_arrays_.NumNewPages();
  }
  is_host_ ? AdvanceOnHost() : AdvanceOnDevice();
}

void StepArrays::AdvanceOnHost() {
  for (int32_t g = 0; g < num_groups_; ++g) {
    const size_t i = Index(g, kPageIds);
    arrays_.Resize(i, sizes_[i]);
  }
  plan_arrays_.AdvancePositions(arrays_.host(kQueryPositions), arrays_.host(kPastLengths));
  for (int32_t g = 0; g < num_groups_; ++g) {
    auto host = [&](GroupArray array) { return arrays_.host(Index(g, array)); };
    plan_arrays_.AdvancePageTable(g, host(kPageIndptr), host(kPageIds));
    plan_arrays_.AdvanceLengthsAndSlots(g, host(kLengths), host(kSlots));
  }
}

/*! \brief Copies the pages that sequences begin; a kernel makes the arrays of the last ones. */
void StepArrays::AdvanceOnDevice() {
  sizes_[kChanges] = NumChanges();
  sizes_[kNewPageIds] = sizes_[kNewRows] = plan_arrays_.NumNewPages();
  arrays_.LayoutBehindLast(sizes_);
  const int64_t num_blocks = WriteChanges();
  plan_arrays_.FillNewPages(arrays_.host(kNewRows), arrays_.host(kNewPageIds));
  arrays_.UploadFirst(kTreeOrderIndptr, [&](const ffi::Tensor& last, const ffi::Tensor& current) {
    advance_arrays_(last, current, common(kChanges), common(kNewRows), common(kNewPageIds),
                    ArrayChanges::kBlockSize, num_blocks);
  });
}

/*! \brief Calls `visit(array, change, group)` for the arrays that a step with one row of each
 * sequence has, without windows and trees. */
template <typename F>
void StepArrays::VisitArrays(F visit) const {
  auto visit_used = [&](size_t array, ArrayChange change, int32_t group) {
    if (sizes_[array] > 0) visit(array, change, group);
  };
  visit_used(kQueryIndptr, ArrayChange::kSame, 0);
  visit_used(kQueryPositions, ArrayChange::kNext, 0);
  visit_used(kPastLengths, ArrayChange::kNext, 0);
  visit_used(kRowReach, ArrayChange::kSame, 0);
  for (int32_t g = 0; g < num_groups_; ++g) {
    visit_used(Index(g, kPageIndptr), ArrayChange::kIndptr, g);
    visit_used(Index(g, kPageIds), ArrayChange::kPageIds, g);
    visit_used(Index(g, kLengths), ArrayChange::kLengths, g);
    visit_used(Index(g, kFirstPositions), ArrayChange::kSame, g);
    visit_used(Index(g, kSlots), ArrayChange::kSlots, g);
  }
  for (size_t i = SegmentIndex(0, SegmentArray{}); i < sizes_.size(); ++i) {
    visit_used(i, ArrayChange::kSame, 0);
  }
}

int64_t StepArrays::NumChanges() const {
  int64_t count = 0;
  VisitArrays([&](size_t, ArrayChange, int32_t) { ++count; });
  return count;
}

/*! \return The blocks of the kernel. */
int64_t StepArrays::WriteChanges() {
  ArrayChanges changes(arrays_, arrays_.host(kChanges));
  VisitArrays([&](size_t array, ArrayChange change, int32_t group) {
    changes.Add(array, sizes_[array], change, group, Index(group, kPageIndptr));
  });
  return changes.num_blocks();
}

}  // namespace pagedkv
