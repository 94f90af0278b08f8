// SPDX-License-Identifier: Apache-2.0
/*!
 * \file state_plan.cc
 * \brief What a step does with the states of recurrent layers.
 */
#include "state/plans/state_plan.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"

namespace pagedkv {

StatePlan::StatePlan(SequenceTable* table, int32_t state_group)
    : table_(table), geometry_(table->geometry()), group_(state_group) {}

void StatePlan::Clear() {
  runs_.clear();
  num_pages_ = 0;
}

std::vector<StatePlan::Branch> StatePlan::BranchesOf(const std::vector<int32_t>& parents,
                                                     size_t* num_scratch) {
  struct Node {  // a branch of the tree, behind its parent
    Branch branch;
    std::vector<size_t> children;
    int32_t num_pages = 0;  // that its state and those behind it take at a time
  };
  std::vector<int32_t> num_children(parents.size(), 0);
  for (int32_t parent : parents) {
    if (parent >= 0) ++num_children[parent];
  }
  std::vector<size_t> branch_of(parents.size()), stack;
  std::vector<Node> tree;
  for (size_t node = 0; node < parents.size(); ++node) {  // parents come before their children
    const int32_t parent = parents[node];
    const bool goes_on = parent >= 0 && num_children[parent] == 1;
    branch_of[node] = goes_on ? branch_of[parent] : tree.size();
    if (!goes_on) {
      (parent < 0 ? stack : tree[branch_of[parent]].children).push_back(tree.size());
      tree.emplace_back();
    }
    tree[branch_of[node]].branch.nodes.push_back(static_cast<int32_t>(node));
  }
  for (size_t b = tree.size(); b-- > 0;) {
    std::vector<size_t>& children = tree[b].children;
    if (children.empty()) continue;
    // The one that needs most pages comes last, and has that of its parent as well.
    std::stable_sort(children.begin(), children.end(), [&](size_t one, size_t other) {
      return tree[one].num_pages > tree[other].num_pages;
    });
    tree[b].num_pages = std::max(tree[children[0]].num_pages, tree[children[1]].num_pages + 1);
  }
  *num_scratch = tree.empty() ? 0 : 1;
  for (size_t b : stack) {
    *num_scratch = std::max(*num_scratch, static_cast<size_t>(tree[b].num_pages) + 1);
    if (!tree[b].children.empty()) tree[b].branch.write_page = 1;
  }
  std::vector<Branch> branches;
  branches.reserve(tree.size());
  while (!stack.empty()) {
    Node& next = tree[stack.back()];
    stack.pop_back();
    for (size_t child : next.children) {
      Branch& branch = tree[child].branch;
      branch.read_page = next.branch.write_page;
      const bool is_last = child == next.children[0];
      if (!tree[child].children.empty()) branch.write_page = branch.read_page + (is_last ? 0 : 1);
      stack.push_back(child);
    }
    branches.push_back(std::move(next.branch));
  }
  return branches;
}

void StatePlan::Add(Sequence* sequence, int64_t end, std::vector<int32_t> parents) {
  const SequenceStates& states = sequence->states[group_];
  Run run;
  run.sequence = sequence;
  run.begin = states.length;
  run.end = end;
  run.num_kept = states.pages.size();
  if (run.begin < end && run.begin % interval() != 0) {
    const int32_t last = states.pages.back();
    run.is_in_place = pool().RefCount(last) == 1;
    if (!run.is_in_place) {
      run.replaced = last;
      --run.num_kept;
    }
  }
  const int64_t end_page = (end + interval() - 1) / interval();
  run.first_new = num_pages_;
  run.num_new = static_cast<size_t>(end_page - states.first_page) - run.num_kept;
  num_pages_ += run.num_new;
  run.branches = BranchesOf(parents, &run.num_scratch);
  run.first_scratch = num_pages_;
  num_pages_ += run.num_scratch;
  runs_.push_back(std::move(run));
}

void StatePlan::RequirePages() const {
  if (static_cast<int64_t>(num_pages_) <= pool().num_available()) return;
  size_t num_scratch = 0;
  for (const Run& run : runs_) num_scratch += run.num_scratch;
  const std::string of_trees =
      num_scratch > 0 ? ", " + std::to_string(num_scratch) + " of them for token trees" : "";
  Raise(kCacheFullError, "the step needs ", num_pages_, " pages for states of recurrent layers",
        of_trees, ", but ", pool().num_available(), " of ", pool().num_pages(), " are available");
}

void StatePlan::Reserve() {
  pages_.clear();
  pages_.reserve(num_pages_);
  for (const Run& run : runs_) {
    std::vector<int32_t>& list = run.sequence->states[group_].pages;
    const size_t size = run.num_kept + run.num_new;
    if (size > list.capacity()) list.reserve(std::max(size, 2 * list.capacity()));
  }
}

void StatePlan::Acquire() noexcept {
  for (size_t i = 0; i < num_pages_; ++i) pages_.push_back(pool().Allocate());
}

void StatePlan::Release() noexcept {
  for (; !pages_.empty(); pages_.pop_back()) pool().Unallocate(pages_.back());
}

int32_t StatePlan::PageAt(const Run& run, int64_t page) const {
  const SequenceStates& states = run.sequence->states[group_];
  const auto index = static_cast<size_t>(page - states.first_page);
  return index < run.num_kept ? states.pages[index] : pages_[run.first_new + index - run.num_kept];
}

void StatePlan::Commit() noexcept {
  for (const Run& run : runs_) {
    SequenceStates& states = run.sequence->states[group_];
    states.pages.resize(run.num_kept);
    const auto first = pages_.begin() + static_cast<ptrdiff_t>(run.first_new);
    states.pages.insert(states.pages.end(), first, first + static_cast<ptrdiff_t>(run.num_new));
    states.length = std::max(run.begin, run.end);
    // Other sequences of the step may read it.
    if (run.replaced >= 0) {
      table_->pins().PinInPlaceOfOwner(geometry_.StatePool(group_), run.replaced);
    }
    for (size_t i = 0; i < run.num_scratch; ++i) {
      table_->pins().PinInPlaceOfOwner(geometry_.StatePool(group_), pages_[run.first_scratch + i]);
    }
  }
}

void StatePlan::Finish() noexcept {
  const int32_t pool = geometry_.StatePool(group_);
  for (const Run& run : runs_) {
    if (run.replaced >= 0) table_->pins().Unpin(pool, run.replaced);
    for (size_t i = run.num_scratch; i-- > 0;) {
      table_->pins().Unpin(pool, pages_[run.first_scratch + i]);
    }
  }
  Clear();
}

void StatePlan::Abort() noexcept {
  const int32_t pool_index = geometry_.StatePool(group_);
  for (size_t r = runs_.size(); r-- > 0;) {
    const Run& run = runs_[r];
    SequenceStates& states = run.sequence->states[group_];
    for (size_t i = run.num_scratch; i-- > 0;) {
      table_->pins().Unpin(pool_index, pages_[run.first_scratch + i]);
    }
    pool().ReleaseFrom(run.num_kept, &states.pages);
    states.length = run.begin;
    if (run.replaced >= 0) {
      table_->pins().OwnInPlaceOfPin(pool_index, run.replaced);
      states.pages.push_back(run.replaced);  // there was room for the new page
    }
    if (run.is_in_place) {
      pool().ReleaseFrom(run.num_kept - 1, &states.pages);
      states.length = run.begin / interval() * interval();
    }
  }
  Clear();
}

}  // namespace pagedkv
