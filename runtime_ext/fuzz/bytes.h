// SPDX-License-Identifier: Apache-2.0
/*!
 * \file bytes.h
 * \brief Decodes decisions from the input of a fuzz target, and reports failures.
 */
#ifndef TVM_PAGEDKV_FUZZ_BYTES_H_
#define TVM_PAGEDKV_FUZZ_BYTES_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace pagedkv {

/*! \brief Ends the process, so that the driver keeps the input. */
#define FUZZ_CHECK(condition)                                                            \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)

/*! \brief Numbers from an input; zeros behind its end. */
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  bool empty() const { return size_ == 0; }
  uint8_t Next() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }
  /*! \brief A number in [low, high], a range of at most 256. */
  int64_t Between(int64_t low, int64_t high) { return low + Next() % (high - low + 1); }
  /*! \brief Mostly a number in [low, high], else one around it or at an end of int64. */
  int64_t Around(int64_t low, int64_t high) {
    switch (Next()) {
      case 0:
        return INT64_MIN;
      case 1:
        return INT64_MAX;
      case 2:
        return low - 1;
      case 3:
        return high + 1;
      case 4:
        return (int64_t{1} << 32) + low;
      default:
        return Between(low, high);
    }
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_FUZZ_BYTES_H_
