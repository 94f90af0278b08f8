// SPDX-License-Identifier: Apache-2.0
/*!
 * \file recurrent_states.h
 * \brief The states of recurrent layers that sequences keep, and what forks and pops make of them.
 *
 * A state group keeps a state behind every `interval` positions, and the last one, each in a page.
 * Pages of a sequence lie side by side: all but the last are full, and a full page is never
 * written again. Kept states before the last ones become cached, as pages behind a window do.
 *
 *     positions   0 ...... 64 ...... 128 ..... 170        interval 64
 *     states              [0]       [1]        [2]        SequenceStates::length 170
 *
 * The state at any other position is computed by the next step, from the nearest state before it
 * and the ingredients between. So a pop to 150 drops page 2, and the next step begins with the
 * state in page 1. A lost state makes that way longer; lost ingredients make it impossible.
 */
#ifndef TVM_PAGEDKV_STATE_SEQUENCES_RECURRENT_STATES_H_
#define TVM_PAGEDKV_STATE_SEQUENCES_RECURRENT_STATES_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "state/pages/page_pool.h"
#include "state/sequences/page_geometry.h"

namespace pagedkv {

/*!
 * \brief The length of the last state from which the one at `length` can be computed.
 * \param has_state Called with the number of a full page of states.
 * \param has_ingredients Called with the index of a page of ingredients.
 * \param end The last page of ingredients that is missing, plus one, where this returns -1.
 * \return 0 for the empty state, -1 where ingredients are missing behind every state.
 */
template <typename HasState, typename HasIngredients>
int64_t LastStateBefore(const PageGeometry& geometry, int32_t state_group, int64_t length,
                        HasState has_state, HasIngredients has_ingredients, int64_t* end) {
  const int64_t interval = geometry.state_group(state_group).interval;
  int64_t page = geometry.PagesFor(length);  // ingredients are there from this page on
  for (int64_t n = length / interval;; --n) {
    for (const int64_t first = geometry.PageOf(n * interval); page > first; --page) {
      if (has_ingredients(page - 1)) continue;
      *end = page;
      return -1;
    }
    if (n == 0 || has_state(n - 1)) return n * interval;
  }
}

class RecurrentStates {
 public:
  /*! \brief [page] what checks of the integrity count; see PagePool::CheckIntegrity. */
  struct PageCounts {
    std::vector<int32_t>* num_owners;
    std::vector<int32_t>* num_keepers;
    std::vector<int32_t>* num_returns;
  };

  /*! \brief Both must outlive this. */
  RecurrentStates(const PageGeometry* geometry, std::vector<PagePool>* pools)
      : geometry_(geometry), pools_(pools) {}

  /*! \brief The page of a full state; -1 when the sequence has none, or it was reclaimed. */
  int32_t FindPage(const Sequence& sequence, int32_t s, int64_t page) const;
  /*!
   * \brief The length of the state from which the one at a text position can be computed.
   * \param missing_end Where there is none and this is -1: the end of the ingredients that are
   *   missing, in pages.
   */
  int64_t Base(const Sequence& sequence, int32_t s, int64_t text_length,
               int64_t* missing_end = nullptr) const;
  /*! \brief The first page of ingredients that a row at this text position needs; or one that is
   * missing, where its state cannot be computed. */
  int64_t FirstPageToSee(const Sequence& sequence, int32_t s, int64_t text_length) const {
    int64_t missing_end = 0;
    const int64_t base = Base(sequence, s, text_length, &missing_end);
    return base < 0 ? missing_end - 1 : geometry_->PageOf(base);
  }

  // The calls below are for lengths for which Base finds a state.
  /*! \brief Makes room so that Truncate and Share cannot fail. May throw std::bad_alloc. */
  void Reserve(Sequence* sequence) const;
  /*! \brief Drops the states behind a text position, and takes back the one before it. */
  void Truncate(Sequence* sequence, int64_t text_length) const noexcept;
  /*! \brief Gives a new sequence the states of the first positions of another one. */
  void Share(const Sequence& source, Sequence* target, int64_t text_length) const noexcept;
  /*! \brief Lets the states become cached that the sequence need not keep. */
  void Slide(Sequence* sequence) const noexcept;
  /*! \brief Drops the states from before a receive, when its own have come. */
  void DropReplaced(Receive* receive) const noexcept;
  /*! \brief Restores them in place of those that were to be received. */
  void RestoreReplaced(Sequence* sequence) const noexcept;
  /*! \brief Drops all states. */
  void Release(Sequence* sequence) const noexcept;

  /*! \throws Error (RuntimeError) that names the broken invariant; else counts owners and keepers.
   */
  void CheckIntegrity(const Sequence& sequence, int32_t s, const PageCounts& counts) const;

 private:
  PagePool& pool(int32_t s) const { return (*pools_)[geometry_->StatePool(s)]; }
  void Release(SequenceStates* states, int32_t s) const noexcept;
  void Count(const SequenceStates& states, const Sequence& sequence, int32_t s,
             const PageCounts& counts) const;
  int64_t interval(int32_t s) const { return geometry_->state_group(s).interval; }

  const PageGeometry* geometry_;
  std::vector<PagePool>* pools_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_SEQUENCES_RECURRENT_STATES_H_
