// SPDX-License-Identifier: Apache-2.0
/*!
 * \file step_arrays_copy.h
 * \brief All arrays of a step, in memory of their sizes.
 */
#ifndef TVM_PAGEDKV_FUZZ_STEP_ARRAYS_COPY_H_
#define TVM_PAGEDKV_FUZZ_STEP_ARRAYS_COPY_H_

#include <cstdint>
#include <vector>

#include "bytes.h"
#include "state/plans/forward_plan.h"
#include "state/plans/plan_arrays.h"

namespace pagedkv {

class StepArraysCopy {
 public:
  using Ints = std::vector<int32_t>;

  /*! \brief Between Acquire and Commit. */
  void Fill(const ForwardPlan& plan, int32_t num_groups) {
    const PlanArrays arrays(plan);
    const int64_t batch = plan.num_sequences(), num_rows = plan.num_rows();
    query_indptr_.resize(batch + 1);
    arrays.FillQueryIndptr(query_indptr_.data());
    query_positions_.resize(num_rows);
    arrays.FillQueryPositions(query_positions_.data());
    past_lengths_.resize(batch);
    arrays.FillPastLengths(past_lengths_.data());
    tree_order_.assign(2 * plan.num_tree_nodes(), 0);
    if (plan.has_trees()) arrays.FillTreeOrder(PageRange::kWithStep, tree_order_.data());
    groups_.resize(num_groups);
    for (int32_t g = 0; g < num_groups; ++g) {
      Group& group = groups_[g];
      group.page_indptr.resize(batch + 1);
      arrays.FillPageIndptr(g, PageRange::kWithStep, group.page_indptr.data());
      group.page_ids.resize(arrays.NumPages(g, PageRange::kWithStep));
      arrays.FillPageIds(g, PageRange::kWithStep, group.page_ids.data());
      group.lengths.resize(arrays.NumLengthRows(g) * batch);
      arrays.FillLengths(g, PageRange::kWithStep, group.lengths.data());
      group.first_positions.resize(batch);
      arrays.FillFirstPositions(g, group.first_positions.data());
      group.slots.resize(num_rows);
      arrays.FillSlots(g, group.slots.data());
      if (plan.is_decode()) {
        Ints slots(num_rows);
        arrays.FillLastSlots(group.page_indptr.data(), group.page_ids.data(), group.lengths.data(),
                             slots.data());
        FUZZ_CHECK(slots == group.slots);
      }
      WriteSegments(plan, g);
    }
  }
  /*! \brief After Commit: the page tables without the rows of the step. */
  void FillPast(const ForwardPlan& plan, int32_t num_groups) {
    const PlanArrays arrays(plan);
    for (int32_t g = 0; g < num_groups; ++g) {
      Group& group = groups_[g];
      group.past_indptr.resize(plan.num_sequences() + 1);
      arrays.FillPageIndptr(g, PageRange::kPast, group.past_indptr.data());
      group.past_ids.resize(arrays.NumPages(g, PageRange::kPast));
      arrays.FillPageIds(g, PageRange::kPast, group.past_ids.data());
    }
  }
  const Ints& slots(int32_t group) const { return groups_[group].slots; }

 private:
  struct Group {
    Ints page_indptr, page_ids, lengths, first_positions, slots;
    Ints past_indptr, past_ids;
    Ints segment_indptr, segment_ids, segment_positions, segment_row_indptr, segment_rows;
  };

  void WriteSegments(const ForwardPlan& plan, int32_t g) {
    const PlanArrays arrays(plan);
    Group& group = groups_[g];
    const size_t num_segments = plan.shared_prefix(g).segments().size();
    group.segment_indptr.resize(num_segments + 1);
    arrays.FillSegmentPageIndptr(g, group.segment_indptr.data());
    group.segment_ids.resize(arrays.NumSegmentPages(g));
    arrays.FillSegmentPageIds(g, group.segment_ids.data());
    group.segment_positions.resize(num_segments);
    arrays.FillSegmentFirstPositions(g, group.segment_positions.data());
    group.segment_row_indptr.resize(num_segments + 1);
    arrays.FillSegmentRowIndptr(g, group.segment_row_indptr.data());
    group.segment_rows.resize(arrays.NumSegmentRows(g));
    arrays.FillSegmentRows(g, group.segment_rows.data());
  }

  Ints query_indptr_, query_positions_, past_lengths_, tree_order_;
  std::vector<Group> groups_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_FUZZ_STEP_ARRAYS_COPY_H_
