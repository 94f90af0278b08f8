// SPDX-License-Identifier: Apache-2.0
/*!
 * \file cache_object.cc
 * \brief The parts of a cache put together.
 */
#include "ffi/cache_object.h"

#include <vector>

namespace pagedkv {

PagedKVCacheObj::PagedKVCacheObj(CacheConfig config)
    : config_(std::move(config)),
      storage_(config_),
      page_groups_(storage_),
      table_(config_.max_num_sequences, static_cast<int32_t>(config_.page_size),
             storage_.NumPages(), storage_.Windows(), storage_.StateGroups(), storage_.NumStates(),
             config_.num_pages()),
      copier_(storage_),
      step_(storage_, &table_, &copier_),
      sequences_(storage_, &table_, step_.phase()),
      lower_tiers_(&step_, &table_, &guard_, page_groups_.layout().Text()),
      prefix_calls_(&step_, &table_, &lower_tiers_),
      tree_commit_(&step_, &table_, &copier_),
      attention_(&step_),
      recurrence_(&step_),
      checkpoint_writer_(&step_, table_, page_groups_),
      checkpoint_reader_(&step_, &table_, page_groups_),
      receiver_(&step_, &table_, &copier_),
      sender_(&step_, &table_),
      debug_kv_(&step_, &table_, &copier_),
      inspector_({&step_, &table_, copier_, tree_commit_, page_groups_, sender_, lower_tiers_}) {}

void PagedKVCacheObj::BeginForward(IntSpan sequence_ids, IntSpan append_lengths,
                                   std::optional<IntSpan> tree_parents) {
  step_.phase().RequireIdle("begin_forward");
  if (tree_parents) sender_.RequireNoSends(sequence_ids);
  step_.Begin(sequence_ids, append_lengths, tree_parents);
}

void PagedKVCacheObj::BeginForwardWithSpans(IntSpan sequence_ids, IntSpan append_lengths,
                                            IntSpan spans) {
  step_.phase().RequireIdle("begin_forward_with_spans");
  step_.Begin(sequence_ids, append_lengths, std::nullopt, spans);
}

void PagedKVCacheObj::EndForward() {
  step_.phase().RequireOpenStep("end_forward");
  std::vector<int64_t> blocks;
  if (step_.IsWritten()) blocks = sender_.MakeBlocks();  // before windows let rows go
  step_.End();
  sender_.Announce(blocks);
}

}  // namespace pagedkv
