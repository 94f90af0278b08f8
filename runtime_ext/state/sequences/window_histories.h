// SPDX-License-Identifier: Apache-2.0
/*!
 * \file window_histories.h
 * \brief Pages that windows of layer groups have moved past, and how forks and pops take them back.
 *
 * Such a page goes to the history of its sequence and becomes cached; forks copy the history. When
 * the next row after a fork or pop sees further back than the held pages, the missing ones are
 * taken from the history: they become held again, and nothing is copied or computed.
 */
#ifndef TVM_PAGEDKV_STATE_SEQUENCES_WINDOW_HISTORIES_H_
#define TVM_PAGEDKV_STATE_SEQUENCES_WINDOW_HISTORIES_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "state/pages/page_pool.h"
#include "state/sequences/page_geometry.h"
#include "state/sequences/recurrent_states.h"

namespace pagedkv {

class WindowHistories {
 public:
  /*! \brief All must outlive this. */
  WindowHistories(const PageGeometry* geometry, std::vector<PagePool>* pools,
                  const RecurrentStates* states)
      : geometry_(geometry), pools_(pools), states_(states) {}

  /*!
   * \brief Checks that the window of a row at position `length` is held, or can be taken back.
   * \throws Error (ValueError).
   */
  void Require(const Sequence& sequence, int64_t length, const char* what) const;
  /*! \brief The first page to hold so that a row at this text position sees what it needs. */
  int64_t FirstPageAt(const Sequence& sequence, int32_t group, int64_t text_length) const {
    return std::min(sequence.first_pages[group], FirstPageToSee(sequence, group, text_length));
  }
  /*! \brief A page before the first one that is held; -1 when it was reclaimed. */
  int32_t PageBehind(const Sequence& sequence, int32_t group, int64_t index) const {
    return sequence.histories[group].Find(sequence.first_pages[group] - index, (*pools_)[group]);
  }
  /*! \brief Moves the first page of a group with a window to the history. */
  void LeaveBehind(Sequence* sequence, int32_t group, int32_t page) const noexcept;
  /*! \brief Moves the pages that a receive pushed out of the window to the history. */
  void LeaveReceiveBehind(Sequence* sequence, int32_t group) const noexcept;
  /*! \brief Reserves memory for TakeBack. May throw std::bad_alloc. */
  void ReserveTakeBack(Sequence* sequence, int64_t text_length) const;
  /*! \brief Takes back the pages that Require has found. */
  void TakeBack(Sequence* sequence, int64_t text_length) const noexcept;

 private:
  int64_t FirstPageToSee(const Sequence& sequence, int32_t group, int64_t text_length) const {
    const int32_t s = geometry_->StateGroupOf(group);
    return s < 0 ? geometry_->FirstPageToSee(group, text_length)
                 : states_->FirstPageToSee(sequence, s, text_length);
  }
  [[noreturn]] void RaiseReclaimed(const Sequence& sequence, int32_t group, int64_t length,
                                   const char* what) const;
  /*! \brief Forks and pops are possible at this position and later. */
  int64_t FirstReachable(const Sequence& sequence) const;

  const PageGeometry* geometry_;
  std::vector<PagePool>* pools_;
  const RecurrentStates* states_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_SEQUENCES_WINDOW_HISTORIES_H_
