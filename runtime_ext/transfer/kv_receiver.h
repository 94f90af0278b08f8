// SPDX-License-Identifier: Apache-2.0
/*!
 * \file kv_receiver.h
 * \brief Positions of a sequence that another cache writes.
 *
 * The cache itself moves nothing: it takes pages and hands out their slots, and whoever connects
 * the two caches writes to them by its own means. A receive ends when it is finished or cancelled,
 * or as soon as the sequence is used.
 */
#ifndef TVM_PAGEDKV_TRANSFER_KV_RECEIVER_H_
#define TVM_PAGEDKV_TRANSFER_KV_RECEIVER_H_

#include <tvm/ffi/container/shape.h>

#include <cstdint>

#include "state/table/receives.h"
#include "step/step.h"
#include "storage/page_copier.h"

namespace pagedkv {

namespace ffi = tvm::ffi;

class KVReceiver {
 public:
  /*! \brief All must outlive this. */
  KVReceiver(Step* step, SequenceTable* table, PageCopier* copier)
      : step_(step), table_(table), copier_(copier), receives_(table) {}

  /*!
   * \brief Appends positions that are to be received.
   * \return Their slots, for each layer group: the number of runs, then for each run its first
   *   slot and its length. Then for each state group 0, or 1 and the page of a state and the number
   *   of positions that it covers. See state/pages/slot_map.h.
   * \throws Error (KeyError, ValueError, CacheFullError); then nothing has changed.
   */
  ffi::Shape Prepare(int64_t sequence_id, int64_t append_length);
  /*!
   * \brief The id of the receive of a sequence that is under way; 0 for none. Ids count from 1.
   *
   * From now on its pages stay taken until it is finished, cancelled or released, even if the
   * sequence is removed.
   */
  int64_t IdOf(int64_t sequence_id);
  /*!
   * \brief Leaves out first positions of a receive that the sender lacks, before anything of it is
   *   written; see Receives::Shorten.
   * \return The pages of the states to come, for each state group; -1 where none is received.
   */
  ffi::Shape Shorten(int64_t sequence_id, int64_t receive_id, IntSpan firsts);
  void Finish(int64_t sequence_id, int64_t receive_id);
  /*! \brief Drops the positions. When the sequence was used or removed, only lets the pages go. */
  void Cancel(int64_t sequence_id, int64_t receive_id);
  /*! \brief To be called when nothing writes to the pages of a receive any more. */
  void Release(int64_t receive_id);

 private:
  Sequence* Find(int64_t sequence_id, int64_t receive_id, const char* what);

  Step* step_;
  SequenceTable* table_;
  PageCopier* copier_;
  Receives receives_;
  int64_t last_id_ = 0;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_TRANSFER_KV_RECEIVER_H_
