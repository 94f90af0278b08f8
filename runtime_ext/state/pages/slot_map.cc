// SPDX-License-Identifier: Apache-2.0
/*!
 * \file slot_map.cc
 * \brief Slot maps are decoded and checked.
 */
#include "state/pages/slot_map.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/error.h"

namespace pagedkv {

namespace {

constexpr int64_t kMaxPositions = std::numeric_limits<int32_t>::max();

void CheckDisjoint(SlotRuns runs, size_t group) {
  std::sort(runs.begin(), runs.end(),
            [](const SlotRun& a, const SlotRun& b) { return a.slot < b.slot; });
  for (size_t i = 1; i < runs.size(); ++i) {
    if (runs[i - 1].slot == kNotWanted) continue;
    if (runs[i].slot < runs[i - 1].slot + runs[i - 1].length) {
      Raise(kValueError, "the position map of group ", group, " has slot ", runs[i].slot, " twice");
    }
  }
}

}  // namespace

void AppendRun(SlotRuns* runs, int64_t slot, int64_t length) {
  if (length == 0) return;
  if (!runs->empty() && runs->back().slot + runs->back().length == slot && slot > 0 &&
      runs->back().slot != kNotWanted) {
    runs->back().length += length;
  } else {
    runs->push_back({slot, length});
  }
}

int64_t NumPositions(const SlotRuns& runs) {
  int64_t total = 0;
  for (const SlotRun& run : runs) total += run.length;
  return total;
}

namespace {

/*! \brief Decodes what a map has for a state group, from `at` on. */
StateSlot ParseState(const int64_t* data, size_t size, size_t* at, size_t group,
                     int64_t num_pages) {
  if (*at == size) {
    Raise(kValueError, "the position map has no page for states of group ", group);
  }
  const int64_t count = data[(*at)++];
  if (count == 0) return {};
  if (count != 1 || size - *at < 2) {
    Raise(kValueError, "the position map should have ", count, " states of group ", group,
          ", but a receiver wants one at most, and there are ", size - *at, " more numbers");
  }
  const StateSlot state{data[*at], data[*at + 1]};
  *at += 2;
  if (state.page < 0 || state.page >= num_pages) {
    Raise(kValueError, "state page ", state.page, " in the position map of group ", group,
          " is not in [0, ", num_pages, ")");
  }
  return state;
}

}  // namespace

std::vector<int64_t> EncodeSlotMap(const SlotMap& map) {
  std::vector<int64_t> numbers;
  for (const SlotRuns& runs : map.groups) {
    numbers.push_back(static_cast<int64_t>(runs.size()));
    for (const SlotRun& run : runs) numbers.insert(numbers.end(), {run.slot, run.length});
  }
  for (const StateSlot& state : map.states) {
    numbers.push_back(state.page == kNotWanted ? 0 : 1);
    if (state.page != kNotWanted) numbers.insert(numbers.end(), {state.page, state.position});
  }
  return numbers;
}

SlotMap ParseSlotMap(const int64_t* data, size_t size, const std::vector<int64_t>& num_slots,
                     const std::vector<bool>& has_window) {
  std::vector<SlotRuns> maps(has_window.size());
  size_t at = 0;
  for (size_t g = 0; g < maps.size(); ++g) {
    if (at == size) {
      Raise(kValueError, "the position map has ", g, " groups, but the cache has ", maps.size(),
            " groups of layers");
    }
    const int64_t count = data[at++];
    if (count < 1 || static_cast<uint64_t>(count) > (size - at) / 2) {
      Raise(kValueError, "the position map of group ", g, " should have ", count,
            " runs, but there are ", size - at, " more numbers");
    }
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i, at += 2) {
      const SlotRun run{data[at], data[at + 1]};
      const bool may_skip = has_window[g] && i == 0 && run.slot == kNotWanted;
      const int64_t limit = may_skip ? kMaxPositions : num_slots[g];
      if (!may_skip && (run.slot < 0 || run.slot >= limit)) {
        Raise(kValueError, "slot ", run.slot, " in the position map of group ", g,
              " is not in [0, ", limit, ")");
      }
      if (run.length < 1 || run.length > limit - std::max<int64_t>(run.slot, 0)) {
        Raise(kValueError, "the position map of group ", g, " has a run of ", run.length,
              " slots from ", run.slot, ", of ", limit);
      }
      total += run.length;
      if (total > kMaxPositions) {
        Raise(kValueError, "the position map of group ", g, " has more than 2^31 - 1 positions");
      }
      maps[g].push_back(run);
    }
    CheckDisjoint(maps[g], g);
    if (total != NumPositions(maps[0])) {
      Raise(kValueError, "the position map of group ", g, " has ", total,
            " positions, that of group 0 has ", NumPositions(maps[0]));
    }
  }
  std::vector<StateSlot> states;
  for (size_t p = maps.size(); p < num_slots.size(); ++p) {
    states.push_back(ParseState(data, size, &at, p - maps.size(), num_slots[p]));
  }
  if (at != size) {
    Raise(kValueError, "the position map has ", size - at, " numbers after its ", maps.size(),
          maps.size() == 1 ? " group" : " groups");
  }
  return {std::move(maps), std::move(states)};
}

}  // namespace pagedkv
