// SPDX-License-Identifier: Apache-2.0
/*!
 * \file step_arrays_advance.cc
 * \brief The arrays of a step that continues the last one: those of the last step moved forward.
 */
#include <algorithm>
#include <limits>

#include "step/step_arrays.h"

namespace pagedkv {

int64_t StepArrays::NumPageIdsLeft() const {
  if (!is_host_) return -1;
  int64_t num_left = std::numeric_limits<int32_t>::max();
  for (int32_t g = 0; g < num_groups_; ++g) {
    const size_t i = Index(g, kPageIds);
    num_left = std::min(num_left, room_[i] - sizes_[i]);
  }
  return num_left;
}

void StepArrays::Advance() {
  for (int32_t g = 0; g < num_groups_; ++g) {
    const size_t i = Index(g, kPageIds);
    sizes_[i] += plan_arrays_.NumNewPages();
    arrays_.Resize(i, sizes_[i]);
  }
  plan_arrays_.AdvancePositions(arrays_.host(kQueryPositions), arrays_.host(kPastLengths));
  for (int32_t g = 0; g < num_groups_; ++g) {
    auto host = [&](GroupArray array) { return arrays_.host(Index(g, array)); };
    plan_arrays_.AdvancePageTable(g, host(kPageIndptr), host(kPageIds));
    plan_arrays_.AdvanceLengthsAndSlots(g, host(kLengths), host(kSlots));
  }
}

}  // namespace pagedkv
