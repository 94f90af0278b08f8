// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sends.h
 * \brief Positions of sequences that go to other caches.
 *
 * A sequence that is being sent has a mark with the slots of the receiver. As soon as positions are
 * written by every layer, they become a block, whose pages do not change until it is released,
 * whatever the sequence does meanwhile: Plan, then Commit.
 */
#ifndef TVM_PAGEDKV_STATE_TABLE_SENDS_H_
#define TVM_PAGEDKV_STATE_TABLE_SENDS_H_

#include <cstdint>
#include <vector>

#include "state/table/sequence_table.h"

namespace pagedkv {

/*! \brief Slots to copy, within one page on both sides. */
struct CopyRun {
  int64_t source;
  int64_t destination;
  int64_t length;
};

/*! \brief Positions that are ready to be sent. */
struct SendBlock {
  int64_t send_id;
  int64_t sequence_id;
  int64_t peer;
  int64_t begin;
  int64_t end;
  std::vector<std::vector<CopyRun>> runs;   // [pool]; of states: pages
  std::vector<std::vector<int32_t>> pages;  // [pool], pinned
};

class Sends {
 public:
  /*! \brief The table must outlive this. */
  explicit Sends(SequenceTable* table) : table_(table) {}

  /*!
   * \brief The first of positions [begin, end) to send, [group]; then the lengths of the states to
   *   send with them, [state group], 0 for none.
   *
   * They are those that a receiver asks for. Where the sequence lacks positions of a window, or a
   * state or ingredients behind it, they are later ones, from which it can be continued.
   */
  std::vector<int64_t> FirstToSend(const Sequence& sequence, int64_t begin, int64_t end) const;
  /*! \throws Error (ValueError) when positions that the mark needs are gone, or were never written.
   */
  void RequireSendable(const Sequence& sequence, const SendMark& mark) const;
  /*! \brief The end of the positions that are ready. Those behind a state that is wanted wait until
   * a step has computed it. */
  int64_t ReadyEnd(const Sequence& sequence) const;
  /*! \brief A block of the new positions of a mark; changes nothing. May throw std::bad_alloc. */
  SendBlock Plan(const Sequence& sequence) const;
  /*! \brief Pins the pages of a block. The last block of a mark removes it. */
  void Commit(const SendBlock& block) const noexcept;
  void Release(const SendBlock& block) const noexcept;
  /*! \brief Removes the mark of a sequence if it has this id. */
  void Forget(int64_t sequence_id, int64_t send_id) const noexcept;
  /*! \brief Removes all marks for a receiver. */
  void ForgetPeer(int64_t peer) const noexcept;

 private:
  int64_t FirstOfWindow(const Sequence& sequence, int32_t group, int64_t begin, int64_t end) const;
  int64_t StateToSend(const Sequence& sequence, int32_t s, int64_t begin, int64_t end) const;
  /*! \brief That the mark wants the states that come with its positions, or later ones, which are
   * not gone. */
  void RequireStates(const Sequence& sequence, const SendMark& mark) const;
  /*! \brief The page of the state behind a position; -1 where it is gone, or not computed yet. */
  int32_t StatePage(const Sequence& sequence, int32_t s, int64_t position) const;

  SequenceTable* table_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_TABLE_SENDS_H_
