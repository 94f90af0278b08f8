// SPDX-License-Identifier: Apache-2.0
/*!
 * \file worker_limit.h
 * \brief How many workers a launch invites: fewer while other processes take their CPUs.
 */
#ifndef TVM_PAGEDKV_BASE_WORKER_LIMIT_H_
#define TVM_PAGEDKV_BASE_WORKER_LIMIT_H_

#include <atomic>
#include <cstdint>

namespace pagedkv {

/*!
 * \brief Lowers the number of workers when they cost more time than they save.
 *
 * This is congestion control. The balance is the time that workers have saved less what they have
 * cost. When it is negative the limit falls, and rises again after a while: by one worker, then by
 * two, by four, as long as they are worth it. Where they are not, the next attempt comes later, so
 * that attempts cost a few per cent of the time.
 *
 * Several threads may use it. It only decides who runs tasks, so it needs no order between them.
 */
class WorkerLimit {
 public:
  /*! \return How many workers to invite of `wanted`. \param now Nanoseconds of a steady clock. */
  int Get(int wanted, int64_t now);
  /*!
   * \brief Learns what a launch with workers was like.
   * \param num_invited The workers that were invited.
   * \param num_came Those that ran tasks.
   * \param work_ns The time that the caller ran tasks.
   * \param wait_ns The time that it waited for workers afterwards.
   * \param now When it ended.
   */
  void Report(int num_invited, int num_came, int64_t work_ns, int64_t wait_ns, int64_t now);

 private:
  static constexpr int64_t kMillisecond = 1000 * 1000;
  static constexpr int64_t kMaxBalance = kMillisecond, kFirstBalance = kMillisecond / 4;
  static constexpr int64_t kMinPause = 4 * kMillisecond, kMaxPause = 128 * kMillisecond;
  static constexpr int kNoLimit = 1 << 30;

  void Lower(int limit, int64_t now);

  std::atomic<int> limit_{kNoLimit};
  std::atomic<int> step_{1};  // by which the limit rises next
  std::atomic<int64_t> balance_{kMaxBalance};
  std::atomic<int64_t> pause_{kMinPause};  // between attempts
  std::atomic<int64_t> lowered_at_{INT64_MIN / 2}, next_attempt_{0};
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_BASE_WORKER_LIMIT_H_
