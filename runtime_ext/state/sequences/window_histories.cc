// SPDX-License-Identifier: Apache-2.0
/*!
 * \file window_histories.cc
 * \brief Pages that windows of layer groups have moved past.
 */
#include "state/sequences/window_histories.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace pagedkv {

void WindowHistories::Require(const Sequence& sequence, int64_t length, const char* what) const {
  if (length == 0) return;
  const int64_t text_length = sequence.window.TextLength(length);
  for (int32_t g = 0; g < geometry_->num_groups(); ++g) {
    const int64_t first = sequence.first_pages[g];
    if (!geometry_->HasWindow(g) || FirstPageToSee(sequence, g, text_length) >= first) continue;
    if (sequence.receive != nullptr) {
      Raise(kValueError, "cannot ", what, " sequence ", sequence.id, " (length ", sequence.length,
            ") at position ", length, " while it is receiving positions from ",
            sequence.receive->begin, " on: finish or cancel that first");
    }
    const int64_t end = std::min(first, geometry_->PagesFor(text_length));
    for (int64_t i = FirstPageToSee(sequence, g, text_length); i < end; ++i) {
      if (PageBehind(sequence, g, i) < 0) RaiseReclaimed(sequence, g, length, what);
    }
  }
}

void WindowHistories::RaiseReclaimed(const Sequence& sequence, int32_t group, int64_t length,
                                     const char* what) const {
  const int64_t text_length = sequence.window.TextLength(length);
  const bool is_state = geometry_->StateGroupOf(group) >= 0;
  const int64_t first_seen = geometry_->FirstVisible(group, text_length);
  const int64_t end = std::min(sequence.first_pages[group], geometry_->PagesFor(text_length));
  int64_t first_missing = end, last_missing = 0;
  for (int64_t i = FirstPageToSee(sequence, group, text_length); i < end; ++i) {
    if (PageBehind(sequence, group, i) >= 0) continue;
    first_missing = std::min(first_missing, i);
    last_missing = i;
  }
  Raise(kValueError, "cannot ", what, " sequence ", sequence.id, " (length ", sequence.length,
        ") at position ", length, ": ",
        is_state ? "recurrent layers would compute their state" : "layers with a window of ",
        is_state ? std::string() : std::to_string(geometry_->window(group)) + " would see",
        is_state ? " from position " : " position ", first_seen, is_state ? "" : " next",
        ", but the pages of positions ", first_missing * geometry_->page_size(), " to ",
        (last_missing + 1) * geometry_->page_size() - 1, " have been reclaimed for others since ",
        is_state ? "a state behind them was kept, or did not come with a prefix hit, a file or a "
                   "transfer; "
                 : "their window left them behind; ",
        what, " at position ", FirstReachable(sequence),
        " or later, append the tokens to a new sequence, or make the cache with more pages");
}

int64_t WindowHistories::FirstReachable(const Sequence& sequence) const {
  int64_t reachable = 0;
  for (int32_t g = 0; g < geometry_->num_groups(); ++g) {
    if (!geometry_->HasWindow(g)) continue;
    int64_t first = sequence.first_pages[g];
    while (first > 0 && PageBehind(sequence, g, first - 1) >= 0) --first;
    const int64_t window = geometry_->window(g), begin = first * geometry_->page_size();
    // The row whose window begins there; with chunks or states, the start of the next one.
    const int64_t next_seen =
        geometry_->MovesByChunks(g) ? (begin + window - 1) / window * window : begin + window - 1;
    if (first > 0) reachable = std::max(reachable, next_seen);
  }
  const SequenceWindow& window = sequence.window;
  if (reachable <= window.num_sinks) return reachable;
  return std::max(reachable - window.num_dropped, window.num_sinks);
}

void WindowHistories::LeaveBehind(Sequence* sequence, int32_t group, int32_t page) const noexcept {
  sequence->histories[group].Append(page, &(*pools_)[group]);
  (*pools_)[group].Release(page);
}

void WindowHistories::ReserveTakeBack(Sequence* sequence, int64_t text_length) const {
  for (int32_t g = 0; g < geometry_->num_groups(); ++g) {
    if (!geometry_->HasWindow(g)) continue;
    const int64_t num_pages =
        geometry_->PagesFor(text_length) - FirstPageAt(*sequence, g, text_length);
    sequence->pages[g].reserve(static_cast<size_t>(std::max<int64_t>(num_pages, 0)));
  }
}

void WindowHistories::TakeBack(Sequence* sequence, int64_t text_length) const noexcept {
  for (int32_t g = 0; g < geometry_->num_groups(); ++g) {
    const int64_t first = sequence->first_pages[g];
    const int64_t begin = FirstPageAt(*sequence, g, text_length);
    if (!geometry_->HasWindow(g) || begin == first) continue;
    const int64_t end = std::min(first, geometry_->PagesFor(text_length));
    std::vector<int32_t>& pages = sequence->pages[g];
    // Drop the last pages first: they make room for those that come back.
    const auto keep =
        static_cast<size_t>(std::max<int64_t>(geometry_->PagesFor(text_length) - first, 0));
    (*pools_)[g].ReleaseFrom(std::min(keep, pages.size()), &pages);
    pages.insert(pages.begin(), static_cast<size_t>(end - begin), -1);
    for (int64_t i = begin; i < end; ++i) {
      pages[i - begin] = PageBehind(*sequence, g, i);
      (*pools_)[g].AddOwner(pages[i - begin]);
    }
    sequence->histories[g].DropLast(first - begin, &(*pools_)[g]);
    sequence->first_pages[g] = begin;
  }
}

void WindowHistories::LeaveReceiveBehind(Sequence* sequence, int32_t group) const noexcept {
  const Receive& receive = *sequence->receive;
  const Receive::Group& backup = receive.groups[group];
  const int64_t first = sequence->first_pages[group];
  // Positions outside the window were never received: the history cannot reach over that gap.
  const bool has_gap =
      first != backup.first_page + static_cast<int64_t>(backup.gone.size()) ||
      (first > backup.first_page && first * geometry_->page_size() > receive.begin);
  if (has_gap) sequence->histories[group].Clear(&(*pools_)[group]);
  for (int32_t page : backup.gone) {
    has_gap ? (*pools_)[group].Release(page) : LeaveBehind(sequence, group, page);
  }
}

}  // namespace pagedkv
