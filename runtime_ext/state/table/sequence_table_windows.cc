// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sequence_table_windows.cc
 * \brief Windows of sequences and of layers: what they drop, and what needs what is gone.
 */
#include <limits>
#include <vector>

#include "base/error.h"
#include "state/table/sequence_table.h"

namespace pagedkv {

void RequireNoWindow(const Sequence& sequence, const char* what) {
  if (!sequence.window.IsSet()) return;
  Raise(kValueError, "sequence ", sequence.id, " cannot ", what, ": it has ",
        sequence.window.size > 0 ? "a sliding window" : "dropped positions behind its sinks");
}

void RequireWritten(const Sequence& sequence, int64_t end, const char* what) {
  const int64_t first = sequence.first_unwritten;
  if (first >= end) return;
  Raise(kValueError, "sequence ", sequence.id, " cannot ", what, ": a step that ended without all ",
        "layers left out the row at position ", first, "; pop the sequence back to length ", first,
        " or less and append the tokens again");
}

void SequenceTable::CheckNewWindow(int64_t id, int64_t size, int64_t num_sinks) const {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  At(id);
  if (size < 1 || size > kMax) {
    Raise(kValueError, "the window of sequence ", id, " must be between 1 and ", kMax, ", got ",
          size);
  }
  if (num_sinks < 0 || num_sinks >= size) {
    Raise(kValueError, "the sinks of sequence ", id,
          " must be at least 0 and fewer than its window (", size, "), got ", num_sinks);
  }
}

void SequenceTable::EnableWindow(int64_t id, int64_t size, int64_t num_sinks, bool includes_self) {
  CheckNewWindow(id, size, num_sinks);
  if (includes_self && num_sinks + 1 == size) {
    Raise(kValueError, "the window of sequence ", id, " (", size, ") must be at least 2 more than ",
          "its sinks (", num_sinks, "), because it includes the row itself");
  }
  Sequence& sequence = At(id);
  SequenceWindow& window = sequence.window;
  if (window.size > 0) {
    Raise(kValueError, "sequence ", id, " has a window of ", window.size, " with ",
          window.num_sinks, " sinks already");
  }
  if (!sequence.tree.empty()) {
    Raise(kValueError, "sequence ", id, " has ", sequence.tree.size(),
          " token tree nodes that are not committed; commit or drop them before it gets a window");
  }
  if (sequence.receive || sequence.send) {
    Raise(kValueError, "sequence ", id, sequence.receive ? " is receiving" : " is being sent",
          "; it cannot get a window meanwhile");
  }
  if (window.num_dropped > 0 && window.num_sinks != num_sinks) {
    Raise(kValueError, "sequence ", id,
          " was forked from one that has dropped positions behind its ", window.num_sinks,
          " sinks; it needs as many, got ", num_sinks);
  }
  prefixes_.Drop(&sequence);
  window.size = size;
  window.includes_self = includes_self;
  window.num_sinks = num_sinks;
  // From now on the text may be longer than the pools, and most of it cannot be returned to.
  for (int32_t g = 0; g < num_groups(); ++g) {
    sequence.histories[g].SetKeeper(Keeper::kLookup, &pools_[g]);
  }
  for (int32_t s = 0; s < num_state_groups(); ++s) {
    sequence.states[s].history.SetKeeper(Keeper::kLookup, &pools_[geometry_.StatePool(s)]);
  }
  Slide(&sequence);
}

void SequenceTable::RequireKept(const Sequence& sequence, int64_t position) const {
  for (int32_t g = 0; g < num_groups(); ++g) RequireKept(sequence, position, g);
}

void SequenceTable::RequireKept(const Sequence& sequence, int64_t position, int32_t group) const {
  const int64_t first = geometry_.FirstPosition(sequence, group);
  if (position >= first) return;
  const bool is_recurrent = geometry_.StateGroupOf(group) >= 0;
  Raise(kIndexError, "position ", position, " of sequence ", sequence.id, " is gone: ",
        is_recurrent ? "recurrent layers with a state every " : "layers with a window of ",
        geometry_.window(group), is_recurrent ? " positions" : "", " keep positions from ", first,
        " on only");
}

void SequenceTable::Slide(Sequence* sequence) noexcept {
  SequenceWindow& window = sequence->window;
  if (!window.IsSet() && !geometry_.has_windows()) return;
  if (window.size > 0 && sequence->length > window.num_held()) {
    const int64_t num_dropped = sequence->length - window.num_held();
    window.num_dropped += num_dropped;
    Grow(sequence, -num_dropped);
  }
  for (int32_t g = 0; g < num_groups(); ++g) {
    const int64_t num_gone = geometry_.NumPagesGone(*sequence, g);
    auto count = static_cast<ptrdiff_t>(num_gone - sequence->first_pages[g]);
    if (count <= 0) continue;
    std::vector<int32_t>& pages = sequence->pages[g];
    auto first = pages.begin() + (geometry_.HasWindow(g) ? 0 : geometry_.SinkPages(*sequence));
    for (ptrdiff_t i = 0; i < count; ++i) {
      if (geometry_.HasWindow(g)) {
        histories_.LeaveBehind(sequence, g, first[i]);
      } else {
        pools_[g].Release(first[i]);  // dropped positions cannot be reached by a fork or pop
      }
    }
    pages.erase(first, first + count);
    sequence->first_pages[g] = num_gone;
  }
  states_.Slide(sequence);
}

}  // namespace pagedkv
