// SPDX-License-Identifier: Apache-2.0
/*!
 * \file forward_plan.h
 * \brief One batch: checked first, then laid out as CSR arrays, then committed.
 *
 * Prepare (may throw, changes nothing) -> Acquire (takes the pages) -> the caller copies pages and
 * uploads arrays -> Commit, or Release when that failed -> Slide at the end of the step. A plan is
 * kept from step to step: once its vectors have grown, a step allocates nothing.
 *
 * In groups that share prefixes, page tables begin after the pages that a sequence has in common
 * with others of the batch; those are in segments, each once for all of its sequences.
 */
#ifndef TVM_PAGEDKV_STATE_FORWARD_PLAN_H_
#define TVM_PAGEDKV_STATE_FORWARD_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "state/sequence_table.h"
#include "state/shared_prefix.h"

namespace pagedkv {

/*! \brief Which pages of the batch: with the rows of this step, or what was there before it. */
enum class PageRange { kWithStep, kPast };

class ForwardPlan {
 public:
  ForwardPlan(SequenceTable* table, int64_t max_num_rows);

  /*! \brief From the next step on, segments that save so much are found in the group. */
  void SharePrefixes(int32_t group, int64_t min_saved_positions = kMinSavedPositions) {
    groups_[group].shares_prefixes = true;
    groups_[group].shared.set_min_saved_positions(min_saved_positions);
  }

  /*!
   * \brief Checks the batch and counts its pages.
   * \param tree_parents One for each row, which become nodes of the sequences' token trees; none:
   *   the rows are committed. They are read until Commit or Release.
   * \throws Error (ValueError, KeyError, CacheFullError).
   */
  void Prepare(IntSpan sequence_ids, IntSpan append_lengths,
               std::optional<IntSpan> tree_parents = std::nullopt);
  /*!
   * \brief Takes the pages that Prepare has counted, and appends the nodes to their trees. Throws
   *   std::bad_alloc at most.
   */
  void Acquire();
  /*!
   * \brief Undoes it: pools and trees are as before Acquire. Only pages that copies were meant for
   *   are free now if they were cached.
   */
  void Release() noexcept;
  /*!
   * \brief Hands the pages to the sequences and lets these grow.
   *
   * Until Finish or Abort the shared pages that copies have replaced stay pinned, and receives of
   * the batch's sequences open, so that Abort can restore both.
   */
  void Commit() noexcept;
  /*! \brief Ends the step: releases replaced pages, and those that have left the windows. */
  void Finish() noexcept;
  /*!
   * \brief Undoes Commit: lengths, pages, trees and receives are as before the step. Cached pages
   *   that the step has reclaimed are free now, for kernels may have written to them.
   */
  void Abort() noexcept;

  /*! \throws Error (ValueError) when a text position would exceed int32. */
  void RequireTextPositions() const;
  /*! \throws Error (ValueError) when the window of a sequence parts rows of this step. */
  void RequireRowsSeeEachOther(const char* what) const;

  int64_t num_sequences() const { return static_cast<int64_t>(items_.size()); }
  int64_t num_rows() const { return num_rows_; }
  /*! \brief Rows of the sequence that appends most. */
  int64_t max_append() const { return max_append_; }
  /*! \brief Whether a sequence of the batch has a window, or has dropped positions. */
  bool has_windows() const { return has_windows_; }
  /*! \brief Whether every sequence appends one row. */
  bool is_decode() const { return num_rows_ == num_sequences(); }
  int64_t PastLength(int64_t i) const { return items_[i].past_length; }
  int64_t NumAppend(int64_t i) const { return items_[i].num_append; }
  const Sequence& SequenceAt(int64_t i) const { return *items_[i].sequence; }
  /*! \brief Whether the rows are tree nodes. */
  bool has_trees() const { return tree_parents_.has_value(); }
  /*! \brief Whether a tree is more than a chain, so that the causal mask will not do. */
  bool needs_tree_mask() const { return needs_tree_mask_; }
  /*! \brief Nodes of the batch's trees, of this step and of earlier ones; after Prepare. */
  int64_t num_tree_nodes() const { return num_tree_nodes_; }
  /*! \brief Whether some of them are of earlier steps. */
  bool has_earlier_nodes() const { return num_tree_nodes_ > num_rows_; }
  /*! \brief Entries of the group's page table. */
  int64_t NumPages(int32_t group, PageRange range) const;
  /*! \brief The pages that stand in segments instead. */
  const SharedPrefix& shared_prefix(int32_t group) const { return groups_[group].shared; }
  /*! \brief Entries by which the page table would be longer without segments. */
  int64_t NumSharedPages(int32_t group) const;
  /*! \brief Shared pages that this step writes to; valid from Acquire until the step's end. */
  const std::vector<PageCopy>& copies() const { return copies_; }

