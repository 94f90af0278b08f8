// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_geometry.h
 * \brief The mapping from positions to pages of a sequence, in each layer group.
 *
 * A layer group with a window keeps the pages that the next row sees, and those of kPoppable more
 * positions, so that many can always be popped. While a sequence has a token tree, the next row is
 * the one behind the committed positions. A window slides with each row, or moves by whole chunks:
 * rows then see from the start of their chunk on.
 *
 * Recurrent layers keep what they need of each token, their ingredients, in an ingredient group,
 * and states in pages of a state group. A state can be computed from an earlier one and the
 * ingredients behind it. So an ingredient group keeps the positions behind a state that is kept;
 * its window moves by whole intervals of states, as chunks do. Indices of pools: layer groups, then
 * state groups.
 *
 * A sequence can have a window of its own. In groups without a window it then gives up pages that
 * hold dropped positions only; groups with a window follow that one.
 */
#ifndef TVM_PAGEDKV_STATE_SEQUENCES_PAGE_GEOMETRY_H_
#define TVM_PAGEDKV_STATE_SEQUENCES_PAGE_GEOMETRY_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

#include "state/sequences/sequence.h"

namespace pagedkv {

/*! \brief Positions that can always be popped. KVCacheConfig has the same number. */
constexpr int64_t kPoppable = 16;

/*! \brief States of recurrent layers of one shape. */
struct StateGroup {
  int32_t ingredients;  // the layer group that keeps the ingredients of these layers
  int64_t interval;     // positions from one kept state to the next, a multiple of page_size
};

class PageGeometry {
 public:
  /*!
   * \param page_size A power of two: steps divide by it several times for each sequence.
   * \param windows Window of each layer group; 0 for none, -n for chunks of n positions. Missing
   *   ones are 0.
   * \param state_groups Each with an ingredient group of its own, which has no window.
   */
  PageGeometry(int32_t page_size, size_t num_groups, std::vector<int64_t> windows,
               std::vector<StateGroup> state_groups = {})
      : page_size_(page_size),
        windows_(std::move(windows)),
        state_groups_(std::move(state_groups)) {
    while (page_size_ >> (page_shift_ + 1) > 0) ++page_shift_;
    windows_.resize(num_groups, 0);
    for (int64_t& window : windows_) {
      moves_by_chunks_.push_back(window < 0);
      window = std::abs(window);
    }
    state_group_of_.resize(num_groups, -1);
    for (int32_t s = 0; s < num_state_groups(); ++s) {
      windows_[state_groups_[s].ingredients] = state_groups_[s].interval;
      moves_by_chunks_[state_groups_[s].ingredients] = true;
      state_group_of_[state_groups_[s].ingredients] = s;
    }
    has_windows_ = std::any_of(windows_.begin(), windows_.end(), [](int64_t w) { return w > 0; });
  }

  int32_t page_size() const { return page_size_; }
  int32_t num_groups() const { return static_cast<int32_t>(windows_.size()); }
  int64_t window(int32_t group) const { return windows_[group]; }
  bool HasWindow(int32_t group) const { return windows_[group] > 0; }
  /*! \brief Whether the window moves by whole multiples of itself, as that of ingredients does. */
  bool MovesByChunks(int32_t group) const { return moves_by_chunks_[group]; }
  int32_t num_state_groups() const { return static_cast<int32_t>(state_groups_.size()); }
  const StateGroup& state_group(int32_t s) const { return state_groups_[s]; }
  /*! \brief Layer groups and state groups have a pool each. */
  int32_t num_pools() const { return num_groups() + num_state_groups(); }
  /*! \brief The index of a state group's pool. */
  int32_t StatePool(int32_t s) const { return num_groups() + s; }
  /*! \brief The state group whose ingredients the group keeps; -1 for none. */
  int32_t StateGroupOf(int32_t group) const { return state_group_of_[group]; }
  /*! \brief Whether any group has a window. */
  bool has_windows() const { return has_windows_; }
  int64_t PagesFor(int64_t length) const { return PageOf(length + page_size_ - 1); }
  /*! \brief The page of a text, and the slot there, of a text position. */
  int64_t PageOf(int64_t text_position) const { return text_position >> page_shift_; }
  int64_t SlotOf(int64_t text_position) const { return text_position & (page_size_ - 1); }

