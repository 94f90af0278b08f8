// SPDX-License-Identifier: Apache-2.0
/*!
 * \file task_barrier.cc
 * \brief The rounds of a barrier, and its threads.
 */
#include "base/task_barrier.h"

namespace pagedkv {

void TaskBarrier::Arrive() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (static_cast<int>(threads_.size()) < tasks_->num_tasks() - 1) {
    threads_.emplace_back([this] { tasks_->RunFrom(0); });
  }
  const int round = round_;
  ++num_arrived_;
  EndRound();
  round_ended_.wait(lock, [&] { return round_ != round; });
}

void TaskBarrier::Leave() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++num_left_;
  EndRound();
}

void TaskBarrier::EndRound() {
  if (num_arrived_ + num_left_ < tasks_->num_tasks()) return;
  num_arrived_ = 0;
  ++round_;
  round_ended_.notify_all();
}

void TaskBarrier::Join() {
  for (std::thread& thread : threads_) thread.join();
}

}  // namespace pagedkv