  // The arrays, in forward_plan_arrays.cc. Those without a group are the same in every one; those
  // of trees and the positions of tree nodes are to be filled after Acquire.
  void FillQueryIndptr(int32_t* out) const;     // [B + 1]
  void FillQueryPositions(int32_t* out) const;  // [T]
  /*! \brief As FillQueryPositions, counting the positions that windows have dropped too, [T]. */
  void FillTextPositions(int32_t* out) const;
  void FillPastLengths(int32_t* out) const;      // [B]
  void FillTreeOrderIndptr(int32_t* out) const;  // [B + 1]
  /*! \brief As TokenTree::FillOrder, [num_tree_nodes, 2]; kPast: nobody sees this step's nodes. */
  void FillTreeOrder(PageRange range, int32_t* out) const;
  void FillPageIndptr(int32_t group, PageRange range, int32_t* out) const;  // [B + 1]
  /*!
   * \brief What to add to a slot's number in the page table to get its position, [B]. Where a
   * sequence has dropped positions this holds for the slots in front of these in groups without a
   * window; in the others for those behind, and it may be negative.
   */
  void FillFirstPositions(int32_t group, int32_t* out) const;
  /*! \brief Page ids, [NumPages]: kWithStep between Acquire and Commit, kPast after Commit. */
  void FillPageValues(int32_t group, PageRange range, int32_t* out) const;
  /*! \brief Rows of FillLengths: 4 when a sequence has a window that the group follows, else 1. */
  int64_t NumLengthRows(int32_t group) const;
  /*! \brief FillLastPageLengths, then with 4 rows FillWindows, [NumLengthRows, B]. */
  void FillLengths(int32_t group, PageRange range, int32_t* out) const;
  void FillLastPageLengths(PageRange range, int32_t* out) const;  // [B]
  /*!
   * \brief Where the windows of sequences lie in the page tables of a group, [3, B]: the slot
   * behind the dropped positions, the number of sinks, the positions that a row sees besides the
   * sinks and itself. Slots between the sinks and the first number are of dropped positions.
   */
  void FillWindows(int32_t group, int32_t* out) const;
  /*! \brief The slot of every row, [T]; between Acquire and Commit. */
  void FillSlots(int32_t group, int32_t* out) const;

  // Arrays of the group's S segments.
  int64_t NumSegmentPages(int32_t group) const;
  int64_t NumSegmentRows(int32_t group) const;
  void FillSegmentPageIndptr(int32_t group, int32_t* out) const;      // [S + 1]
  void FillSegmentPageValues(int32_t group, int32_t* out) const;      // [NumSegmentPages]
  void FillSegmentFirstPositions(int32_t group, int32_t* out) const;  // [S]
  void FillSegmentRowIndptr(int32_t group, int32_t* out) const;       // [S + 1]
  /*! \brief Which rows of the step attend to each segment, [NumSegmentRows]. */
  void FillSegmentRows(int32_t group, int32_t* out) const;

 private:
  struct Item {
    Sequence* sequence;
    int64_t num_append;
    int64_t past_length;
    int64_t num_earlier_nodes;
    int64_t first_row;
  };
  /*! \brief New pages of item i: acquired[offsets[i] : offsets[i + 1]], after kept[i] old ones. */
  struct GroupPages {
    std::vector<int64_t> kept;
    std::vector<int64_t> offsets;
    std::vector<int32_t> acquired;
    // [num_pages] scratch: how many of the batch write to a shared last page, and the longest.
    std::vector<int32_t> num_writers, longest_writer;
    bool shares_prefixes = false;
    SharedPrefix shared;
  };

  /*! \brief The length in text positions: pages hold these, one slot each. */
  int64_t TextLength(const Item& item, PageRange range) const {
    const int64_t num_append = range == PageRange::kWithStep ? item.num_append : 0;
    return item.sequence->window.TextLength(item.past_length + num_append);
  }
  void PrepareItems(IntSpan sequence_ids, IntSpan append_lengths);
  void PrepareTrees();
  IntSpan TreeParentsOf(const Item& item) const {
    return {tree_parents_->data + item.first_row, static_cast<size_t>(item.num_append)};
  }
  void FindSharedLastPages(int32_t group);
  bool MustCopyLastPage(int32_t group, size_t item) const;
  void CountPages(int32_t group);
  bool WritesToKeptPage(int32_t group, size_t item) const;
  void CopyKeptLastPages(int32_t group);
  void FindSharedPages(int32_t group);
  int64_t NumSharedPagesOf(int32_t group, size_t item) const {
    return groups_[group].shared.NumPagesOf(item);
  }
  int64_t NumPagesOf(int32_t group, size_t item, PageRange range) const;
  int32_t PageOf(int32_t group, size_t item, int64_t position) const;

  SequenceTable* table_;
  int64_t max_num_rows_;
  int64_t num_rows_ = 0;
  int64_t max_append_ = 0;
  bool has_windows_ = false;
  uint64_t batch_mark_ = 0;
  std::optional<IntSpan> tree_parents_;
  bool needs_tree_mask_ = false;
  int64_t num_tree_nodes_ = 0;
  std::vector<Item> items_;
  std::vector<GroupPages> groups_;
  std::vector<PageCopy> copies_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_FORWARD_PLAN_H_
