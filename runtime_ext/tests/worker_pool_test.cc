// SPDX-License-Identifier: Apache-2.0
/*!
 * \file worker_pool_test.cc
 * \brief Every task runs once, whichever threads come.
 */
#include "base/worker_pool.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"

namespace pagedkv::worker_pool_test {

namespace {

using Body = std::function<void(int)>;

void Launch(WorkerPool* pool, int num_tasks, int num_workers, const Body& body) {
  TaskSet tasks(
      num_tasks, [](void* data, int task) { (*static_cast<const Body*>(data))(task); },
      const_cast<Body*>(&body));
  pool->Launch(&tasks, num_workers);
}

/*! \brief Launches tasks that count themselves, and checks that each has run once. */
void CheckOnce(WorkerPool* pool, int num_tasks, int num_workers) {
  std::vector<std::atomic<int>> counts(num_tasks);
  Launch(pool, num_tasks, num_workers, [&](int task) { ++counts[task]; });
  for (int task = 0; task < num_tasks; ++task) CHECK(counts[task] == 1);
}

TEST_CASE("worker pool: every task runs once") {
  WorkerPool pool;
  for (int num_workers : {0, 1, 3}) {
    for (int num_tasks : {0, 1, 2, 3, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, 5000}) {
      CheckOnce(&pool, num_tasks, num_workers);
    }
  }
}

TEST_CASE("worker pool: a task set begins with the task that its thread prefers") {
  for (int num_tasks : {5, 64, 130}) {
    for (int first : {0, 1, 4}) {
      std::vector<int> order;
      TaskSet tasks(
          num_tasks,
          [](void* data, int task) { static_cast<std::vector<int>*>(data)->push_back(task); },
          &order);
      CHECK(tasks.RunFrom(first));
      CHECK(static_cast<int>(order.size()) == num_tasks);
      CHECK(order[0] == first);
      CHECK(!tasks.RunFrom(first));
    }
  }
}

TEST_CASE("worker pool: tasks run at the same time on workers, awake or asleep") {
  WorkerPool pool;
  for (int round = 0; round < 3; ++round) {
    std::atomic<int> num_inside{0};
    Launch(&pool, 3, 2, [&](int) {
      ++num_inside;
      while (num_inside < 3) std::this_thread::yield();
    });
    CHECK(num_inside == 3);
    std::this_thread::sleep_for(std::chrono::milliseconds(4 * round));
  }
}

TEST_CASE("worker pool: the caller sleeps while a worker is in a long task, and is woken") {
  WorkerPool pool;
  std::atomic<int> num_inside{0};
  const std::thread::id caller = std::this_thread::get_id();
  Launch(&pool, 2, 1, [&](int) {
    ++num_inside;
    while (num_inside < 2) std::this_thread::yield();
    if (std::this_thread::get_id() == caller) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ++num_inside;
  });
  CHECK(num_inside == 3);
}

TEST_CASE("worker pool: several threads launch at once") {
  WorkerPool pool;
  std::vector<std::thread> callers;
  std::atomic<int64_t> total{0};
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int round = 0; round < 2000; ++round) {
        std::vector<int> own(5, 0);  // each written by one thread
        Launch(&pool, 5, 3, [&](int task) { own[task] = task + 1; });
        for (int value : own) total += value;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(total == 4 * 2000 * 15);
}

TEST_CASE("worker pool: a task that launches runs the tasks itself") {
  WorkerPool pool;
  std::atomic<int> num_run{0}, num_elsewhere{0};
  Launch(&pool, 3, 2, [&](int) {
    const std::thread::id here = std::this_thread::get_id();
    Launch(&pool, 4, 2, [&](int) {
      ++num_run;
      if (std::this_thread::get_id() != here) ++num_elsewhere;
    });
  });
  CHECK(num_run == 12);
  CHECK(num_elsewhere == 0);
}

TEST_CASE("worker pool: it ends while its workers spin or sleep, and without any") {
  WorkerPool without;
  for (int pause_ms : {0, 5}) {
    auto pool = std::make_unique<WorkerPool>();
    CheckOnce(pool.get(), 2, 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
  }
}

}  // namespace

}  // namespace pagedkv::worker_pool_test
