// SPDX-License-Identifier: Apache-2.0
/*!
 * \file recurrent_states.cc
 * \brief The states of recurrent layers that sequences keep.
 */
#include "state/sequences/recurrent_states.h"

#include <optional>
#include <utility>

#include "base/error.h"

namespace pagedkv {

int32_t RecurrentStates::FindPage(const Sequence& sequence, int32_t s, int64_t page) const {
  const SequenceStates& states = sequence.states[s];
  if (page < states.first_page) {
    return states.history.Find(states.first_page - page, pool(s));
  }
  const bool is_full = (page + 1) * interval(s) <= states.length;
  return is_full ? states.pages[page - states.first_page] : -1;
}

int64_t RecurrentStates::Base(const Sequence& sequence, int32_t s, int64_t text_length,
                              int64_t* missing_end) const {
  const int64_t length = sequence.states[s].length;
  if (length <= text_length) return length;
  const int32_t group = geometry_->state_group(s).ingredients;
  const int64_t first = sequence.first_pages[group];
  int64_t end = 0;
  const int64_t base = LastStateBefore(
      *geometry_, s, text_length, [&](int64_t page) { return FindPage(sequence, s, page) >= 0; },
      [&](int64_t page) {
        return page >= first || sequence.histories[group].Find(first - page, (*pools_)[group]) >= 0;
      },
      &end);
  if (missing_end != nullptr) *missing_end = end;
  return base;
}

void RecurrentStates::Reserve(Sequence* sequence) const {
  for (SequenceStates& states : sequence->states) states.pages.reserve(1);
}

void RecurrentStates::Truncate(Sequence* sequence, int64_t text_length) const noexcept {
  for (int32_t s = 0; s < geometry_->num_state_groups(); ++s) {
    SequenceStates& states = sequence->states[s];
    if (states.length <= text_length) continue;
    const int64_t length = Base(*sequence, s, text_length);
    const int64_t end = length / interval(s), first = states.first_page;
    const int32_t taken_back = end > 0 && end <= first ? FindPage(*sequence, s, end - 1) : -1;
    if (taken_back >= 0) pool(s).AddOwner(taken_back);
    pool(s).ReleaseFrom(static_cast<size_t>(std::max<int64_t>(end - first, 0)), &states.pages);
    if (end <= first) {
      states.first_page = std::max<int64_t>(end - 1, 0);
      states.history.DropLast(first - states.first_page, &pool(s));
    }
    if (taken_back >= 0) states.pages.push_back(taken_back);
    states.length = length;
  }
}

void RecurrentStates::Share(const Sequence& source, Sequence* target,
                            int64_t text_length) const noexcept {
  for (int32_t s = 0; s < geometry_->num_state_groups(); ++s) {
    const SequenceStates& from = source.states[s];
    SequenceStates& to = target->states[s];
    const int64_t length = Base(source, s, text_length);
    const bool has_last = length == from.length;
    const int64_t end = has_last ? from.end_page() : length / interval(s);
    to.first_page = end > from.first_page ? from.first_page : std::max<int64_t>(end - 1, 0);
    for (int64_t page = to.first_page; page < end; ++page) {
      const int64_t index = page - from.first_page;
      const int32_t id = index >= 0 ? from.pages[index] : FindPage(source, s, page);
      pool(s).AddOwner(id);
      to.pages.push_back(id);  // within its capacity
    }
    to.length = length;
    if (end > 0)
      to.history.CopyWithoutLast(from.history, from.first_page - to.first_page, &pool(s));
  }
}

void RecurrentStates::Slide(Sequence* sequence) const noexcept {
  for (int32_t s = 0; s < geometry_->num_state_groups(); ++s) {
    SequenceStates& states = sequence->states[s];
    const int64_t first =
        std::max<int64_t>(geometry_->FirstStateToKeep(*sequence, s) / interval(s) - 1, 0);
    const int64_t count = first - states.first_page;
    if (count <= 0) continue;
    for (int64_t i = 0; i < count; ++i) {
      states.history.Append(states.pages[i], &pool(s));
      pool(s).Release(states.pages[i]);
    }
    states.pages.erase(states.pages.begin(), states.pages.begin() + count);
    states.first_page = first;
  }
}

void RecurrentStates::Release(SequenceStates* states, int32_t s) const noexcept {
  states->history.Clear(&pool(s));
  pool(s).ReleaseFrom(0, &states->pages);
  states->length = states->first_page = 0;
}

void RecurrentStates::Release(Sequence* sequence) const noexcept {
  for (int32_t s = 0; s < geometry_->num_state_groups(); ++s) Release(&sequence->states[s], s);
}

void RecurrentStates::DropReplaced(Receive* receive) const noexcept {
  for (int32_t s = 0; s < geometry_->num_state_groups(); ++s) {
    if (receive->states[s]) Release(&*receive->states[s], s);
  }
}

void RecurrentStates::RestoreReplaced(Sequence* sequence) const noexcept {
  for (int32_t s = geometry_->num_state_groups() - 1; s >= 0; --s) {
    std::optional<SequenceStates>& old = sequence->receive->states[s];
    if (!old) continue;
    Release(&sequence->states[s], s);
    sequence->states[s] = std::move(*old);
  }
}

void RecurrentStates::CheckIntegrity(const Sequence& sequence, int32_t s,
                                     const PageCounts& counts) const {
  const SequenceStates& states = sequence.states[s];
  const int64_t end_page = (states.length + interval(s) - 1) / interval(s);
  const int64_t text_length = sequence.window.TextLength(sequence.committed_length());
  // From the last full state the last one can be computed again.
  const int64_t num_full = states.length / interval(s);
  const int32_t group = geometry_->state_group(s).ingredients;
  const int64_t first_ingredients = sequence.first_pages[group] * geometry_->page_size();
  if (states.length < 0 || states.length > text_length || states.end_page() != end_page ||
      states.first_page < 0 || states.first_page > std::max<int64_t>(num_full - 1, 0) ||
      first_ingredients > num_full * interval(s) || states.history.size() > states.first_page) {
    Raise(kRuntimeError, "sequence ", sequence.id, " of committed length ",
          sequence.committed_length(), " has a state of length ", states.length, " in ",
          states.pages.size(), " pages beside ", states.first_page, " gone ones (",
          states.history.size(), " noted), and ingredients from position ", first_ingredients,
          " on");
  }
  Count(states, sequence, s, counts);
  const bool has_replaced = sequence.receive != nullptr && sequence.receive->states[s].has_value();
  if (has_replaced) Count(*sequence.receive->states[s], sequence, s, counts);
}

void RecurrentStates::Count(const SequenceStates& states, const Sequence& sequence, int32_t s,
                            const PageCounts& counts) const {
  for (int32_t page : states.pages) {
    if (page < 0 || page >= pool(s).num_pages()) {
      Raise(kRuntimeError, "sequence ", sequence.id, " has state page ", page,
            ", which is out of range");
    }
    ++(*counts.num_owners)[page];
  }
  states.history.CountKeepers(pool(s), counts.num_keepers, counts.num_returns);
}

}  // namespace pagedkv
