// SPDX-License-Identifier: Apache-2.0
/*!
 * \file tier_fixture.h
 * \brief Host memory below pages whose content is numbers, and a store that fails now and then.
 */
#ifndef TVM_PAGEDKV_TESTS_TIER_FIXTURE_H_
#define TVM_PAGEDKV_TESTS_TIER_FIXTURE_H_

#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "state/host_memory/host_memory.h"
#include "state/prefix_cache/prefix_cache.h"

namespace pagedkv {

struct TierSetup {
  int64_t num_slots = 0;  // of each group; 0: no tier
  TierPolicy policy;
  bool has_store = false;
  bool has_faults = false;
};

class TestTier final : public PageSaver {
 public:
  /*! \param slots [group][slot] the content of the pools. */
  TestTier(const TierSetup& setup, int32_t page_size, std::vector<std::vector<uint32_t>>* slots,
           std::mt19937_64* engine)
      : setup_(setup),
        page_size_(page_size),
        slots_(slots),
        engine_(engine),
        page_bytes_(slots->size(), page_size * static_cast<int64_t>(sizeof(uint32_t))),
        memory_(HostSlots::BytesOf(setup.num_slots, page_size, page_bytes_) + 64),
        tier_(Aligned(memory_.data()), setup.num_slots, page_size, page_bytes_, setup.has_store) {}

  HostMemory* tier() { return &tier_; }

  void Save(const std::vector<PageSave>& saves) noexcept override {
    for (const auto& [group, page, text] : saves) {
      const int32_t slot = tier_.Reserve(group, text.key);
      if (slot < 0) continue;
      if (setup_.has_faults && Below(16) == 0) {
        tier_.Cancel(slot);
        continue;
      }
      std::memcpy(tier_.DataOf(slot), (*slots_)[group].data() + page * page_size_,
                  page_bytes_[group].bytes);
      tier_.Publish(slot, text);
    }
  }
  bool Load(const std::vector<PageLoad>& loads) {
    bool is_whole = true;
    for (const PageLoad& load : loads) {
      const uint64_t checksum = tier_.LayoutOf(load.slot).ChecksumOfData(tier_.ValueOf(load.slot));
      is_whole = tier_.Verify(load.slot, checksum) && is_whole;
      std::memcpy((*slots_)[load.group].data() + load.page * page_size_, tier_.DataOf(load.slot),
                  page_bytes_[load.group].bytes);
    }
    return is_whole;
  }
  /*! \brief Damages a byte of the memory, values and headers alike. */
  void Damage() {
    char* begin = Aligned(memory_.data());
    begin[Below(memory_.size() - 64)] ^= static_cast<char>(1 << Below(8));
  }
  /*! \brief Does some jobs, as a worker would. */
  void Work(int count) {
    for (bool is_closed = false; count > 0; --count) {
      const std::optional<StoreJob> job = tier_.NextJob(0, &is_closed);
      if (!job) return;
      std::vector<bool> results;
      for (size_t i = 0; i < job->keys.size(); ++i) results.push_back(Do(*job, i));
      num_damaged += static_cast<int64_t>(tier_.FinishJob(job->id, results).size());
    }
  }

  int64_t num_damaged = 0;

 private:
  static char* Aligned(char* memory) {
    return memory + (64 - reinterpret_cast<uintptr_t>(memory) % 64) % 64;
  }
  uint64_t Below(uint64_t limit) { return (*engine_)() % limit; }

  bool Do(const StoreJob& job, size_t i) {
    const bool fails = setup_.has_faults && Below(10) == 0;
    auto found = store_.find(job.keys[i]);
    if (job.kind == StoreJob::Kind::kExists) return found != store_.end() || fails;
    auto* address = reinterpret_cast<char*>(job.addresses[i]);
    const auto size = static_cast<size_t>(job.sizes[i]);
    if (job.kind == StoreJob::Kind::kPut) {
      if (fails) return false;
      std::string value(address, size);
      if (setup_.has_faults && Below(10) == 0) value[Below(size)] ^= 1;
      if (setup_.has_faults && Below(20) == 0 && !store_.empty()) value = store_.begin()->second;
      store_[job.keys[i]] = value;
      return true;
    }
    if (found == store_.end() || found->second.size() != size) return false;
    std::memcpy(address, found->second.data(), fails ? size / 2 : size);  // torn, or lost
    if (setup_.has_faults && Below(20) == 0) store_.erase(found);
    return !fails || Below(2);
  }

  TierSetup setup_;
  int32_t page_size_;
  std::vector<std::vector<uint32_t>>* slots_;
  std::mt19937_64* engine_;
  std::vector<ValueSize> page_bytes_;  // [group]
  std::vector<char> memory_;
  HostMemory tier_;
  std::map<PageKey, std::string> store_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_TESTS_TIER_FIXTURE_H_
