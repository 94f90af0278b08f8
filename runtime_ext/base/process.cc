// SPDX-License-Identifier: Apache-2.0
/*!
 * \file process.cc
 * \brief Counts the forks of this process.
 */
#include "base/process.h"

#include <pthread.h>

#include <atomic>

#include "base/error.h"

namespace pagedkv {

namespace {

std::atomic<int64_t> num_forks{0};

[[maybe_unused]] const int is_counting =
    pthread_atfork(nullptr, nullptr, [] { num_forks.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

int64_t NumForks() { return num_forks.load(std::memory_order_relaxed); }

void OwnProcess::Require(const char* what) const {
  if (IsThis()) return;
  Raise(kRuntimeError, "this ", what,
        " was made before a fork of its process: the threads and the memory that it needs are not "
        "in the child; make one after the fork, or start processes by 'spawn'");
}

}  // namespace pagedkv
