// SPDX-License-Identifier: Apache-2.0
/*!
 * \file tree_commit.h
 * \brief Commit of token trees between steps: accepted nodes move up, the others are dropped.
 */
#ifndef TVM_PAGEDKV_STEP_TREE_COMMIT_H_
#define TVM_PAGEDKV_STEP_TREE_COMMIT_H_

#include <cstdint>

#include "state/plans/commit_plan.h"
#include "step/step.h"
#include "storage/node_mover.h"
#include "storage/page_copier.h"

namespace pagedkv {

/*! \brief Counts of the tree nodes of all commits. */
struct TreeNodeCounts {
  int64_t committed = 0;
  int64_t dropped = 0;
  int64_t moved = 0;
};

class TreeCommit {
 public:
  /*! \brief All three must outlive this. */
  TreeCommit(Step* step, SequenceTable* table, PageCopier* copier)
      : step_(step), table_(table), copier_(copier), mover_(step->storage()) {}

  /*!
   * \brief Makes the nodes from the root to each leaf positions of the sequence; drops the others.
   * \param leaves For each sequence a node of its whole uncommitted tree; -1: commit none.
   * \throws Error (ValueError, KeyError, CacheFullError, and what kernels throw). Then nothing has
   *   changed, or on a device the nodes are lost: see NodeMover.
   */
  void Commit(IntSpan sequence_ids, IntSpan leaves);

  const TreeNodeCounts& counts() const { return counts_; }
  const AuxData* arrays() const { return mover_.arrays(); }

 private:
  void MoveNodes(CommitPlan* plan);

  Step* step_;
  SequenceTable* table_;
  PageCopier* copier_;
  NodeMover mover_;
  TreeNodeCounts counts_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STEP_TREE_COMMIT_H_
