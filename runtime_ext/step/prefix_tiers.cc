// SPDX-License-Identifier: Apache-2.0
/*!
 * \file prefix_tiers.cc
 * \brief The tiers below the pages of a cache.
 */
#include "step/prefix_tiers.h"

#include <tvm/ffi/dtype.h>

#include <utility>
#include <vector>

#include "base/error.h"
#include "base/text_stream.h"

namespace pagedkv {

namespace {

TierPolicy PolicyOf(const PrefixTierOptions& options) {
  if (options.write_policy == "through") return {TierWrites::kThrough, options.min_hits};
  if (options.write_policy == "back") return {TierWrites::kBack, options.min_hits};
  return {TierWrites::kSelective, options.min_hits};
}

/*!
 * \brief The layer group of each layer, whose pages a value holds, as text for the keys.
 *
 * Empty where the layout determines the groups. It does not when recurrent layers or convolutions
 * of one shape keep histories of different lengths, which no other part of the keys contains.
 */
std::string GroupsText(const LayerStorage& storage) {
  bool is_in_layout = true;
  const std::vector<LayerGroup>& groups = storage.groups();
  for (size_t g = 1; g < groups.size(); ++g) {
    LayerConfig shape = groups[g].shape;
    for (size_t other = 0; other < g; ++other) {
      shape.history_tokens = groups[other].shape.history_tokens;
      is_in_layout = is_in_layout && !groups[other].shape.SharesGroupWith(shape);
    }
  }
  if (is_in_layout) return "";
  ClassicText text;
  text << "\ngroups=";
  for (const StoredLayer& layer : storage.layers()) text << layer.group << ",";
  return text.str();
}

}  // namespace

PrefixTiers::~PrefixTiers() {
  if (!process_.IsThis()) return;
  Settle();
  if (tier_.defined()) tier_->Close();
}

PrefixTier PrefixTiers::Open(const ffi::Map<ffi::String, ffi::Any>& map) {
  step_->phase().RequireIdle("prefix_open");
  const PrefixTierOptions options = PrefixTierOptions::FromMap(map);
  if (tier_.defined()) Raise(kValueError, "the cache has a prefix cache below its pages already");
  const LayerStorage& storage = step_->storage();
  const CacheConfig& config = storage.config();
  auto object = ffi::make_object<PrefixTierObj>(options, table_->page_size(), ValueSizesOf(storage),
                                                storage.device());
  auto transfers = std::make_unique<PageTransfers>(storage, &step_->stream_order(), object->tier(),
                                                   object->memory());
  // Workers of a tensor-parallel model have other heads on pages of the same form.
  ClassicText space;
  space << "model=" << options.model_id << "\nlayout=" << layout_
        << "\ndtype=" << std::string(ffi::DLDataTypeToString(config.dtype)) << GroupsText(storage)
        << "\nworker=";
  if (const std::optional<int64_t> worker = CurrentWorkerId()) space << *worker;
  table_->prefixes().SetTier(object->tier(), transfers.get(), PolicyOf(options), space.str());
  tier_ = PrefixTier(std::move(object));
  transfers_ = std::move(transfers);
  lookup_timeout_ = options.lookup_timeout;
  return tier_;
}

void PrefixTiers::ForgetTexts() {
  step_->phase().RequireIdle("prefix_clear");
  Settle();
  table_->ForgetTexts();
}

bool PrefixTiers::Flush(double seconds) {
  Settle();
  if (!tier_.defined()) return true;
  const PrefixTier tier = tier_;
  const CallerGuard::Outside outside(guard_);
  return tier->Flush(seconds);
}

bool PrefixTiers::Wait(int64_t ticket, double seconds) {
  if (ticket == 0) return true;
  const PrefixTier tier = tier_;
  const CallerGuard::Outside outside(guard_);
  return tier->Wait(ticket, seconds);
}

bool PrefixTiers::Load(int64_t sequence_id, const std::vector<PageLoad>& loads) {
  if (transfers_ == nullptr) return true;
  bool is_whole = false;
  try {
    is_whole = transfers_->Load(loads);
  } catch (...) {
    table_->CancelLoads(sequence_id, loads);
    throw;
  }
  is_whole ? table_->FinishLoads(sequence_id, loads) : table_->CancelLoads(sequence_id, loads);
  return is_whole;
}

void PrefixTiers::CheckIntegrity() const {
  if (tier_.defined()) tier_->tier()->CheckIntegrity();
}

ffi::Map<ffi::String, ffi::Any> PrefixTiers::Stats() const {
  if (!tier_.defined()) return {};
  const HostTier::Counts tier = tier_->tier()->counts();
  const PrefixIndex::Counts& hits = table_->prefixes().counts();
  return {{"num_host_pages", tier.num_values},
          {"host_bytes", tier.num_bytes},
          {"host_capacity_bytes", tier.capacity_bytes},
          {"num_saved_pages", tier.saved},
          {"num_failed_saves", tier.skipped + transfers_->num_failed_saves()},
          {"num_evicted_pages", tier.evicted},
          {"num_damaged_pages", tier.damaged},
          {"num_stored_pages", tier.stored},
          {"num_failed_stores", tier.failed_stores},
          {"num_dropped_stores", tier.dropped_stores},
          {"num_pending_stores", tier.pending_stores},
          {"num_fetched_pages", tier.fetched},
          {"num_failed_fetches", tier.failed_fetches},
          {"num_failed_loads", hits.failed_loads},
          {"reused_pool_tokens", hits.reused_tokens - hits.host_tokens - hits.store_tokens},
          {"reused_host_tokens", hits.host_tokens},
          {"reused_store_tokens", hits.store_tokens}};
}

}  // namespace pagedkv
