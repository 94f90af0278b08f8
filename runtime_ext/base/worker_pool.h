// SPDX-License-Identifier: Apache-2.0
/*!
 * \file worker_pool.h
 * \brief Threads that share the tasks of a kernel, and do not make the caller wait for them.
 *
 * A launch invites workers and begins at once. Every thread claims one task after another, so a
 * worker that does not come, because it sleeps or the system runs other threads, costs nothing: the
 * caller does its tasks. The caller only waits for workers that have begun.
 *
 * A worker may lose its CPU in the middle of a task, and then costs milliseconds. Workers give up
 * the CPU between tasks, where nobody waits for them, and WorkerLimit invites fewer of them while
 * the machine is busy.
 */
#ifndef TVM_PAGEDKV_BASE_WORKER_POOL_H_
#define TVM_PAGEDKV_BASE_WORKER_POOL_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "base/worker_limit.h"

namespace pagedkv {

/*! \brief Tasks 0 to `num_tasks - 1`, which threads claim, each of them once. */
class TaskSet {
 public:
  using Run = void (*)(void* context, int task);

  /*! \brief Where there are more tasks, threads claim several at once. */
  static constexpr int kMaxRuns = 1024;

  TaskSet(int num_tasks, Run run, void* context);
  TaskSet(const TaskSet&) = delete;
  TaskSet& operator=(const TaskSet&) = delete;

  int num_tasks() const { return num_tasks_; }
  /*!
   * \brief Runs tasks until all are claimed.
   * \param first The task to begin with: the same one in every launch, whose data this thread's
   * caches may hold.
   * \return Whether it has run any.
   */
  bool RunFrom(int first);

 private:
  static constexpr int kBits = 64, kWords = kMaxRuns / kBits;

  /*! \return A run of tasks that nobody has claimed, `first` if possible; -1 if there is none. */
  int Claim(int first);

  const int num_tasks_;
  const int run_length_;  // tasks that are claimed at once; 1 unless there are very many
  const int num_runs_;
  const Run run_;
  void* const context_;
  std::array<std::atomic<uint64_t>, kWords> claimed_{};
};

/*! \brief Workers, which are started when they are needed first. Any thread may launch. */
class WorkerPool {
 public:
  WorkerPool() = default;
  /*! \brief Ends the workers. Nobody may launch. */
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  /*!
   * \brief Runs all tasks, on this thread and at most `num_workers` workers, and waits for them.
   *
   * A task that launches runs the tasks of that launch itself.
   */
  void Launch(TaskSet* tasks, int num_workers);

 private:
  struct Worker;
  static constexpr int kMaxWorkers = TaskSet::kMaxRuns - 1;  // more would find no task

  /*! \brief Starts workers. \return How many there are, at most `count`. */
  int Start(int count);
  void StartLocked(int count);

  WorkerLimit limit_;
  std::mutex starting_;
  std::atomic<int> num_workers_{0};
  int most_workers_ = kMaxWorkers;  // fewer where the system refuses to start more
  std::array<Worker*, kMaxWorkers> workers_{};
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_BASE_WORKER_POOL_H_
