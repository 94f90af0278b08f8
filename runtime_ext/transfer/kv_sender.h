// SPDX-License-Identifier: Apache-2.0
/*!
 * \file kv_sender.h
 * \brief Positions of sequences that go to other caches.
 *
 * The cache itself moves nothing. When rows are ready for a receiver, it calls the handler of that
 * receiver with the id of a block, and keeps the pages of the block until it is released. Whoever
 * has the handler tells the other side, which reads the pages by its own means.
 */
#ifndef TVM_PAGEDKV_TRANSFER_KV_SENDER_H_
#define TVM_PAGEDKV_TRANSFER_KV_SENDER_H_

#include <tvm/ffi/container/map.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <map>
#include <vector>

#include "state/table/sends.h"
#include "step/step.h"

namespace pagedkv {

class KVSender {
 public:
  /*! \brief Both must outlive this. */
  KVSender(Step* step, SequenceTable* table) : step_(step), table_(table), sends_(table) {}

  /*!
   * \brief Connects a receiver, or disconnects it.
   * \param handler Takes the id of a block; None releases all blocks for the receiver.
   * \param num_slots Slots of the receiver's pools, for each layer group; then pages, for each
   *   state group.
   */
  void SetHandler(int64_t peer, ffi::Optional<ffi::Function> handler, IntSpan num_slots);
  void DropHandler(int64_t peer) noexcept;
  /*!
   * \brief Sends positions of a sequence, those that are there and those that later steps append.
   * \param begin The first position.
   * \param position_map The receiver's slots, as KVReceiver::Prepare returns them.
   * \param peer The number under which the receiver was connected. Engines pass the group offset of
   *   the destination, the number of its first worker. Every worker of the sender connects to the
   *   receiver of its own rank under that one number.
   */
  void MarkSend(int64_t sequence_id, int64_t begin, IntSpan position_map, int64_t peer);
  /*! \brief What of positions [begin, end) a sequence can send; see Sends::FirstToSend. */
  ffi::Shape FirstToSend(int64_t sequence_id, int64_t begin, int64_t end) const;
  /*! \brief The id of the send of a sequence that is under way; 0 for none. Ids count from 1. */
  int64_t IdOf(int64_t sequence_id) const;
  void Cancel(int64_t sequence_id, int64_t send_id);
  /*! \throws Error (KeyError) when there is no such block. */
  ffi::Map<ffi::String, ffi::Any> DescribeBlock(int64_t block_id) const;
  void ReleaseBlock(int64_t block_id);

  // Around a step.
  /*! \throws Error (ValueError) when one is being sent: rows of a token tree are not final. */
  void RequireNoSends(IntSpan sequence_ids) const;
  /*!
   * \brief Blocks of the rows that are ready; before windows let them go.
   * \throws std::bad_alloc; then there are none of them.
   */
  std::vector<int64_t> MakeBlocks();
  /*! \brief Calls the handlers of all blocks, then throws the first error of one. */
  void Announce(const std::vector<int64_t>& blocks);

  int64_t num_blocks() const { return static_cast<int64_t>(blocks_.size()); }

 private:
  struct Peer {
    ffi::Function handler;
    std::vector<int64_t> num_slots;  // [pool]
  };
  const Peer& PeerAt(int64_t peer) const;
  void RequireMaySend(const Sequence& sequence) const;
  /*! \brief Like MakeBlocks, of these sequences, which are being sent. */
  std::vector<int64_t> MakeBlocks(const std::vector<const Sequence*>& sequences);
  void DropBlock(int64_t block_id) noexcept;

  Step* step_;
  SequenceTable* table_;
  Sends sends_;
  std::map<int64_t, Peer> peers_;
  std::map<int64_t, SendBlock> blocks_;
  int64_t last_id_ = 0;  // of sends and blocks
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_TRANSFER_KV_SENDER_H_
