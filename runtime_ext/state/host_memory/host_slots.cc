// SPDX-License-Identifier: Apache-2.0
/*!
 * \file host_slots.cc
 * \brief Slots of host memory that hold values of pages.
 */
#include "state/host_memory/host_slots.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "base/error.h"

namespace pagedkv {

namespace {

/*! \brief [group] bytes of a slot. */
std::vector<int64_t> SlotBytesOf(int32_t page_size, const std::vector<ValueSize>& sizes) {
  constexpr int64_t kBlock = HostSlots::kBlockAlignment;
  std::vector<int64_t> slot_bytes;
  int64_t sum = 0;
  for (const ValueSize& size : sizes) {
    slot_bytes.push_back(PageValueLayout(0, page_size, size.bytes).num_bytes());
    sum += slot_bytes.back();
  }
  if (sum < 16 * kBlock) return slot_bytes;  // it would cost too much of the memory
  for (int64_t& bytes : slot_bytes) bytes = (bytes + kBlock - 1) / kBlock * kBlock;
  return slot_bytes;
}

/*! \brief Slots of a group, where there are so many for a value of each page. */
int64_t NumSlotsOf(const ValueSize& size, int64_t num_slots) {
  return (num_slots + size.pages_per_value - 1) / size.pages_per_value;
}

}  // namespace

int64_t HostSlots::BytesOf(int64_t num_slots, int32_t page_size,
                           const std::vector<ValueSize>& sizes) {
  const std::vector<int64_t> slot_bytes = SlotBytesOf(page_size, sizes);
  int64_t num_bytes = 0;
  for (size_t g = 0; g < sizes.size(); ++g) {
    num_bytes += NumSlotsOf(sizes[g], num_slots) * slot_bytes[g];
  }
  return num_bytes;
}

int64_t HostSlots::NumSlotsIn(int64_t num_bytes, int32_t page_size,
                              const std::vector<ValueSize>& sizes) {
  if (sizes.empty()) return 0;
  int64_t low = 0;  // fits
  int64_t high = std::numeric_limits<int32_t>::max() / 2 / static_cast<int64_t>(sizes.size()) + 1;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (BytesOf(middle, page_size, sizes) <= num_bytes ? low : high) = middle;
  }
  return low;
}

HostSlots::HostSlots(char* memory, int64_t num_slots, int32_t page_size,
                     const std::vector<ValueSize>& sizes)
    : memory_(memory) {
  const std::vector<int64_t> slot_bytes = SlotBytesOf(page_size, sizes);
  for (size_t g = 0; g < sizes.size(); ++g) {
    const auto first = static_cast<int32_t>(slots_.size());
    const auto count = static_cast<int32_t>(NumSlotsOf(sizes[g], num_slots));
    slots_.resize(slots_.size() + static_cast<size_t>(count));
    Group group{PageValueLayout(static_cast<int32_t>(g), page_size, sizes[g].bytes),
                first,
                count,
                num_bytes_,
                slot_bytes[g],
                CachedPages(count),
                {},
                {}};
    size_t num_buckets = 1;
    while (num_buckets < static_cast<size_t>(count)) num_buckets *= 2;
    group.buckets.assign(num_buckets, kNone);
    for (int32_t i = 0; i < count; ++i) {
      group.free.push_back(first + count - 1 - i);
      slots_[first + i].group = static_cast<int32_t>(g);
    }
    num_bytes_ += count * group.slot_bytes;
    groups_.push_back(std::move(group));
  }
}

char* HostSlots::ValueOf(int32_t slot) const {
  const Group& group = groups_[GroupOf(slot)];
  return memory_ + group.offset + (slot - group.first_slot) * group.slot_bytes;
}

int32_t* HostSlots::BucketOf(int32_t group, const PageKey& key) {
  uint64_t hash;  // keys are digests: any part of them is a hash
  std::memcpy(&hash, key.data(), sizeof(hash));
  std::vector<int32_t>& buckets = groups_[group].buckets;
  return &buckets[hash & (buckets.size() - 1)];
}

