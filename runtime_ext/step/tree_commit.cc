// SPDX-License-Identifier: Apache-2.0
/*!
 * \file tree_commit.cc
 * \brief Commit of token trees between steps.
 */
#include "step/tree_commit.h"

namespace pagedkv {

void TreeCommit::Commit(IntSpan sequence_ids, IntSpan leaves) {
  step_->phase().RequireIdle("commit_tree");
  CommitPlan plan(table_);
  plan.Prepare(sequence_ids, leaves);
  const StreamOrder::Call on_stream(&step_->stream_order());
  const StepPhase::Change change(&step_->phase());
  plan.Acquire();
  if (plan.num_moves() > 0) step_->bounds().Forget();  // nodes come in place of others
  try {
    MoveNodes(&plan);
  } catch (...) {
    mover_.ReleaseArrays();
    throw;
  }
  mover_.ReleaseArrays();
  copier_->CountCommitted(plan.copies().size());
  counts_.committed += plan.num_committed();
  counts_.dropped += plan.num_dropped();
  counts_.moved += plan.num_moves();
  plan.Commit();
}

void TreeCommit::MoveNodes(CommitPlan* plan) {
  bool are_nodes_lost = false;
  try {
    copier_->Copy(plan->copies());
    if (plan->num_moves() > 0) mover_.Move(*plan, &are_nodes_lost);
  } catch (...) {
    plan->Release();
    if (are_nodes_lost) {
      counts_.dropped += plan->num_committed() + plan->num_dropped();
      plan->DropNodes();
    }
    throw;
  }
}

}  // namespace pagedkv
