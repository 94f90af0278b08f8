// SPDX-License-Identifier: Apache-2.0
/*!
 * \file worker_limit_test.cc
 * \brief How many workers are invited, by a clock of the test's own.
 */
#include "base/worker_limit.h"

#include <cstdint>

#include "check.h"

namespace pagedkv::worker_limit_test {

namespace {

constexpr int64_t kMicrosecond = 1000, kMillisecond = 1000 * kMicrosecond;

/*! \brief Launches of 50 us of work on a machine whose workers need `wait_ns` longer. */
struct Machine {
  /*! \return The share of the time that workers were invited, over `num_ms`. */
  double Run(int wanted, int64_t num_ms) {
    int64_t invited = 0, total = 0;
    for (const int64_t end = now + num_ms * kMillisecond; now < end;) {
      const int count = limit.Get(wanted, now);
      const bool is_stalled = count > num_free;
      const int64_t wait = is_stalled ? stall_ns : 0, work = 50 * kMicrosecond;
      now += work + wait;
      if (count > 0) limit.Report(count, comes ? count : 0, work, wait, now);
      total += work + wait;
      invited += is_stalled ? work + wait : 0;
      last = count;
    }
    return static_cast<double>(invited) / total;
  }

  WorkerLimit limit;
  int64_t now = 1000 * kMillisecond, stall_ns = 4 * kMillisecond;
  int num_free = 0;   // workers that have a CPU of their own
  bool comes = true;  // or workers never begin
  int last = 0;       // workers that were invited last
};

TEST_CASE("worker limit: all are invited while they come in time") {
  Machine machine;
  machine.num_free = 63;
  CHECK(machine.Run(63, 100) == 0);
  CHECK(machine.last == 63);
}

TEST_CASE("worker limit: stalls cost a few per cent of the time") {
  Machine machine;
  machine.Run(1, 1000);
  CHECK(machine.Run(1, 10000) < 0.04);
}

TEST_CASE("worker limit: workers that never come are invited rarely") {
  Machine machine;
  machine.comes = false;
  machine.stall_ns = 0;
  machine.Run(1, 1000);
  CHECK(machine.Run(1, 10000) < 0.02);
}

TEST_CASE("worker limit: those that have a CPU go on") {
  Machine machine;
  machine.num_free = 40;
  machine.Run(63, 2000);
  const double stalled = machine.Run(63, 5000);
  CHECK(stalled < 0.05);
  CHECK(machine.last >= 38);
}

TEST_CASE("worker limit: all come back when the load has ended") {
  Machine machine;
  machine.Run(63, 5000);
  CHECK(machine.last <= 1);
  machine.num_free = 63;
  machine.Run(63, 3000);
  CHECK(machine.last == 63);
}

TEST_CASE("worker limit: a single stall costs little") {
  WorkerLimit limit;
  limit.Report(1, 1, 50 * kMicrosecond, 4 * kMillisecond, 100 * kMillisecond);
  CHECK(limit.Get(1, 100 * kMillisecond) == 0);
  CHECK(limit.Get(1, 110 * kMillisecond) == 1);
}

TEST_CASE("worker limit: tasks of different sizes are no stalls") {
  WorkerLimit limit;
  for (int i = 0; i < 1000; ++i) {
    limit.Report(1, 1, 5 * kMillisecond, 9 * kMillisecond, i * 14 * kMillisecond);
  }
  CHECK(limit.Get(1, 0) == 1);
}

}  // namespace

}  // namespace pagedkv::worker_limit_test
