// SPDX-License-Identifier: Apache-2.0
/*!
 * \file host_memory.cc
 * \brief Values of pages in host memory.
 */
#include "state/host_memory/host_memory.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <utility>

namespace pagedkv {

namespace {

constexpr double kLongest = 1e6;  // seconds

std::chrono::steady_clock::time_point After(double seconds) {
  const double bounded = std::isnan(seconds) ? 0 : std::clamp(seconds, 0.0, kLongest);
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(
             std::chrono::duration<double>(bounded));
}

}  // namespace

HostMemory::HostMemory(char* memory, int64_t num_slots, int32_t page_size,
                       const std::vector<ValueSize>& sizes, bool has_store)
    : has_store_(has_store),
      slots_(memory, num_slots, page_size, sizes),
      queue_(&slots_, &changed_) {}

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
  if (has_store_ && !is_closed_) queue_.QueuePut(slot);
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
  queue_.CancelLookups();
  queue_.ClearPuts();
  for (int32_t g = 0, slot = 0; g < slots_.num_groups(); ++g) {
    for (int32_t i = 0; i < slots_.num_slots(g); ++i) slots_.Forget(slot++);
  }
}

int64_t HostMemory::Begin(StoreLookup lookup) {
  if (!has_store_ || lookup.values.empty()) return 0;
  auto shared = std::make_shared<StoreLookup>(std::move(lookup));
  const Lock lock(mutex_);
  return is_closed_ ? 0 : queue_.Begin(std::move(shared));
}

bool HostMemory::Wait(int64_t ticket, double seconds) {
  Lock lock(mutex_);
  return changed_.wait_until(lock, After(seconds), [&] { return !queue_.HasLookup(ticket); });
}

bool HostMemory::Flush(double seconds) {
  Lock lock(mutex_);
  return changed_.wait_until(lock, After(seconds), [&] { return queue_.num_pending_puts() == 0; });
}

void HostMemory::Close() noexcept {
  const Lock lock(mutex_);
  is_closed_ = true;
  queue_.CancelLookups();
}

std::optional<StoreJob> HostMemory::NextJob(double seconds, bool* is_closed) {
  Lock lock(mutex_);
  const auto end = After(seconds);
  for (;;) {
    std::optional<StoreJob> job = queue_.TakeJob();
    *is_closed = !job && is_closed_;
    if (job || is_closed_) return job;
    if (changed_.wait_until(lock, end) == std::cv_status::timeout) return std::nullopt;
  }
}

std::vector<std::string> HostMemory::FinishJob(int64_t id, const std::vector<bool>& results,
                                               bool are_verified) {
  Lock lock(mutex_);
  // Before the job is closed: what is done to its slots afterwards allocates nothing.
  const std::vector<PageText> texts = queue_.JobOf(id, results.size()).Texts();
  std::vector<bool> is_good = results;
  const StoreQueue::OpenJob open = queue_.Close(id);
  std::vector<std::string> complaints;
  switch (open.job.kind) {
    case StoreJob::Kind::kPut:
      queue_.FinishPut(open, results);
      break;
    case StoreJob::Kind::kExists:
      queue_.FinishExists(open, results);
      break;
    case StoreJob::Kind::kGet:
      complaints = FinishGet(open, texts, std::move(is_good), are_verified, &lock);
      break;
  }
  changed_.notify_all();
  return complaints;
}

std::vector<std::string> HostMemory::FinishGet(const StoreQueue::OpenJob& open,
                                               const std::vector<PageText>& texts,
                                               std::vector<bool> is_good, bool are_verified,
                                               Lock* lock) {
  int64_t num_damaged = 0;
  lock->unlock();  // reserved slots are nobody else's, and checksums take time
  for (size_t i = 0; i < open.slots.size(); ++i) {
    if (!is_good[i]) continue;
    const PageValueLayout& layout = slots_.LayoutOf(open.slots[i]);
    const char* value = slots_.ValueOf(open.slots[i]);
    // Pages are not filled from a value before its checksum is verified once more.
    const bool is_whole = are_verified || layout.IsWhole(layout.ChecksumOfData(value), value);
    is_good[i] = is_whole && layout.IsOf(texts[i], value);
    num_damaged += !is_good[i];
  }
  lock->lock();
  counts_.damaged += num_damaged;
  for (size_t i = 0; i < open.slots.size(); ++i) {  // each page keeps those before it
    const int32_t slot = open.slots[i];
    counts_.failed_fetches += !is_good[i];
    counts_.fetched += is_good[i];
    const bool is_new = slots_.Find(slots_.GroupOf(slot), texts[i].key) < 0;
    if (is_good[i] && is_new && !open.lookup->is_cancelled) {
      slots_.Publish(slot, texts[i].key, texts[i].parent, /*is_from_store=*/true,
                     PriorityOf(texts[i].key));
    } else {
      slots_.Release(slot);
    }
  }
  queue_.FinishGet(open, std::find(is_good.begin(), is_good.end(), false) != is_good.end());
  if (num_damaged == 0) return {};
  return {std::to_string(num_damaged) + " of " + std::to_string(is_good.size()) +
          " values of the store are damaged, or of another text or format"};
}

HostMemory::Counts HostMemory::counts() const {
  const Lock lock(mutex_);
  const StoreQueue::Counts& queued = queue_.counts();
  Counts counts = counts_;
  counts.num_values = slots_.num_published();
  counts.num_bytes = slots_.num_published_bytes();
  counts.capacity_bytes = slots_.num_bytes();
  counts.evicted = slots_.num_evicted();
  counts.skipped += queued.skipped;
  counts.stored = queued.stored;
  counts.failed_stores = queued.failed_stores;
  counts.dropped_stores = queued.dropped_stores;
  counts.pending_stores = queue_.num_pending_puts();
  return counts;
}

void HostMemory::CheckIntegrity() const {
  const Lock lock(mutex_);
  slots_.CheckIntegrity();
  queue_.CheckIntegrity();
}

}  // namespace pagedkv
