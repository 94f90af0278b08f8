// SPDX-License-Identifier: Apache-2.0
/*!
 * \file store_queue.h
 * \brief What goes from host memory to a store, and what comes from it.
 *
 *     QueuePut --> puts ------TakeJob--> put -----FinishPut--> done
 *
 *     Begin -----> lookups ---TakeJob--> exists --FinishExists--.
 *                    ^                                          |  which values are useful
 *                    |------------------------------------------'
 *                    '--------TakeJob--> get -----FinishGet----> done, or the next values
 *
 * A worker has taken the jobs that are open. It is told the keys, and addresses of slots: those of
 * a get are reserved, those of a put are pinned.
 *
 * No call is safe against other threads: HostMemory makes them under its lock.
 */
#ifndef TVM_PAGEDKV_STATE_HOST_MEMORY_STORE_QUEUE_H_
#define TVM_PAGEDKV_STATE_HOST_MEMORY_STORE_QUEUE_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "state/host_memory/host_slots.h"
#include "state/host_memory/store_job.h"

namespace pagedkv {

class StoreQueue {
 public:
  struct Counts {
    int64_t stored = 0;          // values that the store took
    int64_t failed_stores = 0;   // that it did not take, or that were evicted first
    int64_t dropped_stores = 0;  // that were not queued: the queue was full
    int64_t skipped = 0;         // that a lookup found no slot for
  };
  struct OpenJob {
    /*! \brief The texts of the values of a get, in order. May throw std::bad_alloc. */
    std::vector<PageText> Texts() const;

    StoreJob job;
    std::vector<int32_t> slots;
    std::shared_ptr<StoreLookup> lookup;  // null for puts
  };

  /*! \brief Jobs of lookups in a row while a value waits to be written; then comes a write. */
  static constexpr int32_t kMaxLookupJobsInARow = 4;
  /*! \brief Values that wait to be written. At this bound, new values stay in memory only. */
  static constexpr size_t kMaxQueuedPuts = 1 << 14;

  /*!
   * \brief Both must outlive this.
   * \param changed Is notified when there may be a job, and when a lookup or all puts have ended.
   */
  StoreQueue(HostSlots* slots, std::condition_variable* changed)
      : slots_(slots), changed_(changed) {}

  /*! \brief Queues a published value for the store, or counts it as dropped. */
  void QueuePut(int32_t slot) noexcept;
  void ClearPuts() noexcept;
  /*! \brief Values that wait for the store, or are on their way. */
  int64_t num_pending_puts() const {
    return static_cast<int64_t>(puts_.size()) + num_puts_in_jobs_;
  }
  /*! \brief Begins a lookup. \return Its ticket, or that of one like it; 0: there are too many. */
  int64_t Begin(std::shared_ptr<StoreLookup> lookup);
  /*! \brief Whether a lookup is going on. */
  bool HasLookup(int64_t ticket) const;
  /*! \brief Ends all lookups; jobs of them that are open bring nothing. */
  void CancelLookups() noexcept;

  /*! \brief Opens the next job, if there is any. */
  std::optional<StoreJob> TakeJob();
  /*!
   * \brief Returns an open job.
   * \throws Error (ValueError) when there is none, or it has another number of keys.
   */
  const OpenJob& JobOf(int64_t id, size_t num_results) const;
  /*! \brief Closes an open job, which is then finished by one of the calls below. */
  OpenJob Close(int64_t id) noexcept;
  void FinishPut(const OpenJob& open, const std::vector<bool>& results);
  void FinishExists(const OpenJob& open, const std::vector<bool>& results);
  /*! \brief After the slots were published or released. */
  void FinishGet(const OpenJob& open, bool has_failed);

  const Counts& counts() const { return counts_; }
  /*! \throws Error (RuntimeError) that names the broken invariant. */
  void CheckIntegrity() const;

 private:
  struct Put {
    int32_t slot;
    uint64_t generation;
  };

  bool IsCurrent(const Put& put) const {
    return slots_->IsPublished(put.slot) && slots_->Generation(put.slot) == put.generation;
  }
  std::optional<StoreJob> TakeLookup();
  std::optional<StoreJob> TakePuts();
  bool FillGet(StoreLookup* lookup, OpenJob* open);
  StoreJob Open(OpenJob open);
  void AddSlot(int32_t slot, OpenJob* open) const;
  void EndLookup(const StoreLookup* lookup);

  HostSlots* slots_;
  std::condition_variable* changed_;
  Counts counts_;
  std::deque<Put> puts_;
  std::deque<std::shared_ptr<StoreLookup>> lookups_;
  std::map<int64_t, OpenJob> open_jobs_;
  int64_t num_puts_in_jobs_ = 0;
  int32_t num_lookup_jobs_in_a_row_ = 0;  // while a put waited
  int64_t last_id_ = 0;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_HOST_MEMORY_STORE_QUEUE_H_
