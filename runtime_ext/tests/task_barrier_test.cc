// SPDX-License-Identifier: Apache-2.0
/*!
 * \file task_barrier_test.cc
 * \brief No task passes a barrier before all others have arrived or left.
 */
#include "base/task_barrier.h"

#include <atomic>
#include <memory>
#include <vector>

#include "check.h"

namespace pagedkv::task_barrier_test {

namespace {

constexpr int kNumRounds = 3;

/*! \brief A launch whose tasks write a value, meet, and read those of all the others. */
struct Loop {
  explicit Loop(int num_tasks, int failing = -1)
      : failing(failing), values(num_tasks, 0), tasks(num_tasks, &Loop::Run, this) {}

  static void Run(void* context, int task) {
    Loop& loop = *static_cast<Loop*>(context);
    if (task == loop.failing) return loop.barrier.Leave();
    for (int round = 1; round <= kNumRounds; ++round) {
      loop.values[task] = round;  // not atomic: the barrier orders it
      loop.barrier.Arrive();
      for (int other = 0; other < loop.tasks.num_tasks(); ++other) {
        if (loop.values[other] != (other == loop.failing ? 0 : round)) ++loop.num_wrong;
      }
      loop.barrier.Arrive();
    }
    ++loop.num_done;
  }

  void Launch(WorkerPool* pool, int num_workers) {
    pool->Launch(&tasks, num_workers);
    barrier.Join();
  }

  const int failing;
  std::vector<int> values;
  std::atomic<int> num_wrong{0}, num_done{0};
  TaskSet tasks;
  TaskBarrier barrier{&tasks};
};

TEST_CASE("task barrier: every task waits for all others, with and without workers") {
  WorkerPool pool;
  for (int num_workers : {0, 1, 3}) {
    for (int num_tasks : {1, 2, 5, 65, 300}) {
      Loop loop(num_tasks);
      loop.Launch(&pool, num_workers);
      CHECK(loop.num_wrong == 0);
      CHECK(loop.num_done == num_tasks);
    }
  }
}

TEST_CASE("task barrier: nobody waits for a task that has failed") {
  WorkerPool pool;
  for (int failing : {0, 1, 4}) {
    Loop loop(5, failing);
    loop.Launch(&pool, 1);
    CHECK(loop.num_wrong == 0);
    CHECK(loop.num_done == 4);
  }
}

}  // namespace

}  // namespace pagedkv::task_barrier_test
