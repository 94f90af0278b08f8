// SPDX-License-Identifier: Apache-2.0
/*!
 * \file forward_plan.h
 * \brief The plan of one step: checks the batch and takes its pages. Its arrays: see plan_arrays.h.
 *
 *     Prepare   may throw, changes nothing
 *     Acquire   takes pages; then the caller copies pages and uploads arrays
 *     Commit    or Release when that failed
 *     Finish    or Abort at the end of the step
 *
 * A plan is kept from step to step. Once its vectors have grown, a step allocates no memory.
 *
 * In groups that share prefixes, the page table of a sequence begins behind the pages that it
 * shares with others of the batch. Those are in segments: see shared_prefix.h.
 */
#ifndef TVM_PAGEDKV_STATE_PLANS_FORWARD_PLAN_H_
#define TVM_PAGEDKV_STATE_PLANS_FORWARD_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "state/plans/shared_prefix.h"
#include "state/plans/state_plan.h"
#include "state/table/copy_on_write.h"
#include "state/table/sequence_table.h"

namespace pagedkv {

/*! \brief Pages with the rows of this step, or the pages of the past alone. */
enum class PageRange { kWithStep, kPast };

class ForwardPlan {
 public:
  ForwardPlan(SequenceTable* table, int64_t max_num_rows);

  /*! \brief Lets later steps find segments of the group that save this many positions. */
  void SharePrefixes(int32_t group, int64_t min_saved_positions = kMinSavedPositions) {
    groups_[group].shares_prefixes = true;
    groups_[group].shared.set_min_saved_positions(min_saved_positions);
  }

  /*!
   * \brief Checks the batch and counts its pages.
   * \param tree_parents The parent of each row, when rows are nodes of token trees. Without it rows
   *   are committed. Must stay valid until Commit or Release.
   * \throws Error (ValueError, KeyError, CacheFullError).
   */
  void Prepare(IntSpan sequence_ids, IntSpan append_lengths,
               std::optional<IntSpan> tree_parents = std::nullopt);
  /*!
   * \brief After Prepare, lets rows of spans see to the end of their span.
   * \param spans Triples: a sequence of the batch, and the positions where the span begins and
   *   ends.
   * \throws Error (ValueError); the step has no spans then.
   */
  void PrepareSpans(IntSpan spans);
  /*!
   * \brief Takes the pages that Prepare has counted and appends the tree nodes. May throw
   *   std::bad_alloc.
   */
  void Acquire();
  /*!
   * \brief Undoes Acquire. Cached pages that were taken for copies are free now, because they may
   * have been written.
   */
  void Release() noexcept;
  /*!
   * \brief Gives the pages to the sequences and updates their lengths.
   *
   * Until Finish or Abort, shared pages that copies have replaced stay pinned and receives of the
   * sequences stay open, so that Abort can restore both.
   */
  void Commit() noexcept;
  /*!
   * \brief Ends the step: releases replaced pages and slides the windows.
   * \param is_written Whether every layer has written its rows. Otherwise the sequences keep them,
   *   and nobody else ever gets them.
   */
  void Finish(bool is_written = true) noexcept;
  /*!
   * \brief Undoes Commit: lengths, pages, trees and receives are as before the step. Cached pages
   *   that the step reclaimed are free now, for kernels may have written them.
   */
  void Abort() noexcept;

  /*! \throws Error (ValueError) when a text position would exceed int32. */
  void RequireTextPositions() const;
  /*! \throws Error (ValueError) when the window of a sequence separates rows of this step. */
  void RequireRowsSeeEachOther(const char* what) const;

