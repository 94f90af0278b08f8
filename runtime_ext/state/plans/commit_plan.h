// SPDX-License-Identifier: Apache-2.0
/*!
 * \file commit_plan.h
 * \brief The commit of token trees: which nodes become positions, and which slots they move to.
 *
 * Prepare (may throw, changes nothing) -> Acquire (takes pages) -> the caller copies pages and
 * moves slots -> Commit, or Release when that failed.
 *
 * The nodes on the path to the accepted leaf move up, so that they follow the committed positions
 * in the order of the path; a node never moves to a higher slot than its own.
 */
#ifndef TVM_PAGEDKV_STATE_PLANS_COMMIT_PLAN_H_
#define TVM_PAGEDKV_STATE_PLANS_COMMIT_PLAN_H_

#include <cstdint>
#include <vector>

#include "state/table/copy_on_write.h"
#include "state/table/sequence_table.h"

namespace pagedkv {

class CommitPlan {
 public:
  explicit CommitPlan(SequenceTable* table) : table_(table), copies_(table) {}

  /*!
   * \brief Checks what is to be committed.
   * \param leaves The last accepted node of each sequence's tree; -1: accept none.
   * \throws Error (ValueError, KeyError).
   */
  void Prepare(IntSpan sequence_ids, IntSpan leaves);
  /*! \brief Takes a copy for every shared page that nodes move into. \throws Error
   * (CacheFullError). */
  void Acquire();
  /*! \brief Undoes Acquire. \param were_copied Whether the new pages may have been written. */
  void Release(bool were_copied = true) noexcept;
  /*! \brief Puts the copies into the page tables, commits the accepted nodes, drops the others. */
  void Commit() noexcept;

  /*! \brief Drops all nodes of the sequences instead. */
  void DropNodes() noexcept;

  int64_t num_sequences() const { return static_cast<int64_t>(items_.size()); }
  int64_t num_committed() const { return num_committed_; }
  int64_t num_dropped() const { return num_dropped_; }
  /*! \brief Nodes that change their slot. */
  int64_t num_moves() const { return num_moves_; }
  /*! \brief Shared pages to copy before the moves; valid between Acquire and Commit. */
  const std::vector<PageCopy>& copies() const { return copies_.copies(); }

  void FillMoveIndptr(int32_t* out) const;  // [B + 1]
  /*!
   * \brief Source slots and destination slots, [2, num_moves]; after Acquire. Moves in this order
   * never read a slot that was written before.
   */
  void FillMoves(int32_t group, int32_t* out) const;

 private:
  struct Item {
    Sequence* sequence;
    std::vector<int32_t> path;
    int64_t num_in_place;  // leading nodes of the path that are in their final slot
  };

  int32_t SlotOf(const Item& item, int32_t group, int64_t position) const;

  SequenceTable* table_;
  std::vector<Item> items_;
  CopyOnWrite copies_;
  int64_t num_committed_ = 0;
  int64_t num_dropped_ = 0;
  int64_t num_moves_ = 0;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_PLANS_COMMIT_PLAN_H_
