// SPDX-License-Identifier: Apache-2.0
/*!
 * \file host_memory.cc
 * \brief Values of pages in host memory.
 */
#include "state/host_memory/host_memory.h"

#include "base/error.h"

namespace pagedkv {

HostMemory::HostMemory(char* memory, int64_t num_slots, int32_t page_size,
                       const std::vector<ValueSize>& sizes, bool has_store)
    : has_store_(has_store), slots_(memory, num_slots, page_size, sizes) {}

bool HostMemory::Has(int32_t group, const PageText& text) const {
  const Lock lock(mutex_);
  const int32_t slot = slots_.Find(group, text.key);
  return slot >= 0 && slots_.LayoutOf(slot).IsOf(text, slots_.ValueOf(slot));
}

int32_t HostMemory::Pin(int32_t group, const PageText& text) noexcept {
  const Lock lock(mutex_);
  const int32_t slot = slots_.Find(group, text.key);
  if (slot < 0) return -1;
  slots_.Touch(slot);
  slots_.Pin(slot);
  if (slots_.LayoutOf(slot).IsOf(text, slots_.ValueOf(slot))) return slot;
  ++counts_.damaged;
  slots_.Forget(slot);
  slots_.Unpin(slot);
  return -1;
}

bool HostMemory::Verify(int32_t slot, uint64_t data_checksum) noexcept {
  // A pinned value stays as it is.
  if (slots_.LayoutOf(slot).IsWhole(data_checksum, slots_.ValueOf(slot))) return true;
  const Lock lock(mutex_);
  ++counts_.damaged;
  slots_.Forget(slot);
  return false;
}

void HostMemory::Unpin(int32_t slot) noexcept {
  const Lock lock(mutex_);
  slots_.Unpin(slot);
}

int32_t HostMemory::Reserve(int32_t group, const PageKey& key) noexcept {
  const Lock lock(mutex_);
  const int32_t there = slots_.Find(group, key);
  if (there >= 0) {
    if (slots_.IsUnused(there)) slots_.Touch(there);  // else its children keep it
    return -1;
  }
  const int32_t slot = slots_.Reserve(group);
  counts_.skipped += slot < 0;
  return slot;
}

void HostMemory::Publish(int32_t slot, const PageText& text, uint64_t data_checksum) noexcept {
  slots_.LayoutOf(slot).Seal(text, data_checksum, slots_.ValueOf(slot));
  const Lock lock(mutex_);
  if (slots_.Find(slots_.GroupOf(slot), text.key) >= 0) {  // a lookup brought it meanwhile
    return slots_.Release(slot);
  }
  slots_.Publish(slot, text.key, text.parent, /*is_from_store=*/false, PriorityOf(text.key));
  ++counts_.saved;
  if (has_store_ && !is_closed_) QueuePut(slot);
}

void HostMemory::Cancel(int32_t slot) noexcept {
  const Lock lock(mutex_);
  slots_.Release(slot);
}

bool HostMemory::Touch(int32_t group, const PageKey& key) noexcept {
  const Lock lock(mutex_);
  ++counts_.touches;
  const int32_t slot = slots_.Find(group, key);
  if (slot >= 0) slots_.Touch(slot);
  return slot >= 0;
}

void HostMemory::ReservePriorities(const std::vector<PageKey>& keys) {
  const Lock lock(mutex_);
  for (const PageKey& key : keys) priorities_.emplace(key, 0);  // what is left over does no harm
}

void HostMemory::SetPriority(const PageKey& key, uint8_t priority) noexcept {
  const Lock lock(mutex_);
  const auto found = priorities_.find(key);
  if (found == priorities_.end()) return;
  found->second = priority;
  if (priority == 0) priorities_.erase(found);
  for (int32_t g = 0; g < slots_.num_groups(); ++g) {
    const int32_t slot = slots_.Find(g, key);
    if (slot >= 0) slots_.SetPriority(slot, priority);
  }
}

void HostMemory::EvictEarly(const PageKey& key) noexcept {
  const Lock lock(mutex_);
  for (int32_t g = 0; g < slots_.num_groups(); ++g) {
    const int32_t slot = slots_.Find(g, key);
    if (slot >= 0) slots_.EvictEarly(slot);
  }
}

void HostMemory::Clear() noexcept {
  const Lock lock(mutex_);
  for (const auto& lookup : lookups_) lookup->is_cancelled = true;
  lookups_.clear();
  puts_.clear();
  for (int32_t g = 0, slot = 0; g < slots_.num_groups(); ++g) {
    for (int32_t i = 0; i < slots_.num_slots(g); ++i) slots_.Forget(slot++);
  }
  changed_.notify_all();
}

HostMemory::Counts HostMemory::counts() const {
  const Lock lock(mutex_);
  Counts counts = counts_;
  counts.num_values = slots_.num_published();
  counts.num_bytes = slots_.num_published_bytes();
  counts.capacity_bytes = slots_.num_bytes();
  counts.evicted = slots_.num_evicted();
  counts.pending_stores = static_cast<int64_t>(puts_.size()) + num_puts_in_jobs_;
  return counts;
}

void HostMemory::CheckIntegrity() const {
  const Lock lock(mutex_);
  slots_.CheckIntegrity();
  int64_t num_puts = 0;
  for (const auto& [id, open] : open_jobs_) {
    for (int32_t slot : open.slots) {
      if (slot < 0) Raise(kRuntimeError, "job ", id, " has a slot that is none");
    }
    if (open.job.kind == StoreJob::Kind::kPut) num_puts += static_cast<int64_t>(open.slots.size());
  }
  if (num_puts != num_puts_in_jobs_) {
    Raise(kRuntimeError, "host memory counts ", num_puts_in_jobs_, " values in jobs that write, ",
          "but has ", num_puts);
  }
}

}  // namespace pagedkv