int32_t HostSlots::Find(int32_t group, const PageKey& key) const {
  int32_t slot = *const_cast<HostSlots*>(this)->BucketOf(group, key);
  while (slot != kNone && slots_[slot].key != key) slot = slots_[slot].next;
  return slot;
}

int32_t HostSlots::Reserve(int32_t group) {
  Group& of = groups_[group];
  int32_t slot;
  if (!of.free.empty()) {
    slot = of.free.back();
  } else if (of.unused.size() > 0) {
    slot = of.first_slot + of.unused.first();
    Forget(slot);
    ++num_evicted_;
  } else {
    return kNone;
  }
  of.free.pop_back();
  slots_[slot].state = State::kReserved;
  return slot;
}

void HostSlots::Free(int32_t slot) {
  slots_[slot].state = State::kFree;
  slots_[slot].is_from_store = false;
  groups_[GroupOf(slot)].free.push_back(slot);  // within its capacity
}

void HostSlots::Release(int32_t slot) {
  ++slots_[slot].generation;
  Free(slot);
}

HostSlots::Slot* HostSlots::ParentOf(const Slot& slot) {
  if (slot.parent == kNone) return nullptr;
  Slot& parent = slots_[slot.parent];
  return parent.generation == slot.parent_generation ? &parent : nullptr;
}

void HostSlots::Attach(int32_t slot) {
  const Slot& attached = slots_[slot];
  Group& group = groups_[attached.group];
  if (attached.num_children == 0) {
    group.unused.Insert(slot - group.first_slot, attached.priority);
  }
  Slot* parent = ParentOf(attached);
  if (parent == nullptr) return;
  parent->is_used = false;
  const bool was_unused = IsUnused(attached.parent);
  ++parent->num_children;
  if (was_unused) group.unused.Remove(attached.parent - group.first_slot);
}

void HostSlots::Detach(int32_t slot, bool is_in_use) {
  const Slot& detached = slots_[slot];
  Group& group = groups_[detached.group];
  if (detached.num_children == 0) group.unused.Remove(slot - group.first_slot);
  Slot* parent = ParentOf(detached);
  if (parent == nullptr) return;
  --parent->num_children;
  if (!IsUnused(detached.parent)) return;
  // Unless it was used since, it was last used with the child that is evicted: it goes next.
  const int32_t index = detached.parent - group.first_slot;
  is_in_use || parent->is_used ? group.unused.Insert(index, parent->priority)
                               : group.unused.InsertOldest(index, parent->priority);
  parent->is_used = false;
}

void HostSlots::Publish(int32_t slot, const PageKey& key, const PageKey& parent, bool is_from_store,
                        uint8_t priority) {
  Slot& published = slots_[slot];
  published.parent = Find(published.group, parent);
  if (published.parent != kNone) published.parent_generation = Generation(published.parent);
  published.num_children = 0;
  published.is_used = false;
  published.priority = priority;
  int32_t* bucket = BucketOf(published.group, key);
  published.key = key;
  published.state = State::kPublished;
  published.is_from_store = is_from_store;
  published.next = std::exchange(*bucket, slot);
  Attach(slot);
  ++num_published_;
  num_published_bytes_ += LayoutOf(slot).num_bytes();
}

void HostSlots::Pin(int32_t slot) {
  if (slots_[slot].num_pins == 0) Detach(slot, /*is_in_use=*/true);
  ++slots_[slot].num_pins;
}

void HostSlots::Unpin(int32_t slot) {
  Slot& pinned = slots_[slot];
  if (--pinned.num_pins > 0) return;
  pinned.state == State::kForgotten ? Free(slot) : Attach(slot);
}

void HostSlots::Touch(int32_t slot) {
  Slot& touched = slots_[slot];
  if (Slot* parent = ParentOf(touched)) parent->is_used = false;
  touched.is_used = touched.num_children > 0;
  if (!IsUnused(slot)) return;
  Group& group = groups_[touched.group];
  group.unused.Remove(slot - group.first_slot);
  group.unused.Insert(slot - group.first_slot, touched.priority);
}

