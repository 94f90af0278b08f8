// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_transfers.cc
 * \brief Pages of the layers to slots of host memory and back.
 */
#include "prefixes/page_transfers.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>

#include "device/parallel.h"
#include "storage/page_io.h"

namespace pagedkv {

std::vector<ValueSize> ValueSizesOf(const LayerStorage& storage) {
  std::vector<ValueSize> sizes;
  for (const LayerGroup& group : storage.groups()) {
    int64_t num_bytes = 0;
    for (int64_t index : group.layers) num_bytes += storage.layers()[index].layout.page_bytes;
    sizes.push_back(num_bytes);
  }
  for (const StateGroup& group : storage.StateGroups()) {
    int64_t num_bytes = 0;
    for (int64_t index : storage.groups()[group.ingredients].layers) {
      num_bytes += BytesOfState(storage.layers()[index].states);
    }
    sizes.push_back({num_bytes, group.interval / storage.config().page_size});
  }
  return sizes;
}

PageTransfers::PageTransfers(const LayerStorage& storage, StreamOrder* order,
                             HostMemory* host_memory, ffi::Tensor memory)
    : storage_(storage), order_(order), host_memory_(host_memory), memory_(std::move(memory)) {
  for (const LayerGroup& group : storage.groups()) {
    std::vector<LayerPages>& layers = layers_.emplace_back();
    for (int64_t index : group.layers) {
      const StoredLayer& layer = storage.layers()[index];
      layers.push_back({layer.pages, layer.layout.page_bytes, layer.layout.used_bytes()});
    }
  }
  for (const StateGroup& group : storage.StateGroups()) {
    std::vector<LayerPages>& layers = layers_.emplace_back();
    for (int64_t index : storage.groups()[group.ingredients].layers) {
      const ffi::Tensor& states = storage.layers()[index].states;
      layers.push_back({states, BytesOfState(states), BytesOfState(states)});
    }
  }
  for (const std::vector<LayerPages>& layers : layers_) {
    std::vector<int64_t>& offsets = offsets_.emplace_back(1, 0);
    for (const LayerPages& layer : layers) offsets.push_back(offsets.back() + layer.page_bytes);
  }
}

template <typename Copy>
void PageTransfers::ForEachLayer(int32_t group, int32_t slot, Copy copy) const {
  const int64_t begin = host_memory_->DataOf(slot) - static_cast<const char*>(memory_.data_ptr());
  for (size_t i = 0; i < layers_[group].size(); ++i) {
    copy(layers_[group][i], begin + offsets_[group][i]);
  }
}

uint64_t PageTransfers::CopyBlock(Direction direction, const PageLoad& value, int64_t block) const {
  const PageValueLayout& layout = host_memory_->LayoutOf(value.slot);
  const std::vector<int64_t>& offsets = offsets_[value.group];
  const std::vector<LayerPages>& layers = layers_[value.group];
  char* data = host_memory_->DataOf(value.slot);
  const int64_t block_begin = block * PageValueLayout::kBlockBytes;
  const int64_t block_end = std::min(block_begin + PageValueLayout::kBlockBytes, offsets.back());
  size_t i = std::upper_bound(offsets.begin(), offsets.end(), block_begin) - offsets.begin() - 1;
  for (; i < layers.size() && offsets[i] < block_end; ++i) {
    const LayerPages& layer = layers[i];
    const int64_t begin = std::max(block_begin - offsets[i], int64_t{0});
    const int64_t end = std::min(block_end - offsets[i], layer.page_bytes);
    char* in_page = static_cast<char*>(layer.pages.data_ptr()) + layer.pages.byte_offset() +
                    value.page * layer.page_bytes;
    char* in_slot = data + offsets[i];
    if (direction == Direction::kLoad) {
      std::memcpy(in_page + begin, in_slot + begin, end - begin);
    } else {  // what was never written does not leave the cache
      const int64_t used_end = std::clamp(layer.used_bytes, begin, end);
      std::memcpy(in_slot + begin, in_page + begin, used_end - begin);
      std::memset(in_slot + used_end, 0, end - used_end);
    }
  }
  // Behind the copy, which has brought the block into the CPU's cache.
  return layout.ChecksumOfBlock(host_memory_->ValueOf(value.slot), block);
}

std::vector<uint64_t> PageTransfers::CopyBlocks(Direction direction,
                                                const std::vector<PageLoad>& values) const {
  struct Block {
    size_t value;
    int64_t block;
    uint64_t checksum;
  };
  std::vector<Block> blocks;
  int64_t num_bytes = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const int64_t num_blocks = host_memory_->LayoutOf(values[i].slot).num_blocks();
    for (int64_t b = 0; b < num_blocks; ++b) blocks.push_back({i, b, 0});
    num_bytes += offsets_[values[i].group].back();
  }
  const bool is_host = IsHost(storage_.device());
  ParallelFor(static_cast<int64_t>(blocks.size()), num_bytes, [&](int64_t i) {
    const PageLoad& value = values[blocks[i].value];
    blocks[i].checksum =
        is_host ? CopyBlock(direction, value, blocks[i].block)
                : host_memory_->LayoutOf(value.slot)
                      .ChecksumOfBlock(host_memory_->ValueOf(value.slot), blocks[i].block);
  });
  std::vector<uint64_t> checksums(values.size(), 0);
  for (const Block& block : blocks) checksums[block.value] ^= block.checksum;
  return checksums;
}

