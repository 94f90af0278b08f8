// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_transfers.cc
 * \brief Pages of the layers to slots of the host tier and back.
 */
#include "tiers/page_transfers.h"

#include <algorithm>
#include <cstring>
#include <exception>

namespace pagedkv {

std::vector<int64_t> PageBytesOf(const LayerStorage& storage) {
  std::vector<int64_t> page_bytes;
  for (const LayerGroup& group : storage.groups()) {
    page_bytes.push_back(0);
    for (int64_t index : group.layers) {
      page_bytes.back() += storage.layers()[index].layout.page_bytes;
    }
  }
  return page_bytes;
}

template <typename Copy>
void PageTransfers::ForEachLayer(int32_t group, int32_t slot, Copy copy) const {
  const char* begin = static_cast<const char*>(memory_.data_ptr());
  int64_t offset = tier_->DataOf(slot) - begin;
  for (int64_t index : storage_.groups()[group].layers) {
    const StoredLayer& layer = storage_.layers()[index];
    copy(layer, offset);
    offset += layer.layout.page_bytes;
  }
}

void PageTransfers::Save(int32_t group, int32_t page, const PageText& text) noexcept {
  const int32_t slot = tier_->Reserve(group, text.key);
  if (slot < 0) return;
  try {
    const StreamOrder::Call on_stream(order_);
    const DLDevice device = storage_.device();
    void* stream = CurrentStream(device);
    char* memory = static_cast<char*>(memory_.data_ptr());
    ForEachLayer(group, slot, [&](const StoredLayer& layer, int64_t offset) {
      const SlotLayout& layout = layer.layout;
      CopyBytes(layer.pages, page * layout.page_bytes, memory_, offset, layout.used_bytes(),
                stream);
      // What was never written does not leave the cache.
      std::memset(memory + offset + layout.used_bytes(), 0,
                  layout.page_bytes - layout.used_bytes());
    });
    if (IsHost(device)) return tier_->Publish(slot, text);
    std::vector<int32_t> tokens(text.tokens.data, text.tokens.data + text.tokens.size);
    PageText own = text;
    own.tokens.data = tokens.data();
    queued_.push_back({slot, own, std::move(tokens)});
  } catch (const std::exception&) {
    // What is queued may still write to the slot.
    try {
      if (!IsHost(storage_.device())) order_->Synchronize();
    } catch (const std::exception&) {
    }
    ++num_failed_saves_;
    return tier_->Cancel(slot);
  }
  constexpr size_t kMaxQueued = 1024;
  const size_t limit = std::min<size_t>(kMaxQueued, tier_->num_slots(group) / 2);
  if (queued_.size() > limit) Settle();
}

void PageTransfers::Settle() noexcept {
  if (queued_.empty()) return;
  bool is_done = true;
  try {
    // Those of a call that has not returned are on its own stream.
    const DLDevice device = storage_.device();
    Synchronize(device, CurrentStream(device));
    order_->Synchronize();
  } catch (const std::exception&) {
    is_done = false;
  }
  for (const QueuedSave& save : queued_) {
    num_failed_saves_ += !is_done;
    is_done ? tier_->Publish(save.slot, save.text) : tier_->Cancel(save.slot);
  }
  queued_.clear();
}

void PageTransfers::Load(const std::vector<PageLoad>& loads) {
  if (loads.empty()) return;
  const StreamOrder::Call on_stream(order_);
  const DLDevice device = storage_.device();
  void* stream = CurrentStream(device);
  for (const PageLoad& load : loads) {
    ForEachLayer(load.group, load.slot, [&](const StoredLayer& layer, int64_t offset) {
      const int64_t page_bytes = layer.layout.page_bytes;
      CopyBytes(memory_, offset, layer.pages, load.page * page_bytes, page_bytes, stream);
    });
  }
  if (!IsHost(device)) Synchronize(device, stream);
}

}  // namespace pagedkv
