// SPDX-License-Identifier: Apache-2.0
/*!
 * \file saved_slots.cc
 * \brief Copies slots away and back.
 */
#include "storage/saved_slots.h"

#include "device/device_stream.h"

namespace pagedkv {

namespace {

int64_t BytesOf(const LayerStorage& storage, int64_t num_slots) {
  int64_t num_bytes = 0;
  for (const StoredLayer& layer : storage.layers()) {
    num_bytes += num_slots * layer.layout.slot_bytes();
  }
  return num_bytes;
}

}  // namespace

SavedSlots::SavedSlots(const LayerStorage& storage, int64_t num_slots)
    : stream_(CurrentStream(storage.device())),
      buffer_(AllocateTensor({BytesOf(storage, num_slots)}, kByte, storage.device(),
                             storage.counter())) {}

void SavedSlots::Save(const StoredLayer& layer, const int32_t* slots, int64_t count) {
  saved_.push_back({&layer, slots, count, end_});
  for (int64_t i = 0; i < count; ++i) {
    layer.layout.VisitRows(slots[i], [&](int64_t offset, int64_t num_bytes) {
      CopyBytes(layer.pages, offset, buffer_, end_, num_bytes, stream_);
      end_ += num_bytes;
    });
  }
}

void SavedSlots::Restore() {
  for (const Entry& entry : saved_) {
    int64_t from = entry.offset;
    for (int64_t i = 0; i < entry.count; ++i) {
      entry.layer->layout.VisitRows(entry.slots[i], [&](int64_t offset, int64_t num_bytes) {
        CopyBytes(buffer_, from, entry.layer->pages, offset, num_bytes, stream_);
        from += num_bytes;
      });
    }
  }
}

}  // namespace pagedkv
