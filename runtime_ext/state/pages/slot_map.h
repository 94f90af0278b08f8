// SPDX-License-Identifier: Apache-2.0
/*!
 * \file slot_map.h
 * \brief The slots where a receiver wants positions: those of consecutive positions, for each layer
 * group.
 *
 * A slot map has for each layer group the number of runs, then the first slot and the length of
 * each run, in order of position. A run at slot kNotWanted stands for positions that the window of
 * the receiver does not reach.
 */
#ifndef TVM_PAGEDKV_STATE_PAGES_SLOT_MAP_H_
#define TVM_PAGEDKV_STATE_PAGES_SLOT_MAP_H_

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

/*! \brief The page for the state behind the first `position` positions, if one is wanted. */
struct StateSlot {
  int64_t page = kNotWanted;
  int64_t position = 0;
};

/*! \brief What a receiver wants of positions: a map has the groups, then the state groups. */
struct SlotMap {
  std::vector<SlotRuns> groups;   // the number of runs, then the slot and length of each
  std::vector<StateSlot> states;  // 0, or 1 and the page and position
};

/*! \brief Appends slots, to the last run when they continue it. */
void AppendRun(SlotRuns* runs, int64_t slot, int64_t length);

/*!
 * \brief Decodes a slot map.
 * \param num_slots Slots of the receiver's pools, [group], then pages of those of states.
 * \param has_window Whether a group may leave out leading positions, [group].
 * \return The runs of each group are disjoint, within the pool, and for the same positions.
 * \throws Error (ValueError).
 */
SlotMap ParseSlotMap(const int64_t* data, size_t size, const std::vector<int64_t>& num_slots,
                     const std::vector<bool>& has_window);
std::vector<int64_t> EncodeSlotMap(const SlotMap& map);

/*! \brief Number of positions in the runs. */
int64_t NumPositions(const SlotRuns& runs);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_PAGES_SLOT_MAP_H_