  /*! \brief Pages of the first `length` positions that the group holds. */
  int64_t NumPages(const Sequence& sequence, int32_t group, int64_t length) const {
    if (!HasWindow(group) && !sequence.window.IsSet()) return PagesFor(length);  // holds all
    const bool is_before_gap = !HasWindow(group) && length <= sequence.window.num_sinks;
    const int64_t num_gone = is_before_gap ? 0 : sequence.first_pages[group];
    return std::max<int64_t>(PagesFor(sequence.window.TextLength(length)) - num_gone, 0);
  }
  /*! \brief The index of the position's page in the page table; OffsetInPage is its slot there. */
  int64_t PageIndex(const Sequence& sequence, int32_t group, int64_t position) const {
    const int64_t page = PageOf(sequence.window.TextPosition(position));
    const bool is_before_gap = !HasWindow(group) && page < SinkPages(sequence);
    return is_before_gap ? page : page - sequence.first_pages[group];
  }
  int64_t OffsetInPage(const Sequence& sequence, int64_t position) const {
    return SlotOf(sequence.window.TextPosition(position));
  }
  /*! \brief The text position of the first slot of a page. */
  int64_t PageBegin(const Sequence& sequence, int32_t group, int64_t index) const {
    const bool is_before_gap = !HasWindow(group) && index < SinkPages(sequence);
    return (is_before_gap ? index : index + sequence.first_pages[group]) * page_size_;
  }
  /*! \brief The group holds all positions from this one on. */
  int64_t FirstPosition(const Sequence& sequence, int32_t group) const {
    if (!HasWindow(group)) return 0;
    const SequenceWindow& window = sequence.window;
    const int64_t first = sequence.first_pages[group] * page_size_;
    if (first <= window.num_sinks) return first;
    return std::max(first - window.num_dropped, window.num_sinks);
  }
  /*! \brief The slot behind the dropped positions, counted from the first page of the page table.
   */
  int64_t WindowBegin(const Sequence& sequence, int32_t group) const {
    const SequenceWindow& window = sequence.window;
    return window.num_sinks + window.num_dropped - sequence.first_pages[group] * page_size_;
  }

  /*!
   * \brief The first position that a row at text position `text_length` sees. In an ingredient
   *   group, the first one behind the last kept state, where none was lost.
   */
  int64_t FirstVisible(int32_t group, int64_t text_length) const {
    if (MovesByChunks(group)) return text_length - text_length % windows_[group];
    return HasWindow(group) ? std::max<int64_t>(text_length - windows_[group] + 1, 0) : 0;
  }
  int64_t FirstPageToSee(int32_t group, int64_t text_length) const {
    return PageOf(FirstVisible(group, text_length));
  }
  /*! \brief Like FirstPageToSee, with the positions that can always be popped. */
  int64_t FirstPageToKeep(int32_t group, int64_t text_length) const {
    return PageOf(FirstVisible(group, std::max<int64_t>(text_length - kPoppable, 0)));
  }
  /*! \brief The length of the state that comes with positions [begin, end) of another cache; 0
   * where the one at `begin` is late enough. */
  int64_t StateToReceive(int32_t s, int64_t begin, int64_t end) const {
    const int32_t group = state_groups_[static_cast<size_t>(s)].ingredients;
    const int64_t length = FirstVisible(group, std::max<int64_t>(end - kPoppable, 0));
    return length > begin ? length : 0;
  }
  int64_t SinkPages(const Sequence& sequence) const { return PagesFor(sequence.window.num_sinks); }
  /*! \brief Pages that a sequence may give up: before the first page, or behind its sinks. */
  int64_t NumPagesGone(const Sequence& sequence, int32_t group) const {
    const SequenceWindow& window = sequence.window;
    if (StateGroupOf(group) >= 0) return PageOf(FirstStateToKeep(sequence, StateGroupOf(group)));
    if (HasWindow(group)) {
      return FirstPageToKeep(group, window.TextLength(sequence.committed_length()));
    }
    // Behind the sinks' pages, up to the page with the first position that was not dropped.
    const int64_t first = PageOf(window.num_sinks + window.num_dropped);
    return std::max<int64_t>(first - SinkPages(sequence), 0);
  }
  /*! \brief The page of text at whose end a full page of states is. */
  int64_t TextPageOfState(int32_t s, int64_t page) const {
    return PageOf((page + 1) * state_groups_[s].interval) - 1;
  }
  /*! \brief The page of states, if there is one, that is behind a page of text. */
  int64_t StateBehind(int32_t s, int64_t text_page) const {
    const int64_t end = (text_page + 1) * page_size_, interval = state_groups_[s].interval;
    return end % interval == 0 ? end / interval - 1 : -1;
  }
  /*! \brief The length of the first state to keep: from it any later one can be computed, and those
   * of kPoppable positions before the end. */
  int64_t FirstStateToKeep(const Sequence& sequence, int32_t s) const {
    return FirstStateToKeep(sequence.window.TextLength(sequence.committed_length()),
                            sequence.states[static_cast<size_t>(s)].length, s);
  }
  /*! \param state_length What the last state covers. */
  int64_t FirstStateToKeep(int64_t text_length, int64_t state_length, int32_t s) const {
    const int64_t length = std::min(std::max<int64_t>(text_length - kPoppable, 0), state_length);
    return length - length % state_groups_[s].interval;
  }

 private:
  int32_t page_size_;
  int32_t page_shift_ = 0;
  std::vector<int64_t> windows_;
  std::vector<bool> moves_by_chunks_;  // [group]
  std::vector<StateGroup> state_groups_;
  std::vector<int32_t> state_group_of_;  // [group]
  bool has_windows_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_SEQUENCES_PAGE_GEOMETRY_H_