void PageTransfers::Save(const std::vector<PageSave>& saves) noexcept {
  try {
    IsHost(storage_.device()) ? SaveOnHost(saves) : Queue(saves);
  } catch (const std::exception&) {
    num_failed_saves_ += static_cast<int64_t>(saves.size());
  }
}

void PageTransfers::SaveOnHost(const std::vector<PageSave>& saves) {
  // So few at a time that slots of pages which are saved now need not make room for one another.
  int64_t limit = std::numeric_limits<int64_t>::max();
  for (size_t g = 0; g < offsets_.size(); ++g) {
    limit =
        std::min<int64_t>(limit, std::max(host_memory_->num_slots(static_cast<int32_t>(g)) / 2, 1));
  }
  for (size_t begin = 0; begin < saves.size();) {
    const size_t end = std::min(saves.size(), begin + static_cast<size_t>(limit));
    std::vector<PageLoad> values;
    std::vector<const PageText*> texts;
    values.reserve(end - begin);
    texts.reserve(end - begin);
    for (; begin < end; ++begin) {
      const PageSave& save = saves[begin];
      const int32_t slot = host_memory_->Reserve(save.group, save.text.key);
      if (slot < 0) continue;
      values.push_back({save.group, -1, slot, save.page});
      texts.push_back(&save.text);
    }
    std::vector<uint64_t> checksums;
    try {
      checksums = CopyBlocks(Direction::kSave, values);
    } catch (...) {
      for (const PageLoad& value : values) host_memory_->Cancel(value.slot);
      throw;
    }
    for (size_t i = 0; i < values.size(); ++i) {
      host_memory_->Publish(values[i].slot, *texts[i], checksums[i]);
    }
  }
}

void PageTransfers::Queue(const std::vector<PageSave>& saves) {
  for (const PageSave& save : saves) {
    const int32_t slot = host_memory_->Reserve(save.group, save.text.key);
    if (slot >= 0) QueueOne(save, slot);
  }
}

void PageTransfers::QueueOne(const PageSave& save, int32_t slot) noexcept {
  try {
    const StreamOrder::Call on_stream(order_);
    void* stream = CurrentStream(storage_.device());
    char* memory = static_cast<char*>(memory_.data_ptr());
    ForEachLayer(save.group, slot, [&](const LayerPages& layer, int64_t offset) {
      CopyBytes(layer.pages, save.page * layer.page_bytes, memory_, offset, layer.used_bytes,
                stream);
      std::memset(memory + offset + layer.used_bytes, 0, layer.page_bytes - layer.used_bytes);
    });
    const TokenSpan text = save.text.tokens;
    std::vector<int32_t> tokens(text.data, text.data + text.size);
    PageText own = save.text;
    own.tokens.data = tokens.data();
    queued_.push_back({slot, own, std::move(tokens)});
  } catch (const std::exception&) {
    // What is queued may still write to the slot.
    try {
      order_->Synchronize();
    } catch (const std::exception&) {
    }
    ++num_failed_saves_;
    return host_memory_->Cancel(slot);
  }
  constexpr size_t kMaxQueued = 1024;
  const size_t limit = std::min<size_t>(kMaxQueued, host_memory_->num_slots(save.group) / 2);
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
    is_done ? host_memory_->Publish(save.slot, save.text) : host_memory_->Cancel(save.slot);
  }
  queued_.clear();
}

bool PageTransfers::Load(const std::vector<PageLoad>& loads) {
  if (loads.empty()) return true;
  const StreamOrder::Call on_stream(order_);
  const DLDevice device = storage_.device();
  const std::vector<uint64_t> checksums = CopyBlocks(Direction::kLoad, loads);
  bool is_whole = true;
  for (size_t i = 0; i < loads.size(); ++i) {
    is_whole = host_memory_->Verify(loads[i].slot, checksums[i]) && is_whole;
  }
  if (!is_whole || IsHost(device)) return is_whole;
  void* stream = CurrentStream(device);
  for (const PageLoad& load : loads) {
    ForEachLayer(load.group, load.slot, [&](const LayerPages& layer, int64_t offset) {
      CopyBytes(memory_, offset, layer.pages, load.page * layer.page_bytes, layer.page_bytes,
                stream);
    });
  }
  Synchronize(device, stream);
  return true;
}

}  // namespace pagedkv
