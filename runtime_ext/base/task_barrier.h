// SPDX-License-Identifier: Apache-2.0
/*!
 * \file task_barrier.h
 * \brief A barrier for the tasks of one launch.
 */
#ifndef TVM_PAGEDKV_BASE_TASK_BARRIER_H_
#define TVM_PAGEDKV_BASE_TASK_BARRIER_H_

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "base/worker_pool.h"

namespace pagedkv {

/*!
 * \brief Lets each task wait for all the others, any number of times.
 *
 * A thread claims its next task when it has finished the one before, so at a barrier tasks would
 * wait for tasks that nobody runs. The first task to arrive therefore starts a thread for each of
 * the others. That is slow, but TVM emits barriers only for loops with the pragma
 * `parallel_barrier_when_finish`, which a kernel must ask for. No kernel of this project does;
 * those of users may, and TVM's own barrier would read the data of TVM's pool.
 */
class TaskBarrier {
 public:
  /*! \param tasks At most `TaskSet::kMaxRuns`, so that a thread claims one at a time. */
  explicit TaskBarrier(TaskSet* tasks) : tasks_(tasks) {}
  TaskBarrier(const TaskBarrier&) = delete;
  TaskBarrier& operator=(const TaskBarrier&) = delete;

  /*! \brief Waits, in a task, until all others have arrived or left. */
  void Arrive();
  /*! \brief Stops the others from waiting for a task that has failed. */
  void Leave();
  /*! \brief Waits for the threads. The launch calls it when no task is unclaimed. */
  void Join();

 private:
  /*! \brief Ends the round when nobody is missing. */
  void EndRound();

  TaskSet* const tasks_;
  std::mutex mutex_;
  std::condition_variable round_ended_;
  std::vector<std::thread> threads_;
  int num_arrived_ = 0, num_left_ = 0, round_ = 0;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_BASE_TASK_BARRIER_H_
