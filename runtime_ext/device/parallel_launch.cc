// SPDX-License-Identifier: Apache-2.0
/*!
 * \file parallel_launch.cc
 * \brief Errors of tasks, the number of threads, and the pool of the process.
 */
#include "device/parallel_launch.h"

#include <sched.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>

#include "base/process.h"
#include "base/task_barrier.h"
#include "base/worker_pool.h"

namespace pagedkv {

namespace ffi = tvm::ffi;

namespace {

/*! \brief The CPUs that the calling thread may use. */
int NumCPUs() {
  cpu_set_t cpus;
  if (sched_getaffinity(0, sizeof(cpus), &cpus) == 0) return CPU_COUNT(&cpus);
  return std::max<int>(1, std::thread::hardware_concurrency());
}

int DefaultNumThreads() {
  for (const char* name : {"TVM_NUM_THREADS", "OMP_NUM_THREADS"}) {
    const char* value = std::getenv(name);
    if (value != nullptr && std::atoi(value) > 0) return std::atoi(value);
  }
  return NumCPUs();
}

/*! \brief The threads of kernels; in a forked child, which has none of its parent's, new ones. */
struct Threads {
  static Threads& OfProcess() {
    Threads* threads = current.load(std::memory_order_acquire);
    if (threads != nullptr && threads->process.IsThis()) return *threads;
    // No lock: the thread that held it when the process forked is not in the child.
    auto* fresh = new Threads(threads != nullptr ? threads->num_threads.load() : 0);
    if (current.compare_exchange_strong(threads, fresh)) return *fresh;
    delete fresh;  // another thread was faster
    return *threads;
  }

  explicit Threads(int count) { Set(count > 0 ? count : DefaultNumThreads()); }

  /*! \brief More workers than CPUs would only take time from each other. */
  void Set(int count) {
    num_threads.store(count);
    num_workers.store(std::min(count, NumCPUs()) - 1);
  }

  // Never deleted: at exit workers may be in tasks, and a child's copy of a parent's threads is not
  // to be touched. The process ends without them.
  static inline std::atomic<Threads*> current{nullptr};

  OwnProcess process;
  std::atomic<int> num_threads, num_workers;
  WorkerPool pool;
};

/*! \brief A launch: what its tasks call, and where they meet. */
class Group {
 public:
  Group(FTVMParallelLambda function, void* data, int num_task)
      : function_(function),
        data_(data),
        env_{this, num_task},
        tasks_(
            num_task, [](void* group, int task) { static_cast<Group*>(group)->Run(task); }, this) {}

  /*! \return 0, or -1 with the error of the first task that failed raised. */
  int Launch(Threads* threads) {
    threads->pool.Launch(&tasks_, threads->num_workers.load(std::memory_order_relaxed));
    barrier_.Join();
    if (error_ == nullptr) return 0;
    TVMFFIErrorSetRaised(error_);
    TVMFFIObjectDecRef(error_);
    return -1;
  }

  void Arrive() { barrier_.Arrive(); }

 private:
  void Run(int task) {
    if (function_(task, &env_, data_) == 0) return;
    barrier_.Leave();
    TVMFFIObjectHandle error = nullptr;
    TVMFFIErrorMoveFromRaised(&error);  // each thread has its own
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_ == nullptr || task < failed_) {
      std::swap(error, error_);
      failed_ = task;
    }
    if (error != nullptr) TVMFFIObjectDecRef(error);
  }

  FTVMParallelLambda const function_;
  void* const data_;
  TVMParallelGroupEnv env_;
  TaskSet tasks_;
  TaskBarrier barrier_{&tasks_};
  std::mutex mutex_;
  TVMFFIObjectHandle error_ = nullptr;  // of task failed_
  int failed_ = 0;
};

/*! \brief `runtime.config_threadpool`: TVM's pool, which other libraries may use, and this one. */
void Configure(const ffi::Function& tvm_configure, ffi::PackedArgs args, ffi::Any* result) {
  tvm_configure.CallPacked(args, result);
  int count = args[1].cast<int>();
  if (count == 0 && args.size() > 2) count = args[2].cast<ffi::Array<ffi::String>>().size();
  if (count > 0) Threads::OfProcess().Set(count);
}

}  // namespace

int ParallelLaunch(FTVMParallelLambda function, void* data, int num_task) {
  Threads& threads = Threads::OfProcess();
  if (num_task == 0) num_task = std::min(threads.num_threads.load(), TaskSet::kMaxRuns);
  return Group(function, data, num_task).Launch(&threads);
}

int ParallelBarrier(int, TVMParallelGroupEnv* env) {
  static_cast<Group*>(env->sync_handle)->Arrive();
  return 0;
}

void ServeParallelLaunches() {
  // What is registered last counts for a library that is loaded.
  TVM_FFI_CHECK_SAFE_CALL(TVMFFIEnvModRegisterContextSymbol(
      "__TVMBackendParallelLaunch", reinterpret_cast<void*>(ParallelLaunch)));
  TVM_FFI_CHECK_SAFE_CALL(TVMFFIEnvModRegisterContextSymbol(
      "__TVMBackendParallelBarrier", reinterpret_cast<void*>(ParallelBarrier)));
  auto define = [](const char* name, const ffi::Function& function) {
    ffi::Function::SetGlobal(name, function, /*override=*/true);
  };
  // Kernels ask for it, and TVM's own would start TVM's pool.
  define("runtime.NumThreads",
         ffi::Function::FromTyped([] { return int64_t{Threads::OfProcess().num_threads.load()}; }));
  define("pagedkv.set_num_threads",
         ffi::Function::FromTyped([](int count) { Threads::OfProcess().Set(count); }));
  if (auto tvm_configure = ffi::Function::GetGlobal("runtime.config_threadpool")) {
    define("runtime.config_threadpool",
           ffi::Function::FromPacked(
               [function = *tvm_configure](ffi::PackedArgs args, ffi::Any* result) {
                 Configure(function, args, result);
               }));
  }
}

}  // namespace pagedkv
