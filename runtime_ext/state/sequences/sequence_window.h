// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sequence_window.h
 * \brief The sliding window of one sequence: it keeps attention sinks and the last positions.
 *
 *     text position   0 1 2 3 4 5 6 7 8 9
 *                     S S x x x x . . . .      S sink, x dropped, . in the window
 *     position        0 1         2 3 4 5
 *
 * There are two ways to count. A *position* counts the tokens that the sequence holds, without
 * gaps: users and kernels that rotate inline see this, so positions stay below the window size. A
 * *text position* counts all tokens that were ever appended: it decides the slot, so pages stay
 * whole when the window slides, and the rotation of a K that is rotated before it is written. The
 * two differ behind the sinks by the number of dropped positions.
 */
#ifndef TVM_PAGEDKV_STATE_SEQUENCES_SEQUENCE_WINDOW_H_
#define TVM_PAGEDKV_STATE_SEQUENCES_SEQUENCE_WINDOW_H_

#include <cstdint>

namespace pagedkv {

struct SequenceWindow {
  int64_t size = 0;            // 0: no window
  bool includes_self = false;  // whether `size` includes the row itself
  int64_t num_sinks = 0;       // 0 without a window and without dropped positions
  int64_t num_dropped = 0;     // positions right behind the sinks

  /*! \brief Positions held between steps, sinks included. The next row sees these and itself. */
  int64_t num_held() const { return size - (includes_self ? 1 : 0); }
  /*! \brief False for a sequence that holds all its tokens and has no window. */
  bool IsSet() const { return size > 0 || num_dropped > 0; }
  int64_t TextPosition(int64_t position) const {
    return position < num_sinks ? position : position + num_dropped;
  }
  /*! \brief Tokens ever appended to a sequence that holds `length` positions. */
  int64_t TextLength(int64_t length) const {
    return length <= num_sinks ? length : length + num_dropped;
  }
  /*! \brief The dropped positions that a fork at position `length` inherits; it has no window. */
  SequenceWindow Prefix(int64_t length) const {
    if (num_dropped == 0 || length <= num_sinks) return {};
    return {0, false, num_sinks, num_dropped};
  }
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_SEQUENCES_SEQUENCE_WINDOW_H_
