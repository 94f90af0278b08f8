// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_transfers.cc
 * \brief Pages of the layers to slots of the host tier and back.
 */
#include "tiers/page_transfers.h"

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
    if (!IsHost(device)) Synchronize(device, stream);
    tier_->Publish(slot, text);
  } catch (const std::exception&) {
    ++num_failed_saves_;
    tier_->Cancel(slot);
  }
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
