// SPDX-License-Identifier: Apache-2.0
/*!
 * \file caller_guard.h
 * \brief One thread at a time inside an object, without a lock to wait for.
 *
 * Calls through the FFI release Python's global interpreter lock, so two threads may enter a cache
 * at once. The second one is refused: if it waited, it would deadlock when the first one needs the
 * interpreter lock for a kernel or a handler. The thread inside may enter again, for example from a
 * handler. A thread that waits for something outside of the object steps outside meanwhile.
 */
#ifndef TVM_PAGEDKV_BASE_CALLER_GUARD_H_
#define TVM_PAGEDKV_BASE_CALLER_GUARD_H_

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"

namespace pagedkv {

class CallerGuard {
 public:
  /*! \brief Enters unless another thread is inside. \return Whether this thread is inside now. */
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
  /*! \brief Whether this is not a nested call. */
  bool is_outermost() const { return depth_ == 1; }

  /*!
   * \brief Lets other threads inside while this one waits, unless its call is a nested one.
   *
   * The object may be another one afterwards: check again whatever was checked before. The thread
   * that steps outside must hold no lock that a call of another thread needs, such as Python's.
   */
  class Outside {
   public:
    explicit Outside(CallerGuard* guard) : guard_(guard->is_outermost() ? guard : nullptr) {
      if (guard_ != nullptr) guard_->Leave();
    }
    /*! \brief Waits until the thread that is inside now has left. */
    ~Outside() {
      while (guard_ != nullptr && !guard_->TryEnter()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    Outside(const Outside&) = delete;
    Outside& operator=(const Outside&) = delete;

   private:
    CallerGuard* guard_;
  };

 private:
  static const void* ThisThread() {
    static thread_local char token;
    return &token;
  }

  std::atomic<const void*> owner_{nullptr};
  int depth_ = 0;  // of the owner's calls
};

/*!
 * \brief A queue of calls that could not run at once; the next caller runs them.
 *
 * Finalizers run in any thread at any moment, even while their own thread is inside the object. The
 * lock is only held to add or take calls, never while one runs.
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

#endif  // TVM_PAGEDKV_BASE_CALLER_GUARD_H_
