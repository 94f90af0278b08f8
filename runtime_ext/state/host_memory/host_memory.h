// SPDX-License-Identifier: Apache-2.0
/*!
 * \file host_memory.h
 * \brief Values of pages in host memory, below the pools of pages, and the jobs that move them to a
 * store and back.
 *
 * The thread that is inside the cache puts values in and takes them out. A worker thread takes jobs
 * and reports what came of them; it touches slots of host memory only, never pages. All calls may
 * come from any thread. Those that are not about jobs never wait for a store.
 */
#ifndef TVM_PAGEDKV_STATE_HOST_MEMORY_HOST_MEMORY_H_
#define TVM_PAGEDKV_STATE_HOST_MEMORY_HOST_MEMORY_H_

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "state/host_memory/host_slots.h"
#include "state/host_memory/store_job.h"
#include "state/host_memory/store_queue.h"

namespace pagedkv {

class HostMemory {
 public:
  struct Counts {
    int64_t num_values = 0, num_bytes = 0, capacity_bytes = 0;
    int64_t saved = 0;          // values that were copied from pages
    int64_t skipped = 0;        // that found no slot
    int64_t evicted = 0;        // that made room for others
    int64_t touches = 0;        // calls of Touch
    int64_t damaged = 0;        // whose checksum or text was wrong when they were read
    int64_t stored = 0;         // that the store took
    int64_t failed_stores = 0;  // that it did not take
    int64_t fetched = 0;        // that came from the store
    int64_t failed_fetches = 0;
    int64_t dropped_stores = 0;  // that were not queued for the store: its queue was full
    int64_t pending_stores = 0;  // that wait for the store, or are on their way
  };

  /*! \param memory As for HostSlots. */
  HostMemory(char* memory, int64_t num_slots, int32_t page_size,
             const std::vector<ValueSize>& sizes, bool has_store);

  // --- values ---
  bool Has(int32_t group, const PageText& text) const;
  /*!
   * \brief Finds a value and keeps it in its slot.
   * \return The slot; -1 when there is none, or when it is not of this text.
   */
  int32_t Pin(int32_t group, const PageText& text) noexcept;
  /*!
   * \brief Whether a pinned value is whole. If it is damaged, nobody finds it any more.
   * \param data_checksum Of what was read from the slot.
   */
  bool Verify(int32_t slot, uint64_t data_checksum) noexcept;
  void Unpin(int32_t slot) noexcept;
  /*! \brief The bytes of the page, layer after layer, of a slot that is pinned or reserved. */
  char* DataOf(int32_t slot) const { return slots_.ValueOf(slot) + DataOffset(slot); }
  /*! \brief The value of a slot that is pinned or reserved, and its layout. */
  char* ValueOf(int32_t slot) const { return slots_.ValueOf(slot); }
  const PageValueLayout& LayoutOf(int32_t slot) const { return slots_.LayoutOf(slot); }
  /*! \brief The offset of DataOf in the memory of the tier. */
  int64_t DataOffset(int32_t slot) const { return slots_.LayoutOf(slot).data_offset(); }
  bool IsFromStore(int32_t slot) const { return slots_.IsFromStore(slot); }
  /*!
   * \brief Takes a slot for a new value.
   * \return -1 when there is none, or when the tier has the value.
   */
  int32_t Reserve(int32_t group, const PageKey& key) noexcept;
  /*!
   * \brief Lets others find the value whose data is in a reserved slot; the store gets it, too.
   * \param data_checksum Of the data.
   */
  void Publish(int32_t slot, const PageText& text, uint64_t data_checksum) noexcept;
  /*! \brief The same, for data whose checksum is not known. */
  void Publish(int32_t slot, const PageText& text) noexcept {
    Publish(slot, text, slots_.LayoutOf(slot).ChecksumOfData(slots_.ValueOf(slot)));
  }
  /*! \brief Gives up a reserved slot. */
  void Cancel(int32_t slot) noexcept;
  /*!
   * \brief Marks a value, and with it those of the pages before, as used just now.
   * \return Whether it is there.
   */
  bool Touch(int32_t group, const PageKey& key) noexcept;
  /*! \brief Makes room so that SetPriority cannot fail for these keys. May throw bad_alloc. */
  void ReservePriorities(const std::vector<PageKey>& keys);
  /*! \brief Evicts values of a smaller priority before this one, also if it comes later. */
  void SetPriority(const PageKey& key, uint8_t priority) noexcept;
  /*! \brief Evicts the values of a page without a priority before all others. */
  void EvictEarly(const PageKey& key) noexcept;
  /*! \brief Forgets all values in memory; lookups end. What goes to the store goes on. */
  void Clear() noexcept;

  // --- the store ---
  bool has_store() const { return has_store_; }
  int32_t num_slots(int32_t group) const { return slots_.num_slots(group); }
  /*! \brief Begins a lookup. \return Its ticket; 0 when there is nothing to wait for. */
  int64_t Begin(StoreLookup lookup);
  /*! \brief Waits for a lookup. \return Whether it has ended. */
  bool Wait(int64_t ticket, double seconds);
  /*! \brief Waits until the store has what was to be written. \return Whether it has. */
  bool Flush(double seconds);
  /*! \brief Ends lookups. Jobs that write go on until none is left, then NextJob says so. */
  void Close() noexcept;

  // --- the worker ---
  /*! \return Nothing after `seconds` without one. `*is_closed` when there will be no more. */
  std::optional<StoreJob> NextJob(double seconds, bool* is_closed);
  /*!
   * \brief Reports what came of a job: for each key whether it was there, was read or was written.
   * \param are_verified Whether the store has verified checksums of its own of what was read.
   * \return Lines about values that were damaged.
   * \throws Error (ValueError) when there is no such job, or the number of results is wrong.
   */
  std::vector<std::string> FinishJob(int64_t id, const std::vector<bool>& results,
                                     bool are_verified = false);

  Counts counts() const;
  /*! \throws Error (RuntimeError) that names the broken invariant. */
  void CheckIntegrity() const;

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct HashOfKey {  // keys are digests: any part of them is a hash
    size_t operator()(const PageKey& key) const {
      size_t hash;
      std::memcpy(&hash, key.data(), sizeof(hash));
      return hash;
    }
  };

  /*!
   * \brief Verifies and publishes the values that a get has brought.
   * \param is_good Whether each value has come; cleared where one is damaged.
   */
  std::vector<std::string> FinishGet(const StoreQueue::OpenJob& open,
                                     const std::vector<PageText>& texts, std::vector<bool> is_good,
                                     bool are_verified, Lock* lock);
  uint8_t PriorityOf(const PageKey& key) const {
    const auto found = priorities_.find(key);
    return found == priorities_.end() ? 0 : found->second;
  }

  const bool has_store_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  HostSlots slots_;
  std::unordered_map<PageKey, uint8_t, HashOfKey> priorities_;  // of pages of text that have one
  Counts counts_;                                               // without those of the queue
  StoreQueue queue_;
  bool is_closed_ = false;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_HOST_MEMORY_HOST_MEMORY_H_
