// SPDX-License-Identifier: Apache-2.0
/*!
 * \file table_state.h
 * \brief All that a failed call must leave as it was.
 */
#ifndef TVM_PAGEDKV_FUZZ_TABLE_STATE_H_
#define TVM_PAGEDKV_FUZZ_TABLE_STATE_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "state/table/sequence_table.h"

namespace pagedkv {

using TableState = std::vector<std::vector<int64_t>>;

inline TableState StateOf(const SequenceTable& table) {
  TableState state{{table.total_length(), table.num_sequences()}};
  std::vector<int64_t> ids;
  for (const auto& [id, sequence] : table.sequences()) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  for (int64_t id : ids) {
    const Sequence& sequence = table.At(id);
    const SequenceWindow& window = sequence.window;
    state.push_back({id, sequence.length, sequence.tree.size(), sequence.first_unwritten,
                     window.size, window.num_sinks, window.num_dropped});
    for (int64_t i = 0; i < sequence.tree.size(); ++i) {
      state.back().push_back(sequence.tree.depth(i));
    }
    state.emplace_back(sequence.first_pages);
    for (const auto& pages : sequence.pages) state.emplace_back(pages.begin(), pages.end());
    for (const PageHistory& history : sequence.histories) state.push_back({history.size()});
    for (const SequenceStates& states : sequence.states) {
      state.push_back({states.length, states.first_page, states.history.size()});
      state.emplace_back(states.pages.begin(), states.pages.end());
    }
  }
  const EvictionHints& hints = table.prefixes().hints();
  state.push_back({hints.num_hints(), hints.num_pins(), hints.next_expiry()});
  for (int32_t g = 0; g < table.geometry().num_pools(); ++g) {
    const std::vector<int32_t>& free = table.pool(g).free_pages();
    state.emplace_back(free.begin(), free.end());
    const std::vector<int32_t> cached = table.pool(g).cached_pages().List();
    state.emplace_back(cached.begin(), cached.end());
    state.push_back({table.pool(g).num_reclaimed(), table.pool(g).num_retained()});
  }
  return state;
}

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_FUZZ_TABLE_STATE_H_
