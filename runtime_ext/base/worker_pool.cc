// SPDX-License-Identifier: Apache-2.0
/*!
 * \file worker_pool.cc
 * \brief The claims of tasks, and how workers and callers wait.
 */
#include "base/worker_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <system_error>
#include <thread>

namespace pagedkv {

namespace {

using std::chrono::steady_clock;

// Workers stay awake between the kernels of a step and between steps, but not between requests.
constexpr int64_t kWorkerSpinNs = 500 * 1000;
// A worker that takes longer may have lost its CPU. It gets one sooner if the caller sleeps.
constexpr int64_t kCallerSpinNs = 50 * 1000;

thread_local bool is_in_task = false;

int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             steady_clock::now().time_since_epoch())
      .count();
}

/*! \brief Lets the other thread of a core run for a moment. */
void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

/*! \brief Waits briefly. \return Whether `is_done` holds. */
template <typename Condition>
bool Spin(int64_t max_ns, const Condition& is_done) {
  constexpr int kPauses = 32;
  const int64_t end = Now() + max_ns;
  do {
    for (int i = 0; i < kPauses; ++i) {
      if (is_done()) return true;
      Pause();
    }
    sched_yield();  // gives up the CPU where another thread waits for it
  } while (Now() < end);
  return is_done();
}

}  // namespace

TaskSet::TaskSet(int num_tasks, Run run, void* context)
    : num_tasks_(num_tasks),
      run_length_((num_tasks + kMaxRuns - 1) / kMaxRuns),
      num_runs_(num_tasks > 0 ? (num_tasks + run_length_ - 1) / run_length_ : 0),
      run_(run),
      context_(context) {}

int TaskSet::Claim(int first) {
  const int num_words = (num_runs_ + kBits - 1) / kBits;
  for (int i = 0; i < num_words; ++i) {
    const int word = (first / kBits + i) % num_words;
    const int num_bits = std::min(kBits, num_runs_ - word * kBits);
    const uint64_t all = ~uint64_t{0} >> (kBits - num_bits);
    const uint64_t later = i == 0 ? ~uint64_t{0} << (first % kBits) : ~uint64_t{0};
    uint64_t unclaimed = ~claimed_[word].load(std::memory_order_relaxed) & all;
    while (unclaimed != 0) {
      const uint64_t preferred = unclaimed & later;
      const int bit = __builtin_ctzll(preferred != 0 ? preferred : unclaimed);
      const uint64_t mask = uint64_t{1} << bit;
      const uint64_t before = claimed_[word].fetch_or(mask, std::memory_order_relaxed);
      if ((before & mask) == 0) return word * kBits + bit;
      unclaimed = ~before & all;
    }
  }
  return -1;
}

bool TaskSet::RunFrom(int first) {
  bool has_run = false;
  const bool was_in_task = is_in_task;
  is_in_task = true;
  for (int run = Claim(first); run >= 0; run = Claim(run)) {
    has_run = true;
    const int end = std::min(num_tasks_, (run + 1) * run_length_);
    for (int task = run * run_length_; task < end; ++task) run_(context_, task);
  }
  is_in_task = was_in_task;
  return has_run;
}

/*! \brief A thread, and the launch that has invited it. */
struct alignas(64) WorkerPool::Worker {
  explicit Worker(int index) : index(index) {}

  /*! \brief The main function of the thread. */
  void Work() {
    while (!must_end.load(std::memory_order_relaxed)) {
      TaskSet* const tasks = Accept();
      if (tasks == nullptr) continue;
      has_come.store(tasks->RunFrom(index), std::memory_order_relaxed);
      invitation.store(kNone, std::memory_order_seq_cst);
      if (num_awaiting.load(std::memory_order_seq_cst) > 0) Notify();
    }
  }

  /*! \brief Invites a worker that nobody else has invited. */
  bool Invite(const TaskSet* tasks) {
    uintptr_t none = kNone;
    if (!invitation.compare_exchange_strong(none, ValueOf(tasks), std::memory_order_seq_cst)) {
      return false;
    }
    if (is_asleep.load(std::memory_order_seq_cst)) Notify();
    return true;
  }
  /*! \return Whether the worker had not accepted, and will not. */
  bool Withdraw(const TaskSet* tasks) {
    uintptr_t value = ValueOf(tasks);
    return invitation.compare_exchange_strong(value, kNone, std::memory_order_relaxed);
  }
  /*! \brief Waits until a worker that has accepted has left. */
  void Await(const TaskSet* tasks) {
    const uintptr_t accepted = ValueOf(tasks) | kAccepted;
    auto has_left = [&] { return invitation.load(std::memory_order_seq_cst) != accepted; };
    if (Spin(kCallerSpinNs, has_left)) return;
    std::unique_lock<std::mutex> lock(mutex);
    num_awaiting.fetch_add(1, std::memory_order_seq_cst);
    changed.wait(lock, has_left);
    num_awaiting.fetch_sub(1, std::memory_order_relaxed);
  }
  void Notify() {
    {
      std::lock_guard<std::mutex> lock(mutex);
    }
    changed.notify_all();
  }