  int64_t num_sequences() const { return static_cast<int64_t>(items_.size()); }
  int64_t num_rows() const { return num_rows_; }
  /*! \brief Maximum number of rows of a sequence. */
  int64_t max_append() const { return max_append_; }
  /*! \brief Whether a sequence of the batch has a window, or has dropped positions. */
  bool has_windows() const { return has_windows_; }
  /*! \brief Whether every sequence appends one row. */
  bool is_decode() const { return num_rows_ == num_sequences(); }
  int64_t PastLength(int64_t i) const { return items_[i].past_length; }
  int64_t NumAppend(int64_t i) const { return items_[i].num_append; }
  const Sequence& SequenceAt(int64_t i) const { return *items_[i].sequence; }
  /*! \brief A sequence whose tokens the caller records during the step. */
  Sequence* SequenceToRecord(int64_t i) { return items_[i].sequence; }
  /*! \brief Whether the rows are tree nodes. */
  bool has_trees() const { return tree_parents_.has_value(); }
  /*! \brief Whether a tree branches, so that the causal mask is not enough. */
  bool needs_tree_mask() const { return needs_tree_mask_; }
  /*! \brief Uncommitted nodes of the batch, of this and of earlier steps; after Prepare. */
  int64_t num_tree_nodes() const { return num_tree_nodes_; }
  /*! \brief Whether some of them are of earlier steps. */
  bool has_earlier_nodes() const { return num_tree_nodes_ > num_rows_; }
  /*! \brief Whether rows see columns behind their own. */
  bool has_spans() const { return has_spans_; }
  /*! \brief How many columns behind its own each row sees, [num_rows], where there are spans. */
  const std::vector<int32_t>& row_reach() const { return row_reach_; }
  /*! \brief The pages that are in segments instead. */
  const SharedPrefix& shared_prefix(int32_t group) const { return groups_[group].shared; }
  const StatePlan& states(int32_t state_group) const { return states_[state_group]; }
  /*! \brief Copies of shared pages that this step writes to; from Acquire to the end of the step.
   */
  const std::vector<PageCopy>& copies() const { return copies_; }

 private:
  friend class PlanArrays;  // reads items and pages

  struct Item {
    Sequence* sequence;
    int64_t num_append;
    int64_t past_length;
    int64_t num_earlier_nodes;
    int64_t first_row;
  };
  /*! \brief Pages of item i: kept[i] old ones, then acquired[offsets[i] : offsets[i + 1]]. */
  struct GroupPages {
    std::vector<int64_t> kept;
    std::vector<int64_t> offsets;
    std::vector<int32_t> acquired;
    // [num_pages] scratch: how many items write to a shared last page, and the longest text.
    std::vector<int32_t> num_writers, longest_writer;
    bool shares_prefixes = false;
    SharedPrefix shared;
  };

  /*! \brief The length in text positions, which have a slot each. */
  int64_t TextLength(const Item& item, PageRange range) const {
    const int64_t num_append = range == PageRange::kWithStep ? item.num_append : 0;
    return item.sequence->window.TextLength(item.past_length + num_append);
  }
  /*! \brief The slot, in its page, of the item's first row. */
  int64_t SlotOfNextRow(const Item& item) const {
    return table_->geometry().SlotOf(TextLength(item, PageRange::kPast));
  }
  void PrepareItems(IntSpan sequence_ids, IntSpan append_lengths);
  void PrepareTrees();
  IntSpan TreeParentsOf(const Item& item) const {
    return {tree_parents_->data + item.first_row, static_cast<size_t>(item.num_append)};
  }
  void PrepareStates();
  const Item& ItemOfSpan(int64_t id, int64_t begin, int64_t end) const;
  void MarkSpans() noexcept;
  void FindSharedLastPages(int32_t group);
  bool MustCopyLastPage(int32_t group, size_t item) const;
  void CountPages(int32_t group);
  bool WritesToKeptPage(int32_t group, size_t item) const;
  void CopyKeptLastPages(int32_t group);
  void FindSharedPages(int32_t group);
  SequenceTable* table_;
  int64_t max_num_rows_;
  int64_t num_rows_ = 0;
  int64_t max_append_ = 0;
  bool has_windows_ = false;
  bool has_nodes_ = false;  // of earlier steps
  uint64_t batch_mark_ = 0;
  int64_t num_removals_ = 0;  // of the table, when the items were sequences of it
  std::optional<IntSpan> tree_parents_;
  bool needs_tree_mask_ = false;
  bool has_spans_ = false;
  std::vector<int32_t> row_reach_;  // [num_rows]
  int64_t num_tree_nodes_ = 0;
  std::vector<Item> items_;
  std::vector<GroupPages> groups_;
  std::vector<StatePlan> states_;  // [state group]
  std::vector<PageCopy> copies_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_PLANS_FORWARD_PLAN_H_
