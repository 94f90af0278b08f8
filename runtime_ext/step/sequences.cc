// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sequences.cc
 * \brief Operations on sequences between steps.
 */
#include "step/sequences.h"

#include <algorithm>

#include "base/error.h"

namespace pagedkv {

void Sequences::Clear() {
  phase_.RequireIdle("clear");
  table_->Clear();
}

void Sequences::Add(int64_t sequence_id) {
  phase_.RequireIdle("add_sequence");
  table_->Add(sequence_id);
}

void Sequences::Remove(int64_t sequence_id) {
  phase_.RequireIdle("remove_sequence");
  table_->Remove(sequence_id);
}

void Sequences::Fork(int64_t parent_id, int64_t child_id, int64_t fork_position) {
  phase_.RequireIdle("fork_sequence");
  table_->Fork(parent_id, child_id, fork_position);
}

void Sequences::PopN(int64_t sequence_id, int64_t count) {
  phase_.RequireIdle("pop_n");
  table_->Pop(sequence_id, count);
}

void Sequences::CheckPop(int64_t sequence_id, int64_t count) const {
  phase_.RequireIdle("pop_n");
  table_->CheckPop(sequence_id, count);
}

void Sequences::EnableSlidingWindow(int64_t sequence_id, int64_t window, int64_t num_sinks) {
  phase_.RequireIdle("enable_sliding_window");
  const CacheConfig& config = storage_.config();
  if (config.ignores_sequence_windows) {
    table_->CheckNewWindow(sequence_id, window, num_sinks);
    return;
  }
  if (!config.has_sequence_windows) {
    Raise(kValueError,
          "the cache was made without sliding_window, so its sequences cannot have one");
  }
  if (std::any_of(config.layers.begin(), config.layers.end(),
                  [](const LayerConfig& layer) { return layer.is_mla(); })) {
    Raise(kValueError,
          "a sliding window of a sequence is not possible with MLA layers and index lanes: their "
          "kernels have no such mask");
  }
  table_->EnableWindow(sequence_id, window, num_sinks, config.window_includes_self());
}

int64_t Sequences::NumAvailablePages() const {
  // A group with a window does not count while it can serve every step that the other groups can:
  // that is so as long as no more than max_num_sequences sequences exist. Where sequences have
  // windows as well, it may hold more of them than the other groups.
  const CacheConfig& config = storage_.config();
  const std::vector<LayerGroup>& groups = storage_.groups();
  const bool has_global = std::any_of(groups.begin(), groups.end(), [](const LayerGroup& group) {
    return group.shape.window == 0;
  });
  int64_t num_available = config.num_pages();
  for (int32_t g = 0; g < table_->num_groups(); ++g) {
    const PagePool& pool = table_->pool(g);
    const bool is_spare = has_global && groups[g].shape.window > 0 && !config.has_sequence_windows;
    // A step may also copy the last page of sequences that share it.
    if (is_spare && pool.num_available() >= config.MaxStepPages() + pool.num_shared()) continue;
    num_available = std::min<int64_t>(num_available, pool.num_available());
  }
  return std::max<int64_t>(num_available - config.num_reserved_pages, 0);
}

}  // namespace pagedkv
