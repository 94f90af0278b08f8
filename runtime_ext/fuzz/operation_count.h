// SPDX-License-Identifier: Apache-2.0
/*!
 * \file operation_count.h
 * \brief Counts the operations that a fuzz target has decoded, and prints them when it ends.
 */
#ifndef TVM_PAGEDKV_FUZZ_OPERATION_COUNT_H_
#define TVM_PAGEDKV_FUZZ_OPERATION_COUNT_H_

#include <cstdint>
#include <cstdio>

namespace pagedkv {

/*! \brief An object of static storage, so that it prints under any driver. */
class OperationCount {
 public:
  ~OperationCount() {
    std::printf("%lld operations, of which %lld were refused\n", static_cast<long long>(num_all_),
                static_cast<long long>(num_refused_));
  }
  void Add(bool was_done) {
    ++num_all_;
    num_refused_ += was_done ? 0 : 1;
  }

 private:
  int64_t num_all_ = 0, num_refused_ = 0;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_FUZZ_OPERATION_COUNT_H_
