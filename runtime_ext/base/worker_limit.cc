// SPDX-License-Identifier: Apache-2.0
/*!
 * \file worker_limit.cc
 * \brief The balance of what workers save and cost.
 */
#include "base/worker_limit.h"

#include <algorithm>

namespace pagedkv {

int WorkerLimit::Get(int wanted, int64_t now) {
  const int limit = limit_.load(std::memory_order_relaxed);
  if (limit >= wanted) return wanted;
  int64_t next = next_attempt_.load(std::memory_order_relaxed);
  const int64_t after = now + pause_.load(std::memory_order_relaxed);
  // One of several threads makes the attempt.
  if (now < next || !next_attempt_.compare_exchange_strong(next, after)) return limit;
  const int step = step_.load(std::memory_order_relaxed);
  const int raised = wanted - limit <= step ? kNoLimit : limit + step;
  step_.store(std::min(2 * step, 1 << 20), std::memory_order_relaxed);
  balance_.store(kFirstBalance, std::memory_order_relaxed);
  limit_.store(raised, std::memory_order_relaxed);
  return std::min(raised, wanted);
}

void WorkerLimit::Report(int num_invited, int num_came, int64_t work_ns, int64_t wait_ns,
                         int64_t now) {
  // Who has not come keeps a CPU busy that the caller or others could use. Tasks of different
  // sizes are no sign of a busy machine, so waiting as long as working is free.
  const int64_t change =
      num_came > 0 ? work_ns - std::max<int64_t>(0, wait_ns - work_ns) : -work_ns / 4;
  const int64_t balance = balance_.load(std::memory_order_relaxed) + change;
  balance_.store(std::min(balance, kMaxBalance), std::memory_order_relaxed);
  if (balance < 0) Lower(num_invited - 1, now);
}

void WorkerLimit::Lower(int limit, int64_t now) {
  const int64_t before = pause_.load(std::memory_order_relaxed);
  const bool is_repeated = now - lowered_at_.load(std::memory_order_relaxed) < 4 * before;
  const int64_t pause = is_repeated ? std::min(4 * before, kMaxPause) : kMinPause;
  limit_.store(limit, std::memory_order_relaxed);
  step_.store(1, std::memory_order_relaxed);
  balance_.store(kMaxBalance, std::memory_order_relaxed);
  pause_.store(pause, std::memory_order_relaxed);
  lowered_at_.store(now, std::memory_order_relaxed);
  next_attempt_.store(now + pause, std::memory_order_relaxed);
}

}  // namespace pagedkv
