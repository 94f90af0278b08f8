// SPDX-License-Identifier: Apache-2.0
/*!
 * \file kv_transfer.h
 * \brief State of a sequence whose K and V come from, or go to, another cache.
 *
 * The receiver takes pages for rows that someone else will write (Receive) and tells their slots as
 * a map. The sender notes the map (SendMark) and, as soon as rows are there, makes them ready as a
 * SendBlock, whose pages stay as they are until it is released: whatever the sequence does then.
 *
 * A map has for each layer group: the number of runs, then first slot and length of each, in order
 * of position. A run at slot kNotWanted stands for positions that a window of the receiver will not
 * see.
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

/*! \brief Adds slots after the others, as part of the last run where they continue it. */
void AppendRun(SlotRuns* runs, int64_t slot, int64_t length);

/*!
 * \brief Reads a map.
 * \param num_slots Slots of the receiver's pool, for each group.
 * \param has_window Whether a group may leave out leading positions.
 * \return The runs of each group: disjoint, within the pool, and of the same positions.
 * \throws Error (ValueError).
 */
std::vector<SlotRuns> ParseSlotMap(const int64_t* data, size_t size,
                                   const std::vector<int64_t>& num_slots,
                                   const std::vector<bool>& has_window);

/*! \brief Positions that the runs stand for. */
int64_t NumPositions(const SlotRuns& runs);

/*! \brief What a sequence goes back to when a receive is cancelled. */
struct Receive {
  struct Group {
    int64_t first_page;
    std::vector<int32_t> gone;  // leading pages that the window leaves with the received rows
    size_t num_retained;        // pages after them that the sequence still has
    int32_t replaced = -1;      // a shared last page in whose place there is a copy
  };
  int64_t id;
  int64_t begin;  // the length before
  std::vector<Group> groups;
  bool is_in_step = false;  // a step uses the sequence: the receive ends with it
};

/*!
 * \brief The pages that a receive writes to. They stay pinned until its transport is done with
 * them, whatever becomes of the sequence.
 */
struct ReceivePages {
  std::vector<std::vector<int32_t>> pages;  // [group]
};

/*! \brief Positions [begin, end) of a sequence go to slots of a peer; those below next are ready.
 */
struct SendMark {
  int64_t id;
  int64_t peer;
  int64_t begin;
  int64_t end;
  int64_t next;
  std::vector<SlotRuns> slots;  // [group], of the positions from begin on
};

/*! \brief Slots within one page on either side. */
struct CopyRun {
  int64_t source;
  int64_t destination;
  int64_t length;
};

/*! \brief Rows that are ready to be sent. */
struct SendBlock {
  int64_t send_id;
  int64_t sequence_id;
  int64_t peer;
  int64_t begin;
  int64_t end;
  std::vector<std::vector<CopyRun>> runs;   // [group]
  std::vector<std::vector<int32_t>> pages;  // [group], each with an owner more
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_KV_TRANSFER_H_
