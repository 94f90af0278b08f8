// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sequence_table_integrity.cc
 * \brief The invariants of the sequences and their pages.
 */
#include <vector>

#include "base/error.h"
#include "state/table/sequence_table.h"

namespace pagedkv {

void SequenceTable::CheckPages(const Sequence& sequence, int32_t group, bool has_slid) const {
  const int64_t first = sequence.first_pages[group];
  auto num_pages = static_cast<int64_t>(sequence.pages[group].size());
  if (num_pages != geometry_.NumPages(sequence, group, sequence.length)) {
    Raise(kRuntimeError, "sequence ", sequence.id, " of length ", sequence.length, " has ",
          num_pages, " pages beside ", first, " gone ones in group ", group);
  }
  const bool is_missing =  // ingredients: see RecurrentStates::CheckIntegrity
      geometry_.StateGroupOf(group) >= 0 ? false
      : geometry_.HasWindow(group)
          ? first * geometry_.page_size() >
                geometry_.FirstVisible(group,
                                       sequence.window.TextLength(sequence.committed_length()))
          : first > geometry_.NumPagesGone(sequence, group);
  has_slid = has_slid && sequence.import == nullptr;  // an import slides at its end
  if (first < 0 || is_missing || (has_slid && first < geometry_.NumPagesGone(sequence, group))) {
    Raise(kRuntimeError, "sequence ", sequence.id, " of committed length ",
          sequence.committed_length(), " has lost ", first, " pages in group ", group,
          " with a window of ", geometry_.window(group), ", but ",
          geometry_.NumPagesGone(sequence, group), " are not needed");
  }
  for (int32_t page : sequence.pages[group]) {
    if (page < 0 || page >= pools_[group].num_pages()) {
      Raise(kRuntimeError, "sequence ", sequence.id, " has page ", page, ", which is out of range");
    }
  }
}

void SequenceTable::CheckWindow(const Sequence& sequence, bool has_slid) const {
  const SequenceWindow& window = sequence.window;
  const bool is_sane = window.num_sinks >= 0 && window.num_dropped >= 0 &&
                       (window.size == 0 || window.num_held() > window.num_sinks) &&
                       (window.num_dropped == 0 || sequence.length > window.num_sinks) &&
                       (window.IsSet() || window.num_sinks == 0) &&
                       (!window.IsSet() || sequence.tree.empty());
  const bool is_too_long = has_slid && window.size > 0 && sequence.length > window.num_held();
  if (!is_sane || is_too_long) {
    Raise(kRuntimeError, "sequence ", sequence.id, " of length ", sequence.length,
          " has a window of ", window.size, " with ", window.num_sinks, " sinks and has dropped ",
          window.num_dropped, " positions, beside ", sequence.tree.size(), " tree nodes");
  }
}

void SequenceTable::CheckHistory(const Sequence& sequence, int32_t group,
                                 std::vector<int32_t>* num_keepers,
                                 std::vector<int32_t>* num_returns) const {
  const PageHistory& history = sequence.histories[group];
  const int64_t first =
      sequence.receive ? sequence.receive->groups[group].first_page : sequence.first_pages[group];
  if (history.size() > (geometry_.HasWindow(group) ? first : 0)) {
    Raise(kRuntimeError, "sequence ", sequence.id, " notes ", history.size(), " pages before the ",
          first, " that have left group ", group, " with a window of ", geometry_.window(group));
  }
  history.CountKeepers(pools_[group], num_keepers, num_returns);
}

void SequenceTable::CheckIntegrity(bool has_slid) const {
  int64_t total_length = 0;
  for (const auto& [id, sequence] : sequences_) {
    total_length += sequence.length;
    sequence.tree.CheckIntegrity(id);
    if (sequence.committed_length() < 0) {
      Raise(kRuntimeError, "sequence ", id, " of length ", sequence.length, " has ",
            sequence.tree.size(), " tree nodes");
    }
    const bool is_marked = sequence.first_unwritten != Sequence::kAllWritten;
    if (is_marked && sequence.first_unwritten >= sequence.window.TextLength(sequence.length)) {
      Raise(kRuntimeError, "sequence ", id, " of length ", sequence.length,
            " lacks rows from text position ", sequence.first_unwritten, " on, behind its end");
    }
  }
  if (total_length != total_length_) {
    Raise(kRuntimeError, "the lengths sum to ", total_length, ", not to ", total_length_);
  }
  std::vector<std::vector<int32_t>> num_keepers;  // [group][page]
  for (const PagePool& pool : pools_) num_keepers.emplace_back(pool.num_pages(), 0);
  std::vector<std::vector<int32_t>> num_returns = num_keepers;
  prefixes_.CheckIntegrity(sequences_, &num_keepers);
  for (int32_t s = 0; s < num_state_groups(); ++s) {
    const int32_t p = geometry_.StatePool(s);
    std::vector<int32_t> num_owners = pins_.counts(p);
    for (const auto& [id, sequence] : sequences_) {
      states_.CheckIntegrity(sequence, s, {&num_owners, &num_keepers[p], &num_returns[p]});
    }
    pools_[p].CheckIntegrity(num_owners, num_keepers[p], num_returns[p]);
  }
  for (int32_t g = 0; g < num_groups(); ++g) {
    std::vector<int32_t> num_owners = pins_.counts(g);
    for (const auto& [id, sequence] : sequences_) {
      if (sequence.id != id) Raise(kRuntimeError, "sequence ", id, " believes to be ", sequence.id);
      CheckWindow(sequence, has_slid);
      CheckPages(sequence, g, has_slid);
      CheckHistory(sequence, g, &num_keepers[g], &num_returns[g]);
      for (int32_t page : sequence.pages[g]) ++num_owners[page];
      if (sequence.receive == nullptr) continue;
      const Receive::Group& backup = sequence.receive->groups[g];
      for (int32_t page : backup.gone) ++num_owners[page];
      if (backup.replaced >= 0) ++num_owners[backup.replaced];
    }
    pools_[g].CheckIntegrity(num_owners, num_keepers[g], num_returns[g]);
  }
}

}  // namespace pagedkv
