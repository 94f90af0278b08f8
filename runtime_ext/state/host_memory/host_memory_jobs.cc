// SPDX-License-Identifier: Apache-2.0
/*!
 * \file host_memory_jobs.cc
 * \brief The jobs of host memory: what goes to the store, and what comes from it.
 */
#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <limits>

#include "base/error.h"
#include "state/host_memory/host_memory.h"

namespace pagedkv {

namespace {

constexpr size_t kMaxLookups = 256;
constexpr size_t kMaxExists = 256;  // keys of a job
constexpr size_t kMaxValues = 64;   // values of a job
constexpr int64_t kMaxJobBytes = 32ll << 20;
constexpr double kLongest = 1e6;  // seconds

std::chrono::steady_clock::time_point After(double seconds) {
  const double bounded = std::isnan(seconds) ? 0 : std::clamp(seconds, 0.0, kLongest);
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(
             std::chrono::duration<double>(bounded));
}

}  // namespace

int64_t HostMemory::Begin(StoreLookup lookup) {
  if (!has_store_ || lookup.values.empty()) return 0;
  auto shared = std::make_shared<StoreLookup>(std::move(lookup));
  const Lock lock(mutex_);
  if (is_closed_ || lookups_.size() >= kMaxLookups) return 0;
  for (const auto& other : lookups_) {
    const bool is_same = other->keys.back() == shared->keys.back() &&
                         other->values.size() == shared->values.size() && !other->is_question &&
                         !shared->is_question;
    if (is_same) return other->ticket;
  }
  shared->ticket = ++last_id_;
  lookups_.push_back(shared);
  changed_.notify_all();
  return shared->ticket;
}

bool HostMemory::Wait(int64_t ticket, double seconds) {
  Lock lock(mutex_);
  return changed_.wait_until(lock, After(seconds), [&] {
    return std::none_of(lookups_.begin(), lookups_.end(),
                        [&](const auto& lookup) { return lookup->ticket == ticket; });
  });
}

bool HostMemory::Flush(double seconds) {
  Lock lock(mutex_);
  return changed_.wait_until(lock, After(seconds),
                             [&] { return puts_.empty() && num_puts_in_jobs_ == 0; });
}

void HostMemory::Close() noexcept {
  const Lock lock(mutex_);
  is_closed_ = true;
  for (const auto& lookup : lookups_) lookup->is_cancelled = true;
  lookups_.clear();
  changed_.notify_all();
}

std::optional<StoreJob> HostMemory::NextJob(double seconds, bool* is_closed) {
  Lock lock(mutex_);
  const auto end = After(seconds);
  for (;;) {
    std::optional<StoreJob> job = TakeJob();
    *is_closed = !job && is_closed_;
    if (job || is_closed_) return job;
    if (changed_.wait_until(lock, end) == std::cv_status::timeout) return std::nullopt;
  }
}

std::optional<StoreJob> HostMemory::TakeJob() {
  // Requests wait for lookups, so these go first; but writes must not starve.
  const bool is_put_due = num_lookup_jobs_in_a_row_ >= kMaxLookupJobsInARow;
  std::optional<StoreJob> job = is_put_due ? TakePuts() : TakeLookup();
  if (!job) job = is_put_due ? TakeLookup() : TakePuts();
  const bool has_overtaken = job && job->kind != StoreJob::Kind::kPut && !puts_.empty();
  num_lookup_jobs_in_a_row_ = has_overtaken ? num_lookup_jobs_in_a_row_ + 1 : 0;
  return job;
}

StoreJob HostMemory::Open(OpenJob open) {
  open.job.id = ++last_id_;
  StoreJob job = open.job;
  if (open.lookup != nullptr) open.lookup->is_in_job = true;
  open_jobs_.emplace(job.id, std::move(open));
  return job;
}

void HostMemory::AddSlot(int32_t slot, OpenJob* open) const {
  open->slots.push_back(slot);
  open->job.addresses.push_back(reinterpret_cast<int64_t>(slots_.ValueOf(slot)));
  open->job.sizes.push_back(slots_.LayoutOf(slot).num_bytes());
}

std::optional<StoreJob> HostMemory::TakeLookup() {
  for (size_t i = 0; i < lookups_.size();) {
    const std::shared_ptr<StoreLookup> lookup = lookups_[i];
    if (lookup->is_in_job) {
      ++i;
      continue;
    }
    OpenJob open;
    open.lookup = lookup;
    if (lookup->has_chosen) {
      open.job.kind = StoreJob::Kind::kGet;
      if (!FillGet(lookup.get(), &open)) {
        EndLookup(lookup.get());
        continue;
      }
    } else {
      open.job.kind = StoreJob::Kind::kExists;
      const size_t begin = lookup->is_there.size();
      const size_t end = std::min(begin + kMaxExists, lookup->values.size());
      for (size_t v = begin; v < end; ++v) {
        const StoreLookup::Value& value = lookup->values[v];
        open.job.keys.push_back(ValueKey(lookup->keys[value.page + 1], value.group));
      }
    }
    return Open(std::move(open));
  }
  return std::nullopt;
}

bool HostMemory::FillGet(StoreLookup* lookup, OpenJob* open) {
  int64_t num_bytes = 0;
  const size_t end = std::min(lookup->num_gotten + kMaxValues, lookup->chosen.size());
  for (size_t i = lookup->num_gotten; i < end && num_bytes < kMaxJobBytes; ++i) {
    const StoreLookup::Value& value = lookup->values[lookup->chosen[i]];
    const int32_t slot = slots_.Reserve(value.group);
    if (slot < 0) {
      ++counts_.skipped;
      break;
    }
    AddSlot(slot, open);
    open->job.keys.push_back(ValueKey(lookup->keys[value.page + 1], value.group));
    num_bytes += open->job.sizes.back();
  }
  return !open->slots.empty();
}

void HostMemory::QueuePut(int32_t slot) noexcept {
  // Values that were evicted meanwhile take no room from others; the oldest are evicted first.
  while (puts_.size() >= kMaxQueuedPuts && !IsCurrent(puts_.front())) {
    puts_.pop_front();
    ++counts_.failed_stores;
  }
  if (puts_.size() >= kMaxQueuedPuts) {
    ++counts_.dropped_stores;
    return;
  }
  try {
    puts_.push_back({slot, slots_.Generation(slot)});
    changed_.notify_all();
  } catch (const std::exception&) {
    ++counts_.failed_stores;
  }
}

std::optional<StoreJob> HostMemory::TakePuts() {
  OpenJob open;
  open.job.kind = StoreJob::Kind::kPut;
  int64_t num_bytes = 0;
  while (!puts_.empty() && open.slots.size() < kMaxValues && num_bytes < kMaxJobBytes) {
    const Put put = puts_.front();
    puts_.pop_front();
    if (!IsCurrent(put)) {
      ++counts_.failed_stores;  // it was evicted first
      continue;
    }
    slots_.Pin(put.slot);
    AddSlot(put.slot, &open);
    open.job.keys.push_back(ValueKey(slots_.KeyOf(put.slot), slots_.GroupOf(put.slot)));
    num_bytes += open.job.sizes.back();
  }
  if (open.slots.empty()) {
    changed_.notify_all();  // Flush
    return std::nullopt;
  }
  num_puts_in_jobs_ += static_cast<int64_t>(open.slots.size());
  return Open(std::move(open));
}

std::vector<std::string> HostMemory::FinishJob(int64_t id, const std::vector<bool>& results,
                                               bool are_verified) {
  Lock lock(mutex_);
  auto found = open_jobs_.find(id);
  if (found == open_jobs_.end()) Raise(kValueError, "there is no job ", id);
  if (results.size() != found->second.job.keys.size()) {
    Raise(kValueError, "job ", id, " has ", found->second.job.keys.size(), " keys, got ",
          results.size(), " results");
  }
  // Before the job is closed: what is done to its slots afterwards allocates nothing.
  const bool is_get = found->second.job.kind == StoreJob::Kind::kGet;
  const std::vector<PageText> texts = is_get ? TextsOf(found->second) : std::vector<PageText>();
  std::vector<bool> is_good = results;
  const OpenJob open = std::move(found->second);
  open_jobs_.erase(found);
  std::vector<std::string> complaints;
  switch (open.job.kind) {
    case StoreJob::Kind::kPut:
      FinishPut(open, results);
      break;
    case StoreJob::Kind::kExists:
      FinishExists(open.lookup.get(), results);
      break;
    case StoreJob::Kind::kGet:
      complaints = FinishGet(open, texts, std::move(is_good), are_verified, &lock);
      break;
  }
  changed_.notify_all();
  return complaints;
}

void HostMemory::FinishPut(const OpenJob& open, const std::vector<bool>& results) {
  num_puts_in_jobs_ -= static_cast<int64_t>(open.slots.size());
  for (size_t i = 0; i < open.slots.size(); ++i) {
    slots_.Unpin(open.slots[i]);
    ++(results[i] ? counts_.stored : counts_.failed_stores);
  }
}

void HostMemory::FinishExists(StoreLookup* lookup, const std::vector<bool>& results) {
  lookup->is_in_job = false;
  if (lookup->is_cancelled) return;
  bool has_end = false;
  for (bool is_there : results) {
    has_end = has_end || (!is_there && lookup->values[lookup->is_there.size()].is_required);
    lookup->is_there.push_back(is_there && !has_end);
  }
  if (!has_end && lookup->is_there.size() < lookup->values.size()) return;
  lookup->is_there.resize(lookup->values.size(), false);
  lookup->chosen = lookup->choose(lookup->is_there);
  lookup->has_chosen = true;
  if (lookup->chosen.empty()) EndLookup(lookup);
}

std::vector<PageText> HostMemory::TextsOf(const OpenJob& open) {
  const StoreLookup& lookup = *open.lookup;
  std::vector<PageText> texts;
  for (size_t i = 0; i < open.slots.size(); ++i) {
    texts.push_back(lookup.TextOf(lookup.values[lookup.chosen[lookup.num_gotten + i]].page));
  }
  return texts;
}

std::vector<std::string> HostMemory::FinishGet(const OpenJob& open,
                                               const std::vector<PageText>& texts,
                                               std::vector<bool> is_good, bool are_verified,
                                               Lock* lock) {
  StoreLookup* lookup = open.lookup.get();
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
    if (is_good[i] && is_new && !lookup->is_cancelled) {
      slots_.Publish(slot, texts[i].key, texts[i].parent, /*is_from_store=*/true,
                     PriorityOf(texts[i].key));
    } else {
      slots_.Release(slot);
    }
  }
  lookup->is_in_job = false;
  lookup->num_gotten += open.slots.size();
  const bool has_failed = std::find(is_good.begin(), is_good.end(), false) != is_good.end();
  const bool has_ended = has_failed || lookup->num_gotten == lookup->chosen.size();
  if (has_ended && !lookup->is_cancelled) EndLookup(lookup);
  if (num_damaged == 0) return {};
  return {std::to_string(num_damaged) + " of " + std::to_string(is_good.size()) +
          " values of the store are damaged, or of another text or format"};
}

void HostMemory::EndLookup(const StoreLookup* lookup) {
  auto is_it = [&](const auto& other) { return other.get() == lookup; };
  lookups_.erase(std::remove_if(lookups_.begin(), lookups_.end(), is_it), lookups_.end());
  changed_.notify_all();
}

}  // namespace pagedkv
