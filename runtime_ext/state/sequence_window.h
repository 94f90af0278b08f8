// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sequence_window.h
 * \brief The window of one sequence: it keeps its first positions (sinks) and its last ones.
 *
 * Two ways to count. A *position* counts what the sequence holds, without gaps: that is what users
 * and rotations in kernels see, so positions stay below the window's size. A *text position* counts
 * what was ever appended: that is what decides the place in a page, so pages stay whole when a
 * window moves, and what a K is rotated by before it is written. They differ behind the sinks, by
 * the positions that were dropped there.
 */
#ifndef TVM_PAGEDKV_STATE_SEQUENCE_WINDOW_H_
#define TVM_PAGEDKV_STATE_SEQUENCE_WINDOW_H_

#include <cstdint>

namespace pagedkv {

struct SequenceWindow {
  int64_t size = 0;         // 0: all
  bool counts_row = false;  // whether a row is itself one of the `size` positions that it sees
  int64_t num_sinks = 0;    // 0 where there is neither a size nor anything dropped
  int64_t num_dropped = 0;  // positions that have left, those right behind the sinks

  /*! \brief Positions held between steps, the sinks included: what the next row sees beside itself.
   */
  int64_t num_held() const { return size - (counts_row ? 1 : 0); }
  /*! \brief Whether this differs from a sequence that keeps everything. */
  bool IsSet() const { return size > 0 || num_dropped > 0; }
  int64_t TextPosition(int64_t position) const {
    return position < num_sinks ? position : position + num_dropped;
  }
  /*! \brief Text positions below the end of a sequence that holds `length` positions. */
  int64_t TextLength(int64_t length) const {
    return length <= num_sinks ? length : length + num_dropped;
  }
  /*! \brief The part of it that belongs to the first `length` positions. */
  SequenceWindow Prefix(int64_t length) const {
    if (num_dropped == 0 || length <= num_sinks) return {};
    return {0, false, num_sinks, num_dropped};
  }
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_SEQUENCE_WINDOW_H_
