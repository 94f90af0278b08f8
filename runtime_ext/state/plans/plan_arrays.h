// SPDX-License-Identifier: Apache-2.0
/*!
 * \file plan_arrays.h
 * \brief The CSR arrays of a step, as kernels take them.
 *
 * B is the number of sequences of the step and T that of its rows. Arrays without a group are the
 * same in every layer group. The arrays are complete after ForwardPlan::Acquire.
 */
#ifndef TVM_PAGEDKV_STATE_PLANS_PLAN_ARRAYS_H_
#define TVM_PAGEDKV_STATE_PLANS_PLAN_ARRAYS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "state/plans/forward_plan.h"

namespace pagedkv {

/*! \brief A view of a plan, which must outlive it. */
class PlanArrays {
 public:
  explicit PlanArrays(const ForwardPlan& plan)
      : plan_(plan), table_(*plan.table_), items_(plan.items_), groups_(plan.groups_) {}

  /*! \brief Page ids in the group's page table. */
  int64_t NumPages(int32_t group, PageRange range) const;
  /*! \brief Page ids that the page table would have in addition without segments. */
  int64_t NumSharedPages(int32_t group) const;

  void FillQueryIndptr(int32_t* out) const;     // [B + 1]
  void FillQueryPositions(int32_t* out) const;  // [T]
  /*! \brief Like FillQueryPositions, counting the positions that windows have dropped too, [T]. */
  void FillTextPositions(int32_t* out) const;
  void FillPastLengths(int32_t* out) const;      // [B]
  void FillTreeOrderIndptr(int32_t* out) const;  // [B + 1]
  /*! \brief Like TokenTree::FillOrder, [num_tree_nodes, 2]; kPast: no row sees this step's nodes.
   */
  void FillTreeOrder(PageRange range, int32_t* out) const;
  void FillPageIndptr(int32_t group, PageRange range, int32_t* out) const;  // [B + 1]
  /*!
   * \brief The position of the first slot of the page table, [B]. When a sequence has dropped
   * positions this holds, in groups without a window, for the slots before them; in other groups
   * for the slots behind them, and it may be negative.
   */
  void FillFirstPositions(int32_t group, int32_t* out) const;
  /*! \brief Page ids, [NumPages]: kWithStep between Acquire and Commit, kPast after Commit. */
  void FillPageIds(int32_t group, PageRange range, int32_t* out) const;
  /*! \brief Rows of FillLengths: 4 when a sequence has a window that the group follows, else 1. */
  int64_t NumLengthRows(int32_t group) const;
  /*! \brief FillLastPageLengths, then with 4 rows FillWindows, [NumLengthRows, B]. */
  void FillLengths(int32_t group, PageRange range, int32_t* out) const;
  void FillLastPageLengths(PageRange range, int32_t* out) const;  // [B]
  /*!
   * \brief The windows of the sequences in the page tables of a group, [3, B]: the slot behind the
   * dropped positions, the number of sinks, the positions that a row sees besides the sinks and
   * itself. Slots between the sinks and the first number hold dropped positions.
   */
  void FillWindows(int32_t group, int32_t* out) const;
  /*! \brief The slot of every row, [T]; between Acquire and Commit. */
  void FillSlots(int32_t group, int32_t* out) const;
  /*! \brief The same, where each sequence has one row: the last slot of its page table. */
  void FillLastSlots(const int32_t* page_indptr, const int32_t* page_ids, const int32_t* lengths,
                     int32_t* out) const;

  // Arrays of the group's S segments.
  int64_t NumSegmentPages(int32_t group) const;
  int64_t NumSegmentRows(int32_t group) const;
  void FillSegmentPageIndptr(int32_t group, int32_t* out) const;      // [S + 1]
  void FillSegmentPageIds(int32_t group, int32_t* out) const;         // [NumSegmentPages]
  void FillSegmentFirstPositions(int32_t group, int32_t* out) const;  // [S]
  void FillSegmentRowIndptr(int32_t group, int32_t* out) const;       // [S + 1]
  /*! \brief The rows of the step that attend to each segment, [NumSegmentRows]. */
  void FillSegmentRows(int32_t group, int32_t* out) const;

  // Of a state group: the segments of its recurrence, see state_plan.h, and their rows. Between
  // Acquire and Commit.
  int64_t NumStateSegments(int32_t state_group) const;
  int64_t NumStateRows(int32_t state_group) const;
  struct StateArrays {
    int32_t* segment_indptr;  // [B + 1]
    int32_t* row_indptr;      // [segments + 1]
    int32_t* slots;           // [rows] of the ingredients
    int32_t* rows;            // [rows] of the step; -1 for positions of the past
    int32_t* read_pages;      // [segments] pages of states; -1 for zeros
    int32_t* write_pages;     // [segments]
  };
  void FillStates(int32_t state_group, const StateArrays& out) const;
  /*!
   * \brief The slots of the `num_taps` rows before each row of the step, [T, num_taps]; -1 before
   * the first position. Rows before a tree node are those of its ancestors.
   */
  void FillTaps(int32_t group, int64_t num_taps, int32_t* out) const;

 private:
  using Item = ForwardPlan::Item;
  using GroupPages = ForwardPlan::GroupPages;

  int64_t NumSharedPagesOf(int32_t group, size_t item) const {
    return groups_[group].shared.NumPagesOf(item);
  }
  int64_t NumPagesOf(int32_t group, size_t item, PageRange range) const;
  int32_t PageOf(int32_t group, size_t item, int64_t position) const;
  int32_t PageAt(int32_t group, size_t item, int64_t index) const;
  /*! \brief The slot of a text position, in a group whose pages follow the text. */
  int32_t SlotOfText(int32_t group, size_t item, int64_t text_position) const;
  const SharedPrefix& shared_prefix(int32_t group) const { return groups_[group].shared; }

  const ForwardPlan& plan_;
  const SequenceTable& table_;
  const std::vector<Item>& items_;
  const std::vector<GroupPages>& groups_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_PLANS_PLAN_ARRAYS_H_
