// SPDX-License-Identifier: Apache-2.0
/*!
 * \file forward_plan.cc
 * \brief The plan of one step: checks, pages, commit.
 */
#include "state/plans/forward_plan.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/error.h"

namespace pagedkv {

ForwardPlan::ForwardPlan(SequenceTable* table, int64_t max_num_rows)
    : table_(table), max_num_rows_(max_num_rows) {
  for (int32_t g = 0; g < table->num_groups(); ++g) {
    const int32_t num_pages = table->pool(g).num_pages();
    groups_.push_back({{},
                       {},
                       {},
                       std::vector<int32_t>(num_pages, 0),
                       std::vector<int32_t>(num_pages, 0),
                       false,
                       SharedPrefix(num_pages, table->page_size())});
  }
  for (int32_t s = 0; s < table->num_state_groups(); ++s) states_.emplace_back(table, s);
}

void ForwardPlan::Prepare(IntSpan sequence_ids, IntSpan append_lengths,
                          std::optional<IntSpan> tree_parents) {
  tree_parents_ = tree_parents;
  has_spans_ = false;
  PrepareItems(sequence_ids, append_lengths);
  PrepareTrees();
  for (int32_t g = 0; g < table_->num_groups(); ++g) CountPages(g);
  for (int32_t g = 0; g < table_->num_groups(); ++g) FindSharedPages(g);
  PrepareStates();
}

void ForwardPlan::PrepareItems(IntSpan sequence_ids, IntSpan append_lengths) {
  if (sequence_ids.size != append_lengths.size) {
    Raise(kValueError, "a step needs one append length for each sequence, got ", sequence_ids.size,
          " ids and ", append_lengths.size, " lengths");
  }
  if (sequence_ids.size == 0) Raise(kValueError, "a step needs at least one sequence, got none");
  if (sequence_ids.size > static_cast<size_t>(table_->max_num_sequences())) {
    Raise(kValueError, "the step has ", sequence_ids.size,
          " sequences, more than max_num_sequences (", table_->max_num_sequences(),
          "), which bounds the sequences of one step");
  }
  // Most batches are like the last one: then its items say where the sequences are.
  if (table_->num_removals() != num_removals_) items_.clear();
  num_removals_ = table_->num_removals();
  const size_t num_known = std::min(items_.size(), sequence_ids.size);
  items_.resize(num_known);
  items_.reserve(sequence_ids.size);
  num_rows_ = max_append_ = 0;
  has_windows_ = has_nodes_ = false;
  ++batch_mark_;
  for (size_t i = 0; i < sequence_ids.size; ++i) {
    const int64_t id = sequence_ids.data[i];
    const bool is_known = i < num_known && items_[i].sequence->id == id;
    Sequence& sequence = is_known ? table_->Use(items_[i].sequence) : table_->At(id);
    int64_t num_append = append_lengths.data[i];
    if (sequence.batch_mark == batch_mark_) {
      Raise(kValueError, "sequence ", sequence.id, " is twice in the step");
    }
    if (num_append < 1) {
      Raise(kValueError, "the append length of sequence ", sequence.id, " must be at least 1, got ",
            num_append);
    }
    if (num_append > max_num_rows_ - num_rows_) {
      Raise(kValueError, "the step has more rows than prefill_chunk_size (", max_num_rows_,
            "): sequence ", sequence.id, " appends ", num_append, " after ", num_rows_, " others");
    }
    if (num_append > std::numeric_limits<int32_t>::max() - sequence.length) {
      Raise(kValueError, "sequence ", sequence.id, " of length ", sequence.length,
            " would have more than 2^31 - 1 positions");
    }
    sequence.batch_mark = batch_mark_;
    const int64_t num_nodes = sequence.tree.size();
    const Item item{&sequence, num_append, sequence.length, num_nodes, num_rows_};
    i < num_known ? void(items_[i] = item) : items_.push_back(item);
    num_rows_ += num_append;
    max_append_ = std::max(max_append_, num_append);
    has_windows_ = has_windows_ || sequence.window.IsSet();
    has_nodes_ = has_nodes_ || num_nodes > 0;
  }
}

void ForwardPlan::PrepareTrees() {
  needs_tree_mask_ = false;
  num_tree_nodes_ = 0;
  if (has_trees() && tree_parents_->size != static_cast<size_t>(num_rows_)) {
    Raise(kValueError, "a step with token trees needs the parent of each of its ", num_rows_,
          " rows, got ", tree_parents_->size, " parents");
  }
  if (!has_trees() && !has_nodes_) return;
  for (const Item& item : items_) {
    const Sequence& sequence = *item.sequence;
    if (has_trees() && sequence.window.IsSet()) {
      Raise(kValueError, "sequence ", sequence.id, " has a ",
            sequence.window.size > 0 ? "sliding window" : "gap behind its sinks",
            ", so it cannot be in a step with token trees");
    }
    if (has_trees()) {
      const bool is_chain = sequence.tree.CheckParents(TreeParentsOf(item), sequence.id);
      needs_tree_mask_ = needs_tree_mask_ || !is_chain;
      num_tree_nodes_ += item.num_earlier_nodes + item.num_append;
    } else if (!sequence.tree.empty()) {
      Raise(kValueError, "sequence ", sequence.id, " has ", sequence.tree.size(),
            " token tree nodes that are not committed; commit or drop them before a step without "
            "a token tree");
    }
  }
}

void ForwardPlan::PrepareStates() {
  for (StatePlan& states : states_) {
    states.Clear();
    for (const Item& item : items_) {
      const int64_t num_kept = has_trees() ? item.past_length - item.num_earlier_nodes
                                           : item.past_length + item.num_append;
      std::vector<int32_t> parents;
      if (has_trees()) {
        const IntSpan own = TreeParentsOf(item);
        parents = item.sequence->tree.parents();
        parents.insert(parents.end(), own.data, own.data + own.size);
      }
      states.Add(item.sequence, item.sequence->window.TextLength(num_kept), std::move(parents));
    }
    states.RequirePages();
  }
}

void ForwardPlan::FindSharedLastPages(int32_t group) {
  const PagePool& pool = table_->pool(group);
  GroupPages& pages = groups_[group];
  // Rows go to the last page when it is not full.
  auto visit = [&](auto f) {
    for (size_t i = 0; i < items_.size(); ++i) {
      if (SlotOfNextRow(items_[i]) == 0) continue;
      const int32_t page = items_[i].sequence->pages[group].back();
      if (pool.RefCount(page) > 1) f(static_cast<int32_t>(i), page);
    }
  };
  visit([&](int32_t, int32_t page) { pages.num_writers[page] = 0; });
  visit([&](int32_t i, int32_t page) {
    int32_t& longest = pages.longest_writer[page];
    const bool is_first = pages.num_writers[page]++ == 0;
    const int64_t length = TextLength(items_[i], PageRange::kPast);
    if (is_first || length >= TextLength(items_[longest], PageRange::kPast)) longest = i;
  });
}

bool ForwardPlan::MustCopyLastPage(int32_t group, size_t item) const {
  const GroupPages& pages = groups_[group];
  if (SlotOfNextRow(items_[item]) == 0) return false;
  const int32_t page = items_[item].sequence->pages[group].back();
  const int32_t num_owners = table_->pool(group).RefCount(page);
  if (num_owners == 1) return false;
  // When all owners are in this batch, one of them keeps the page: the one with the longest text,
  // whose new rows overwrite none of the others. If the step is aborted, they all get it back.
  return pages.num_writers[page] < num_owners ||
         pages.longest_writer[page] != static_cast<int32_t>(item);
}

void ForwardPlan::CountPages(int32_t group) {
  const PagePool& pool = table_->pool(group);
  GroupPages& pages = groups_[group];
  pages.kept.clear();
  pages.offsets.assign(1, 0);
  const bool has_shared_pages = pool.num_shared() > 0;
  if (has_shared_pages) FindSharedLastPages(group);
  int64_t num_entries = 0;
  for (size_t i = 0; i < items_.size(); ++i) {
    const Item& item = items_[i];
    auto kept = static_cast<int64_t>(item.sequence->pages[group].size());
    if (has_shared_pages && MustCopyLastPage(group, i)) --kept;
    const int64_t length = item.past_length + item.num_append;
    const int64_t num_pages = table_->geometry().NumPages(*item.sequence, group, length);
    num_entries += num_pages;
    pages.kept.push_back(kept);
    pages.offsets.push_back(pages.offsets.back() + num_pages - kept);
  }
  if (pages.offsets.back() > pool.num_available()) table_->RaiseFull(group, pages.offsets.back());
  if (num_entries > std::numeric_limits<int32_t>::max()) {
    Raise(kValueError, "the page table of the step would have ", num_entries,
          " entries, more than 2^31 - 1");
  }
  if (pool.num_held_and_kept() > 0) CopyKeptLastPages(group);
}

/*! \brief Whether the item's rows go to a page with keepers. */
bool ForwardPlan::WritesToKeptPage(int32_t group, size_t item) const {
  const std::vector<int32_t>& list = items_[item].sequence->pages[group];
  return groups_[group].kept[item] == static_cast<int64_t>(list.size()) &&
         SlotOfNextRow(items_[item]) != 0 && table_->pool(group).NumKeepers(list.back()) > 0;
}

/*! \brief Copies last pages with keepers instead of overwriting them, while there is room. */
void ForwardPlan::CopyKeptLastPages(int32_t group) {
  GroupPages& pages = groups_[group];
  const PagePool& pool = table_->pool(group);
  const int64_t num_needed = pages.offsets.back();
  int64_t num_copied = 0;
  for (size_t i = 0; i < items_.size(); ++i) {
    if (WritesToKeptPage(group, i) &&
        num_needed + num_copied < pool.NumForCopyOf(items_[i].sequence->pages[group].back())) {
      --pages.kept[i];
      ++num_copied;
    }
    pages.offsets[i + 1] += num_copied;
  }
}

void ForwardPlan::FindSharedPages(int32_t group) {
  GroupPages& pages = groups_[group];
  if (!pages.shares_prefixes) return;
  const PagePool& pool = table_->pool(group);
  pages.shared.Clear();
  if (pool.num_shared() == 0) return;
  for (const Item& item : items_) {
    // All rows of the step see every slot of a full page before the tree nodes, and none writes
    // there. That is not so for a sequence with a window.
    const int64_t num_committed = item.past_length - item.num_earlier_nodes;
    const int64_t num_pages =
        item.sequence->window.IsSet() ? 0 : table_->geometry().PageOf(num_committed);
    pages.shared.Add(item.sequence->pages[group].data(), num_pages);
  }
  pages.shared.Find(pool);
}

void ForwardPlan::Acquire() {
  // Reserve first: what follows cannot fail.
  size_t num_copies = 0;
  for (int32_t g = 0; g < table_->num_groups(); ++g) {
    GroupPages& pages = groups_[g];
    pages.acquired.reserve(pages.offsets.back());
    for (size_t i = 0; i < items_.size(); ++i) {
      if (pages.offsets[i] == pages.offsets[i + 1]) continue;  // the pages stay as they are
      std::vector<int32_t>& list = items_[i].sequence->pages[g];
      size_t size = pages.kept[i] + pages.offsets[i + 1] - pages.offsets[i];
      if (size > list.capacity()) list.reserve(std::max(size, 2 * list.capacity()));
      num_copies += pages.kept[i] < static_cast<int64_t>(list.size());
    }
  }
  copies_.clear();
  copies_.reserve(num_copies);
  for (StatePlan& states : states_) states.Reserve();
  if (has_trees()) {
    for (const Item& item : items_) item.sequence->tree.Reserve(item.num_append);
    for (const Item& item : items_) item.sequence->tree.Append(TreeParentsOf(item));
  }

  for (int32_t g = 0; g < table_->num_groups(); ++g) {
    GroupPages& pages = groups_[g];
    pages.acquired.clear();
    for (int64_t i = 0; i < pages.offsets.back(); ++i) {
      pages.acquired.push_back(table_->pool(g).Allocate());
    }
    for (size_t i = 0; i < items_.size() && num_copies > 0; ++i) {
      const Item& item = items_[i];
      const std::vector<int32_t>& list = item.sequence->pages[g];
      if (pages.kept[i] == static_cast<int64_t>(list.size())) continue;
      copies_.push_back({item.sequence, g, pages.kept[i], list.back(),
                         pages.acquired[pages.offsets[i]],
                         static_cast<int32_t>(SlotOfNextRow(item))});
    }
  }
  for (StatePlan& states : states_) states.Acquire();
}

void ForwardPlan::Release() noexcept {
  for (StatePlan& states : states_) states.Release();
  for (int32_t g = table_->num_groups() - 1; g >= 0; --g) {
    GroupPages& pages = groups_[g];
    PagePool& pool = table_->pool(g);
    for (size_t i = items_.size(); i-- > 0;) {
      const auto num_pages = static_cast<int64_t>(items_[i].sequence->pages[g].size());
      for (int64_t k = pages.offsets[i + 1]; k-- > pages.offsets[i];) {
        const bool is_copy = k == pages.offsets[i] && pages.kept[i] < num_pages;
        is_copy ? pool.Release(pages.acquired[k]) : pool.Unallocate(pages.acquired[k]);
      }
    }
    pages.acquired.clear();
  }
  for (const Item& item : items_) item.sequence->tree.Truncate(item.num_earlier_nodes);
  copies_.clear();
}

void ForwardPlan::Commit() noexcept {
  for (int32_t g = 0; g < table_->num_groups(); ++g) {
    const GroupPages& pages = groups_[g];
    PagePool& pool = table_->pool(g);
    for (size_t i = 0; pool.num_held_and_kept() > 0 && i < items_.size(); ++i) {
      if (WritesToKeptPage(g, i)) pool.Overwrite(items_[i].sequence->pages[g].back());
    }
    for (size_t i = 0; i < items_.size(); ++i) {
      if (pages.offsets[i] == pages.offsets[i + 1]) continue;
      std::vector<int32_t>& list = items_[i].sequence->pages[g];
      list.resize(pages.kept[i]);
      list.insert(list.end(), pages.acquired.begin() + pages.offsets[i],
                  pages.acquired.begin() + pages.offsets[i + 1]);
    }
  }
  for (StatePlan& states : states_) states.Commit();
  for (const PageCopy& copy : copies_) table_->pins().PinInPlaceOfOwner(copy.group, copy.source);
  for (const Item& item : items_) {
    if (item.sequence->receive) item.sequence->receive->is_in_step = true;
    table_->Grow(item.sequence, item.num_append);
  }
  MarkSpans();
}

void ForwardPlan::Finish(bool is_written) noexcept {
  for (const PageCopy& copy : copies_) table_->pins().Unpin(copy.group, copy.source);
  // A layer that was left out has not computed states, not even those of earlier positions.
  for (StatePlan& states : states_) is_written ? states.Finish() : states.Abort();
  copies_.clear();
  for (const Item& item : items_) {
    table_->FinishReceive(item.sequence);
    if (!is_written) table_->NoteUnwritten(item.sequence, item.past_length);
    table_->prefixes().AddPages(item.sequence);  // before the windows leave some behind
    table_->Slide(item.sequence);
  }
}

void ForwardPlan::Abort() noexcept {
  for (StatePlan& states : states_) states.Abort();
  for (int32_t g = table_->num_groups() - 1; g >= 0; --g) {
    GroupPages& pages = groups_[g];
    for (size_t i = 0; i < items_.size(); ++i) items_[i].sequence->pages[g].resize(pages.kept[i]);
    for (; !pages.acquired.empty(); pages.acquired.pop_back()) {
      table_->pool(g).Release(pages.acquired.back());
    }
  }
  for (const PageCopy& copy : copies_) {
    copy.sequence->pages[copy.group].push_back(copy.source);  // there was room for the copy
    table_->pins().OwnInPlaceOfPin(copy.group, copy.source);
  }
  copies_.clear();
  for (const Item& item : items_) {
    item.sequence->tree.Truncate(item.num_earlier_nodes);
    if (item.sequence->receive) item.sequence->receive->is_in_step = false;
    table_->Grow(item.sequence, -item.num_append);
    // A span of this step; those of earlier ones begin before it.
    item.sequence->ForgetSpansFrom(item.sequence->window.TextLength(item.past_length));
    table_->prefixes().Truncate(item.sequence, item.sequence->committed_length());
  }
}

void ForwardPlan::RequireTextPositions() const {
  for (const Item& item : items_) {
    const int64_t text_length = TextLength(item, PageRange::kWithStep);
    if (text_length <= std::numeric_limits<int32_t>::max()) continue;
    Raise(kValueError, "sequence ", item.sequence->id, " would have ", text_length,
          " positions, those that its window has dropped included, which is more than 2^31 - 1; "
          "rope_mode inline counts within the window");
  }
}

void ForwardPlan::RequireRowsSeeEachOther(const char* what) const {
  for (const Item& item : items_) {
    const SequenceWindow& window = item.sequence->window;
    const int64_t max_rows = window.num_held() - window.num_sinks + 1;
    if (window.size == 0 || item.num_append <= max_rows) continue;
    Raise(kValueError, what, " of ", item.num_append, " rows of sequence ", item.sequence->id,
          ", which has a window of ", window.size, " with ", window.num_sinks,
          " sinks; use attention, or at most ", max_rows, " rows");
  }
}

}  // namespace pagedkv
