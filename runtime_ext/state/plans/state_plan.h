// SPDX-License-Identifier: Apache-2.0
/*!
 * \file state_plan.h
 * \brief What a step does with the states of one state group: pages, and rows to compute them from.
 *
 * A run takes the last state of a sequence through positions that it does not cover yet, the rows
 * of the step among them, and leaves a state behind every interval and behind the last position.
 * The last page is written in place where only the sequence has it: an aborted step drops that
 * state, for it can be computed again from the one before.
 *
 * Nodes of token trees change no state that is kept. Their states are in pages of the step. The
 * branches are computed depth first, and the last child of a branch overwrites its state. So the
 * step needs a page for each state that is still to be read, and one for the ends of all branches:
 *
 *     0 - 1 - 2        page 1: behind node 0, then behind node 3
 *      \- 3 - 4        page 0: behind nodes 2, 4 and 5, which nobody reads
 *          \- 5
 */
#ifndef TVM_PAGEDKV_STATE_PLANS_STATE_PLAN_H_
#define TVM_PAGEDKV_STATE_PLANS_STATE_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "state/table/sequence_table.h"

namespace pagedkv {

class StatePlan {
 public:
  StatePlan(SequenceTable* table, int32_t state_group);

  // The calls follow those of ForwardPlan.
  void Clear();
  /*!
   * \brief Adds a run of the next sequence of the step.
   * \param end The text position behind the last one whose state is kept.
   * \param parents Parents of all nodes of the sequence's tree, those of the step included; empty
   *   without a tree.
   */
  void Add(Sequence* sequence, int64_t end, std::vector<int32_t> parents);
  /*! \throws Error (CacheFullError). */
  void RequirePages() const;
  /*! \brief Makes room so that Acquire and Commit cannot fail. May throw std::bad_alloc. */
  void Reserve();
  void Acquire() noexcept;
  /*! \brief Undoes Acquire exactly: nothing has been written. */
  void Release() noexcept;
  void Commit() noexcept;
  void Finish() noexcept;
  /*! \brief Drops the states of the step, also where its rows stay. */
  void Abort() noexcept;

  /*! \brief Rows [begin, end) of a run, computed from the state of one page into another one. */
  struct Segment {
    int32_t read_page;  // -1: from zeros
    int32_t write_page;
    int64_t begin, end;    // text positions, of a run
    const int32_t* nodes;  // or nodes of a tree, [num_nodes]
    int64_t num_nodes;
  };
  /*! \brief Calls visit(segment) for the segments of a run, in order; after Acquire. */
  template <typename Visitor>
  void VisitSegments(size_t run, Visitor visit) const;

 private:
  /*! \brief Nodes in a row, each but the last of which has one child. */
  struct Branch {
    std::vector<int32_t> nodes;
    int32_t read_page = -1;  // among the scratch pages of a run; -1: the last state that is kept
    int32_t write_page = 0;  // 0 where no branch follows
  };
  struct Run {
    Sequence* sequence = nullptr;
    int64_t begin = 0, end = 0;  // lengths: of the last state, and of the one that is left behind
    size_t num_kept = 0;         // pages of the sequence
    size_t first_new = 0, num_new = 0;  // among the pages that the step takes
    bool is_in_place = false;
    int32_t replaced = -1;  // a shared last page
    std::vector<Branch> branches;
    size_t first_scratch = 0, num_scratch = 0;
  };

  int64_t interval() const { return geometry_.state_group(group_).interval; }
  PagePool& pool() const { return table_->pool(geometry_.StatePool(group_)); }
  /*! \brief The page of states as it is after the step. */
  int32_t PageAt(const Run& run, int64_t page) const;
  /*!
   * \brief The branches of a tree in the order in which their states are computed.
   * \param num_scratch The pages that they need at a time.
   */
  static std::vector<Branch> BranchesOf(const std::vector<int32_t>& parents, size_t* num_scratch);

  SequenceTable* table_;
  const PageGeometry& geometry_;
  int32_t group_;
  std::vector<Run> runs_;
  std::vector<int32_t> pages_;  // that the step has taken
  size_t num_pages_ = 0;        // that it needs
};

template <typename Visitor>
void StatePlan::VisitSegments(size_t index, Visitor visit) const {
  const Run& run = runs_[index];
  const SequenceStates& states = run.sequence->states[group_];
  int32_t last = run.begin > 0 ? states.pages.back() : -1;
  for (int64_t begin = run.begin; begin < run.end;) {
    const int64_t page = begin / interval(), end = std::min(run.end, (page + 1) * interval());
    const int32_t target = PageAt(run, page);
    visit(Segment{last, target, begin, end, nullptr, 0});
    last = target;
    begin = end;
  }
  const int32_t* scratch = pages_.data() + run.first_scratch;
  for (const Branch& branch : run.branches) {
    visit(Segment{branch.read_page < 0 ? last : scratch[branch.read_page],
                  scratch[branch.write_page], 0, 0, branch.nodes.data(),
                  static_cast<int64_t>(branch.nodes.size())});
  }
}

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_PLANS_STATE_PLAN_H_