  static constexpr uintptr_t kNone = 0, kAccepted = 1;

  static uintptr_t ValueOf(const TaskSet* tasks) { return reinterpret_cast<uintptr_t>(tasks); }

  /*! \brief Waits for an invitation. \return Its tasks; null if it was withdrawn or the pool ends.
   */
  TaskSet* Accept() {
    auto has_changed = [&] {
      return invitation.load(std::memory_order_seq_cst) != kNone ||
             must_end.load(std::memory_order_relaxed);
    };
    if (!Spin(kWorkerSpinNs, has_changed)) {
      std::unique_lock<std::mutex> lock(mutex);
      is_asleep.store(true, std::memory_order_seq_cst);
      changed.wait(lock, has_changed);
      is_asleep.store(false, std::memory_order_relaxed);
    }
    uintptr_t value = invitation.load(std::memory_order_relaxed);
    if (value == kNone ||
        !invitation.compare_exchange_strong(value, value | kAccepted, std::memory_order_acquire)) {
      return nullptr;
    }
    return reinterpret_cast<TaskSet*>(value);
  }

  const int index;                           // the task that it prefers
  std::atomic<uintptr_t> invitation{kNone};  // a TaskSet, with kAccepted if the worker is in it
  std::atomic<bool> has_come{false};         // whether it ran a task of the last launch
  std::atomic<bool> is_asleep{false}, must_end{false};
  std::atomic<int> num_awaiting{0};  // callers that sleep until the worker has left
  std::mutex mutex;
  std::condition_variable changed;
  std::thread thread;
};

WorkerPool::~WorkerPool() {
  for (int i = 0; i < num_workers_; ++i) {
    workers_[i]->must_end.store(true);
    workers_[i]->Notify();
  }
  for (int i = 0; i < num_workers_; ++i) {
    workers_[i]->thread.join();
    delete workers_[i];
  }
}

int WorkerPool::Start(int count) {
  if (num_workers_.load(std::memory_order_acquire) < count) {
    std::lock_guard<std::mutex> lock(starting_);
    StartLocked(std::min(count, most_workers_));
  }
  return std::min(count, num_workers_.load(std::memory_order_acquire));
}

void WorkerPool::StartLocked(int count) {
  // Signals are for the threads of the program.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (int i = num_workers_; i < count; ++i) {
    Worker* worker = nullptr;
    try {
      worker = new Worker(i + 1);
      worker->thread = std::thread([worker] { worker->Work(); });
    } catch (const std::exception&) {  // launches do without it
      delete worker;
      most_workers_ = i;
      break;
    }
    workers_[i] = worker;
    num_workers_.store(i + 1, std::memory_order_release);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void WorkerPool::Launch(TaskSet* tasks, int num_workers) {
  const int64_t begin = Now();
  int count = std::min(num_workers, tasks->num_tasks() - 1);
  if (!is_in_task && count > 0) count = limit_.Get(count, begin);
  if (is_in_task || count <= 0) {
    tasks->RunFrom(0);
    return;
  }
  count = Start(count);
  std::array<bool, kMaxWorkers> is_invited;
  int num_invited = 0;
  for (int i = 0; i < count; ++i) {
    is_invited[i] = workers_[i]->Invite(tasks);
    num_invited += is_invited[i];
  }
  tasks->RunFrom(0);
  const int64_t end_of_work = Now();
  int num_came = 0;
  for (int i = 0; i < count; ++i) is_invited[i] = is_invited[i] && !workers_[i]->Withdraw(tasks);
  for (int i = 0; i < count; ++i) {
    if (!is_invited[i]) continue;
    workers_[i]->Await(tasks);
    num_came += workers_[i]->has_come.load(std::memory_order_relaxed);
  }
  const int64_t end = num_came > 0 ? Now() : end_of_work;
  if (num_invited > 0) {
    limit_.Report(num_invited, num_came, end_of_work - begin, end - end_of_work, end);
  }
}

}  // namespace pagedkv
