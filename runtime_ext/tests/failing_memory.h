// SPDX-License-Identifier: Apache-2.0
/*!
 * \file failing_memory.h
 * \brief Lets one allocation of a call fail, to see that the call has changed nothing then.
 */
#ifndef TVM_PAGEDKV_TESTS_FAILING_MEMORY_H_
#define TVM_PAGEDKV_TESTS_FAILING_MEMORY_H_

#include <cstdint>
#include <new>

namespace pagedkv {

/*! \brief Allocations of this thread until operator new throws std::bad_alloc once; -1: never. */
extern thread_local int64_t allocations_until_failure;

/*! \return Whether `call` succeeded; false when its allocation number `index` failed. */
template <typename F>
bool SucceedsWithoutAllocation(int64_t index, F call) {
  allocations_until_failure = index;
  bool succeeds = true;
  try {
    call();
  } catch (const std::bad_alloc&) {
    succeeds = false;
  }
  allocations_until_failure = -1;
  return succeeds;
}

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_TESTS_FAILING_MEMORY_H_
