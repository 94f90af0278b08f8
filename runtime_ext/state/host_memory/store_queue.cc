// SPDX-License-Identifier: Apache-2.0
/*!
 * \file store_queue.cc
 * \brief What goes from host memory to a store, and what comes from it.
 */
#include "state/host_memory/store_queue.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/error.h"

namespace pagedkv {

namespace {

constexpr size_t kMaxLookups = 256;
constexpr size_t kMaxExists = 256;  // keys of a job
constexpr size_t kMaxValues = 64;   // values of a job
constexpr int64_t kMaxJobBytes = 32ll << 20;

}  // namespace

std::vector<PageText> StoreQueue::OpenJob::Texts() const {
  std::vector<PageText> texts;
  if (job.kind != StoreJob::Kind::kGet) return texts;
  for (size_t i = 0; i < slots.size(); ++i) {
    texts.push_back(lookup->TextOf(lookup->values[lookup->chosen[lookup->num_gotten + i]].page));
  }
  return texts;
}

int64_t StoreQueue::Begin(std::shared_ptr<StoreLookup> lookup) {
  if (lookups_.size() >= kMaxLookups) return 0;
  for (const auto& other : lookups_) {
    const bool is_same = other->keys.back() == lookup->keys.back() &&
                         other->values.size() == lookup->values.size() && !other->is_question &&
                         !lookup->is_question;
    if (is_same) return other->ticket;
  }
  lookup->ticket = ++last_id_;
  lookups_.push_back(std::move(lookup));
  changed_->notify_all();
  return last_id_;
}

bool StoreQueue::HasLookup(int64_t ticket) const {
  return std::any_of(lookups_.begin(), lookups_.end(),
                     [&](const auto& lookup) { return lookup->ticket == ticket; });
}

void StoreQueue::CancelLookups() noexcept {
  for (const auto& lookup : lookups_) lookup->is_cancelled = true;
  lookups_.clear();
  changed_->notify_all();
}

void StoreQueue::ClearPuts() noexcept {
  puts_.clear();
  changed_->notify_all();
}

void StoreQueue::QueuePut(int32_t slot) noexcept {
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
    puts_.push_back({slot, slots_->Generation(slot)});
    changed_->notify_all();
  } catch (const std::exception&) {
    ++counts_.failed_stores;
  }
}

std::optional<StoreJob> StoreQueue::TakeJob() {
  // Requests wait for lookups, so these go first; but writes must not starve.
  const bool is_put_due = num_lookup_jobs_in_a_row_ >= kMaxLookupJobsInARow;
  std::optional<StoreJob> job = is_put_due ? TakePuts() : TakeLookup();
  if (!job) job = is_put_due ? TakeLookup() : TakePuts();
  const bool has_overtaken = job && job->kind != StoreJob::Kind::kPut && !puts_.empty();
  num_lookup_jobs_in_a_row_ = has_overtaken ? num_lookup_jobs_in_a_row_ + 1 : 0;
  return job;
}

std::optional<StoreJob> StoreQueue::TakeLookup() {
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

bool StoreQueue::FillGet(StoreLookup* lookup, OpenJob* open) {
  int64_t num_bytes = 0;
  const size_t end = std::min(lookup->num_gotten + kMaxValues, lookup->chosen.size());
  for (size_t i = lookup->num_gotten; i < end && num_bytes < kMaxJobBytes; ++i) {
    const StoreLookup::Value& value = lookup->values[lookup->chosen[i]];
    const int32_t slot = slots_->Reserve(value.group);
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

std::optional<StoreJob> StoreQueue::TakePuts() {
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
    slots_->Pin(put.slot);
    AddSlot(put.slot, &open);
    open.job.keys.push_back(ValueKey(slots_->KeyOf(put.slot), slots_->GroupOf(put.slot)));
    num_bytes += open.job.sizes.back();
  }
  if (open.slots.empty()) {
    changed_->notify_all();  // Flush
    return std::nullopt;
  }
  num_puts_in_jobs_ += static_cast<int64_t>(open.slots.size());
  return Open(std::move(open));
}

StoreJob StoreQueue::Open(OpenJob open) {
  open.job.id = ++last_id_;
  StoreJob job = open.job;
  if (open.lookup != nullptr) open.lookup->is_in_job = true;
  open_jobs_.emplace(job.id, std::move(open));
  return job;
}

void StoreQueue::AddSlot(int32_t slot, OpenJob* open) const {
  open->slots.push_back(slot);
  open->job.addresses.push_back(reinterpret_cast<int64_t>(slots_->ValueOf(slot)));
  open->job.sizes.push_back(slots_->LayoutOf(slot).num_bytes());
}

const StoreQueue::OpenJob& StoreQueue::JobOf(int64_t id, size_t num_results) const {
  const auto found = open_jobs_.find(id);
  if (found == open_jobs_.end()) Raise(kValueError, "there is no job ", id);
  const size_t num_keys = found->second.job.keys.size();
  if (num_results != num_keys) {
    Raise(kValueError, "job ", id, " has ", num_keys, " keys, got ", num_results, " results");
  }
  return found->second;
}

StoreQueue::OpenJob StoreQueue::Close(int64_t id) noexcept {
  const auto found = open_jobs_.find(id);
  OpenJob open = std::move(found->second);
  open_jobs_.erase(found);
  return open;
}

void StoreQueue::FinishPut(const OpenJob& open, const std::vector<bool>& results) {
  num_puts_in_jobs_ -= static_cast<int64_t>(open.slots.size());
  for (size_t i = 0; i < open.slots.size(); ++i) {
    slots_->Unpin(open.slots[i]);
    ++(results[i] ? counts_.stored : counts_.failed_stores);
  }
}

void StoreQueue::FinishExists(const OpenJob& open, const std::vector<bool>& results) {
  StoreLookup* lookup = open.lookup.get();
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

void StoreQueue::FinishGet(const OpenJob& open, bool has_failed) {
  StoreLookup* lookup = open.lookup.get();
  lookup->is_in_job = false;
  lookup->num_gotten += open.slots.size();
  const bool has_ended = has_failed || lookup->num_gotten == lookup->chosen.size();
  if (has_ended && !lookup->is_cancelled) EndLookup(lookup);
}

void StoreQueue::EndLookup(const StoreLookup* lookup) {
  auto is_it = [&](const auto& other) { return other.get() == lookup; };
  lookups_.erase(std::remove_if(lookups_.begin(), lookups_.end(), is_it), lookups_.end());
  changed_->notify_all();
}

void StoreQueue::CheckIntegrity() const {
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