void HostSlots::SetPriority(int32_t slot, uint8_t priority) {
  slots_[slot].priority = priority;
  Group& group = groups_[GroupOf(slot)];
  if (IsUnused(slot)) group.unused.SetRank(slot - group.first_slot, priority);
}

void HostSlots::EvictEarly(int32_t slot) {
  if (!IsUnused(slot) || slots_[slot].priority > 0) return;
  Group& group = groups_[GroupOf(slot)];
  group.unused.Remove(slot - group.first_slot);
  group.unused.InsertOldest(slot - group.first_slot);
}

void HostSlots::Unlink(int32_t slot) {
  int32_t* link = BucketOf(GroupOf(slot), slots_[slot].key);
  while (*link != slot) link = &slots_[*link].next;
  *link = slots_[slot].next;
}

void HostSlots::Forget(int32_t slot) {
  Slot& old = slots_[slot];
  if (old.state != State::kPublished) return;
  Unlink(slot);
  ++old.generation;
  --num_published_;
  num_published_bytes_ -= LayoutOf(slot).num_bytes();
  if (old.num_pins > 0) {
    old.state = State::kForgotten;
    return;
  }
  Detach(slot, /*is_in_use=*/false);
  Free(slot);
}

void HostSlots::CheckIntegrity() const {
  int32_t num_published = 0;
  std::vector<int32_t> num_children(slots_.size(), 0);
  for (const Slot& slot : slots_) {
    const bool is_attached = slot.state == State::kPublished && slot.num_pins == 0;
    if (!is_attached || slot.parent == kNone) continue;
    num_children[slot.parent] += Generation(slot.parent) == slot.parent_generation;
  }
  for (const Group& group : groups_) {
    std::vector<int32_t> found(group.num_slots, 0);
    for (size_t i = 0; i < group.buckets.size(); ++i) {
      for (int32_t slot = group.buckets[i]; slot != kNone; slot = slots_[slot].next) {
        if (++found[slot - group.first_slot] > 1) {
          Raise(kRuntimeError, "host slot ", slot, " is found twice");
        }
      }
    }
    std::vector<bool> is_free(group.num_slots, false);
    for (int32_t slot : group.free) is_free[slot - group.first_slot] = true;
    const std::vector<int32_t> unused = group.unused.List();
    if (unused.size() != static_cast<size_t>(group.unused.size())) {
      Raise(kRuntimeError, "host memory counts ", group.unused.size(), " unused slots, but has ",
            unused.size());
    }
    for (int32_t i = 0; i < group.num_slots; ++i) {
      const Slot& slot = slots_[group.first_slot + i];
      const bool is_published = slot.state == State::kPublished;
      const bool may_be_pinned = is_published || slot.state == State::kForgotten;
      const bool is_unused = is_published && IsUnused(group.first_slot + i);
      if (is_published && slot.num_children != num_children[group.first_slot + i]) {
        Raise(kRuntimeError, "host slot ", group.first_slot + i, " counts ", slot.num_children,
              " children, but has ", num_children[group.first_slot + i]);
      }
      if (found[i] != is_published || is_free[i] != (slot.state == State::kFree) ||
          group.unused.Contains(i) != is_unused || slot.num_pins < 0 ||
          (slot.num_pins > 0 && !may_be_pinned)) {
        Raise(kRuntimeError, "host slot ", group.first_slot + i, " is in state ",
              static_cast<int>(slot.state), " with ", slot.num_pins, " pins, but is ",
              found[i] ? "found" : "not found", ", ", is_free[i] ? "free" : "not free", " and ",
              group.unused.Contains(i) ? "unused" : "not unused");
      }
      num_published += is_published;
      if (!is_published) continue;
      const PageValueLayout& layout = group.layout;
      const char* value = ValueOf(group.first_slot + i);
      if (!layout.HasKey(slot.key, value)) {
        Raise(kRuntimeError, "host slot ", group.first_slot + i, " has the value of another key");
      }
    }
  }
  if (num_published != num_published_) {
    Raise(kRuntimeError, "host memory counts ", num_published_, " values, but has ", num_published);
  }
}

}  // namespace pagedkv
