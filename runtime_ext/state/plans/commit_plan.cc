// SPDX-License-Identifier: Apache-2.0
/*!
 * \file commit_plan.cc
 * \brief The commit of token trees.
 */
#include "state/plans/commit_plan.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "base/error.h"

namespace pagedkv {

void CommitPlan::Prepare(IntSpan sequence_ids, IntSpan leaves) {
  if (sequence_ids.size != leaves.size) {
    Raise(kValueError, "a commit needs one leaf for each sequence, got ", sequence_ids.size,
          " ids and ", leaves.size, " leaves");
  }
  items_.clear();
  num_committed_ = num_dropped_ = num_moves_ = 0;
  std::unordered_set<int64_t> seen;
  for (size_t i = 0; i < sequence_ids.size; ++i) {
    Sequence& sequence = table_->At(sequence_ids.data[i]);
    const int64_t leaf = leaves.data[i], num_nodes = sequence.tree.size();
    if (!seen.insert(sequence.id).second) {
      Raise(kValueError, "sequence ", sequence.id, " is twice in the commit");
    }
    if (leaf < -1 || leaf >= num_nodes) {
      Raise(kValueError, "the accepted leaf of sequence ", sequence.id, " must be one of its ",
            num_nodes, " token tree nodes that are not committed, or -1 for none, got ", leaf);
    }
    Item item{&sequence, {}, 0};
    if (leaf >= 0) item.path = sequence.tree.PathTo(leaf);
    const auto path_length = static_cast<int64_t>(item.path.size());
    while (item.num_in_place < path_length && item.path[item.num_in_place] == item.num_in_place) {
      ++item.num_in_place;
    }
    num_committed_ += path_length;
    num_dropped_ += num_nodes - path_length;
    num_moves_ += path_length - item.num_in_place;
    items_.push_back(std::move(item));
  }
}

void CommitPlan::Acquire() {
  try {
    // Copies for shared pages come first; histories are spared with what is left.
    for (const auto kind : {CopyOnWrite::Kind::kShared, CopyOnWrite::Kind::kKept}) {
      for (const Item& item : items_) {
        const auto path_length = static_cast<int64_t>(item.path.size());
        if (item.num_in_place == path_length) continue;
        const int64_t first = item.sequence->committed_length();
        copies_.Acquire(item.sequence, first + item.num_in_place, first + path_length, kind);
      }
    }
  } catch (...) {
    Release(/*were_copied=*/false);
    throw;
  }
}

void CommitPlan::Release(bool were_copied) noexcept { copies_.Release(were_copied); }

void CommitPlan::Commit() noexcept {
  copies_.Commit();
  for (const Item& item : items_) {
    const auto path_length = static_cast<int64_t>(item.path.size());
    const int64_t first = item.sequence->committed_length();
    copies_.Overwrite(*item.sequence, first + item.num_in_place, first + path_length);
    table_->CommitNodes(item.sequence, item.path);
  }
}

void CommitPlan::DropNodes() noexcept {
  for (const Item& item : items_) table_->CommitNodes(item.sequence, {});
}

void CommitPlan::FillMoveIndptr(int32_t* out) const {
  *out = 0;
  for (const Item& item : items_) {
    const auto path_length = static_cast<int64_t>(item.path.size());
    out[1] = out[0] + static_cast<int32_t>(path_length - item.num_in_place);
    ++out;
  }
}

int32_t CommitPlan::SlotOf(const Item& item, int32_t group, int64_t position) const {
  const int64_t page_size = table_->page_size();
  const int64_t index = position / page_size - item.sequence->first_pages[group];
  int32_t page = item.sequence->pages[group][index];
  for (const PageCopy& copy : copies_.copies()) {
    if (copy.sequence == item.sequence && copy.group == group && copy.index == index) {
      page = copy.destination;
    }
  }
  return static_cast<int32_t>(page * page_size + position % page_size);
}

void CommitPlan::FillMoves(int32_t group, int32_t* out) const {
  int32_t* sources = out;
  int32_t* destinations = out + num_moves_;
  for (const Item& item : items_) {
    const int64_t first = item.sequence->committed_length();
    const auto path_length = static_cast<int64_t>(item.path.size());
    for (int64_t i = item.num_in_place; i < path_length; ++i) {
      *sources++ = SlotOf(item, group, first + item.path[i]);
      *destinations++ = SlotOf(item, group, first + i);
    }
  }
}

}  // namespace pagedkv
