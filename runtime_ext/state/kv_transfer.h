// SPDX-License-Identifier: Apache-2.0
/*!
 * \file kv_transfer.h
 * \brief State of a sequence whose K and V come from another cache, or go to one.
 *
 * The receiver takes pages for the positions to come (Receive) and encodes their slots as a slot
 * map. The sender stores the map (SendMark). As soon as positions are computed, it makes them
 * available as a SendBlock, whose pages do not change until it is released, whatever the sequence
 * does meanwhile.
 *
 * A slot map has for each layer group the number of runs, then the first slot and the length of
 * each run, in order of position. A run at slot kNotWanted stands for positions that the window of
 * the receiver does not reach.
 */
#ifndef TVM_PAGEDKV_STATE_KV_TRANSFER_H_
#define TVM_PAGEDKV_STATE_KV_TRANSFER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pagedkv {

constexpr int64_t kNotWanted = -1;

/*! \brief Slots of consecutive positions. */
struct SlotRun {
  int64_t slot;
  int64_t length;
};
using SlotRuns = std::vector<SlotRun>;

/*! \brief Appends slots, to the last run when they continue it. */
void AppendRun(SlotRuns* runs, int64_t slot, int64_t length);

/*!
 * \brief Decodes a slot map.
 * \param num_slots Slots of the receiver's pools, [group].
 * \param has_window Whether a group may leave out leading positions, [group].
 * \return The runs of each group: disjoint, within the pool, and for the same positions.
 * \throws Error (ValueError).
 */
std::vector<SlotRuns> ParseSlotMap(const int64_t* data, size_t size,
                                   const std::vector<int64_t>& num_slots,
                                   const std::vector<bool>& has_window);

/*! \brief Number of positions in the runs. */
int64_t NumPositions(const SlotRuns& runs);

/*! \brief The state that a sequence returns to when a receive is cancelled. */
struct Receive {
  struct Group {
    int64_t first_page;
    std::vector<int32_t> gone;  // leading pages that the window moves past with the new positions
    size_t num_retained;        // pages behind them that the sequence keeps
    int32_t replaced = -1;      // a shared last page that was replaced by a copy
  };
  int64_t id;
  int64_t begin;  // the length before the receive
  std::vector<Group> groups;
  bool is_in_step = false;  // a step uses the sequence; the receive ends with the step
};

/*!
 * \brief The pages that a receive writes to. They stay pinned until the transport is done, even if
 * the sequence is removed.
 */
struct ReceivePages {
  std::vector<std::vector<int32_t>> pages;  // [group]
};

/*! \brief Positions [begin, end) of a sequence go to a peer; those before `next` are in blocks. */
struct SendMark {
  int64_t id;
  int64_t peer;
  int64_t begin;
  int64_t end;
  int64_t next;
  std::vector<SlotRuns> slots;  // [group] slots of the peer for [begin, end)
};

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
  std::vector<std::vector<CopyRun>> runs;   // [group]
  std::vector<std::vector<int32_t>> pages;  // [group], pinned
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_KV_TRANSFER_H_
