// SPDX-License-Identifier: Apache-2.0
/*!
 * \file lower_tiers.cc
 * \brief The tiers below the pages of a cache.
 */
#include "prefixes/lower_tiers.h"

#include <tvm/ffi/dtype.h>

#include <utility>
#include <vector>

#include "base/error.h"
#include "base/text_stream.h"

namespace pagedkv {

namespace {

TierPolicy PolicyOf(const LowerTierOptions& options) {
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

LowerTiers::~LowerTiers() {
  if (!process_.IsThis()) return;
  Settle();
  if (host_memory_.defined()) host_memory_->Close();
}

HostMemoryRef LowerTiers::Open(const ffi::Map<ffi::String, ffi::Any>& map) {
  step_->phase().RequireIdle("prefix_open");
  const LowerTierOptions options = LowerTierOptions::FromMap(map);
  if (host_memory_.defined())
    Raise(kValueError, "the cache has a prefix cache below its pages already");
  const LayerStorage& storage = step_->storage();
  const CacheConfig& config = storage.config();
  auto object = ffi::make_object<HostMemoryObj>(options, table_->page_size(), ValueSizesOf(storage),
                                                storage.device());
  auto transfers = std::make_unique<PageTransfers>(storage, &step_->stream_order(),
                                                   object->host_memory(), object->memory());
  // Workers of a tensor-parallel model have other heads on pages of the same form.
  ClassicText space;
  space << "model=" << options.model_id << "\nlayout=" << layout_
        << "\ndtype=" << std::string(ffi::DLDataTypeToString(config.dtype)) << GroupsText(storage)
        << "\nworker=";
  if (const std::optional<int64_t> worker = CurrentWorkerId()) space << *worker;
  table_->prefixes().SetHostMemory(object->host_memory(), transfers.get(), PolicyOf(options),
                                   space.str());
  host_memory_ = HostMemoryRef(std::move(object));
  transfers_ = std::move(transfers);
  lookup_timeout_ = options.lookup_timeout;
  return host_memory_;
}

void LowerTiers::ForgetTexts() {
  step_->phase().RequireIdle("prefix_clear");
  Settle();
  table_->ForgetTexts();
}

bool LowerTiers::Flush(double seconds) {
  Settle();
  if (!host_memory_.defined()) return true;
  const HostMemoryRef host_memory = host_memory_;
  const CallerGuard::Outside outside(guard_);
  return host_memory->Flush(seconds);
}

bool LowerTiers::Wait(int64_t ticket, double seconds) {
  if (ticket == 0) return true;
  const HostMemoryRef host_memory = host_memory_;
  const CallerGuard::Outside outside(guard_);
  return host_memory->Wait(ticket, seconds);
}

bool LowerTiers::Load(int64_t sequence_id, const std::vector<PageLoad>& loads) {
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

void LowerTiers::CheckIntegrity() const {
  if (host_memory_.defined()) host_memory_->host_memory()->CheckIntegrity();
}

ffi::Map<ffi::String, ffi::Any> LowerTiers::Stats() const {
  if (!host_memory_.defined()) return {};
  const HostMemory::Counts host = host_memory_->host_memory()->counts();
  const PrefixCache::Counts& hits = table_->prefixes().counts();
  return {{"num_host_pages", host.num_values},
          {"host_bytes", host.num_bytes},
          {"host_capacity_bytes", host.capacity_bytes},
          {"num_saved_pages", host.saved},
          {"num_failed_saves", host.skipped + transfers_->num_failed_saves()},
          {"num_evicted_pages", host.evicted},
          {"num_damaged_pages", host.damaged},
          {"num_stored_pages", host.stored},
          {"num_failed_stores", host.failed_stores},
          {"num_dropped_stores", host.dropped_stores},
          {"num_pending_stores", host.pending_stores},
          {"num_fetched_pages", host.fetched},
          {"num_failed_fetches", host.failed_fetches},
          {"num_failed_loads", hits.failed_loads},
          {"reused_pool_tokens", hits.reused_tokens - hits.host_tokens - hits.store_tokens},
          {"reused_host_tokens", hits.host_tokens},
          {"reused_store_tokens", hits.store_tokens}};
}

}  // namespace pagedkv
