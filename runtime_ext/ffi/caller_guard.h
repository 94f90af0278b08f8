// SPDX-License-Identifier: Apache-2.0
/*!
 * \file caller_guard.h
 * \brief One thread at a time inside an object, without a lock to wait for.
 *
 * Calls through the FFI release Python's global lock, so two threads may enter a cache at once. The
 * second one is refused: to let it wait would deadlock where the first one needs Python's lock for
 * a kernel or a handler. The thread that is inside may enter again, from a handler for example.
 */
#ifndef TVM_PAGEDKV_FFI_CALLER_GUARD_H_
#define TVM_PAGEDKV_FFI_CALLER_GUARD_H_

#include <atomic>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "base/error.h"

namespace pagedkv {

class CallerGuard {
 public:
  /*! \brief Whether this thread is inside now: not so while another one is. */
  bool TryEnter() {
    const void* nobody = nullptr;
    const void* me = ThisThread();
    if (!owner_.compare_exchange_strong(nobody, me, std::memory_order_acquire) && nobody != me) {
      return false;
    }
    ++depth_;
    return true;
  }
  /*! \throws Error (RuntimeError) while another thread is inside. */
  void Enter() {
    if (TryEnter()) return;
    Raise(kRuntimeError,
          "another thread is inside this cache: a cache may be used from any thread, but by one at "
          "a time");
  }
  void Leave() noexcept {
    if (--depth_ == 0) owner_.store(nullptr, std::memory_order_release);
  }
  /*! \brief Whether the call is not made from within another one. */
  bool is_outermost() const { return depth_ == 1; }

 private:
  static const void* ThisThread() {
    static thread_local char token;
    return &token;
  }

  std::atomic<const void*> owner_{nullptr};
  int depth_ = 0;  // of the owner's calls
};

/*!
 * \brief Calls that could not be made when they came, for the next caller to make.
 *
 * Finalizers run in any thread and at any moment, also while their own thread is inside the object.
 * The lock is held for no longer than it takes to add or take a call, never while one is made.
 */
class DeferredCalls {
 public:
  using Call = std::function<void()>;

  void Add(Call call) {
    std::lock_guard<std::mutex> lock(mutex_);
    calls_.push_back(std::move(call));
    is_empty_.store(false, std::memory_order_release);
  }
  void RunAll() {
    if (is_empty_.load(std::memory_order_acquire)) return;
    std::vector<Call> calls;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      calls.swap(calls_);
      is_empty_.store(true, std::memory_order_release);
    }
    for (const Call& call : calls) call();
  }

 private:
  std::mutex mutex_;
  std::vector<Call> calls_;
  std::atomic<bool> is_empty_{true};
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_FFI_CALLER_GUARD_H_
