// SPDX-License-Identifier: Apache-2.0
/*!
 * \file receives.h
 * \brief Positions of sequences that another cache writes.
 *
 * A receive takes pages for the positions to come and hands out their slots. It is open until it is
 * finished or cancelled (SequenceTable::FinishReceive, CancelReceive). It counts as finished as
 * soon as the sequence is used: by a step, a fork or another receive. A pop of exactly its
 * positions cancels it, any other pop finishes it.
 */
#ifndef TVM_PAGEDKV_STATE_TABLE_RECEIVES_H_
#define TVM_PAGEDKV_STATE_TABLE_RECEIVES_H_

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "state/pages/slot_map.h"
#include "state/table/copy_on_write.h"
#include "state/table/sequence_table.h"

namespace pagedkv {

/*! \brief Page tables of a sequence with room for the positions that it receives. */
struct ReceivePlan {
  Sequence* sequence;
  int64_t count;
  std::vector<std::vector<int32_t>> pages;            // [group]
  std::vector<int64_t> first_pages;                   // [group]
  std::vector<std::optional<SequenceStates>> states;  // [state group], where one is received
  std::vector<PageCopy> copies;                       // to make before Commit
  std::unique_ptr<Receive> receive;
};

class Receives {
 public:
  /*! \brief The table must outlive this. */
  explicit Receives(SequenceTable* table) : table_(table) {}

  /*!
   * \brief Takes pages for `count` more positions, without those that windows will not reach.
   *
   * Of the states of recurrent layers, the one from which those of the last positions can be
   * computed is received, where the sequence lacks it.
   * \throws Error (ValueError, CacheFullError).
   */
  ReceivePlan Acquire(Sequence* sequence, int64_t count) const;
  /*! \brief Undoes Acquire. */
  void Release(const ReceivePlan& plan) const noexcept;
  void Commit(ReceivePlan plan, int64_t id) const noexcept;

  /*!
   * \brief Leaves out the first positions of an open receive that the sender lacks: those of
   *   windows that can be popped, and those before a later state than the one that was asked for.
   *   Between them and the sequence's own positions there is then a gap: its pages before that are
   *   kept for a cancellation only.
   * \param firsts The first position to come, [group]; then the lengths of states, [state group].
   *   What is not later stays as it is.
   * \return The pages of the states, [state group]; -1 where none is received.
   * \throws Error (ValueError, CacheFullError); then nothing has changed.
   */
  std::vector<int32_t> Shorten(Sequence* sequence, const std::vector<int64_t>& firsts);

  /*!
   * \brief Pins the pages of the sequence's receive until ReleasePages, even if the sequence is
   * removed meanwhile. Idempotent.
   */
  void HoldPages(const Sequence& sequence);
  /*! \brief Unpins the pages of a receive. \return Whether any were held. */
  bool ReleasePages(int64_t receive_id) noexcept;

  /*! \brief Slots of the positions to come; kNotWanted where the group has none. */
  SlotMap SlotsOf(const ReceivePlan& plan) const;

 private:
  /*! \brief Whether the window of a group has to begin later. \throws Error (ValueError). */
  bool MustShorten(const Sequence& sequence, int32_t group, int64_t first) const;
  /*! \brief Whether the state to receive has to be a later one. \throws Error (ValueError). */
  bool MustMove(const Sequence& sequence, int32_t s, int64_t length) const;
  /*! \brief Takes a page for each state that comes although none was asked for. */
  std::vector<SequenceStates> ReserveStates(const Sequence& sequence,
                                            const std::vector<int64_t>& firsts);
  /*!
   * \brief Gives up the pages of a group before a position, which begins a page behind all those
   *   that the sequence had before the receive.
   */
  void DropPages(Sequence* sequence, int32_t group, int64_t first) const noexcept;
  /*! \brief The first page that a group keeps, with the positions up to `end`. */
  int64_t FirstPage(const Sequence& sequence, int32_t group, int64_t end) const;

  SequenceTable* table_;
  using Pages = std::vector<std::vector<int32_t>>;  // [pool]
  std::unordered_map<int64_t, Pages> held_;         // by the id of the receive
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_TABLE_RECEIVES_H_
