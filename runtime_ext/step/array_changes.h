// SPDX-License-Identifier: Apache-2.0
/*!
 * \file array_changes.h
 * \brief What becomes of the arrays of a step in the next one, for the kernel `advance_arrays`.
 *
 * On a GPU, a step that continues the last one copies the pages that sequences begin, and the
 * kernel makes all other arrays of those of the last step: the copy does not grow with the page
 * tables.
 */
#ifndef TVM_PAGEDKV_STEP_ARRAY_CHANGES_H_
#define TVM_PAGEDKV_STEP_ARRAY_CHANGES_H_

#include <cstddef>
#include <cstdint>

#include "device/aux_data.h"

namespace pagedkv {

/*! \brief The kinds of `advance_arrays`, see `tir_kernels/cuda/step_arrays.py`. */
enum class ArrayChange : int32_t { kSame, kNext, kLengths, kSlots, kIndptr, kPageIds };

/*! \brief Writes the argument `changes` of the kernel, a row for each array. */
class ArrayChanges {
 public:
  static constexpr int64_t kNumColumns = 7;
  /*! \brief Elements that a block of the kernel makes: eight of a thread. */
  static constexpr int64_t kBlockSize = 1024;

  /*!
   * \param arrays Laid out for this step, and uploaded in the last one.
   * \param out Room for a row of each array that will be added.
   */
  ArrayChanges(const AuxData& arrays, int32_t* out) : arrays_(arrays), out_(out) {}

  /*!
   * \brief Adds an array.
   * \param size Its elements in this step.
   * \param page_indptr The array of the group's page table, for kPageIds.
   */
  void Add(size_t array, int64_t size, ArrayChange change, int32_t group = 0,
           size_t page_indptr = 0) {
    const int64_t row[kNumColumns] = {static_cast<int64_t>(change),
                                      arrays_.last_offset(array),
                                      arrays_.offset(array),
                                      size,
                                      num_blocks_,
                                      group,
                                      arrays_.last_offset(page_indptr)};
    for (int64_t value : row) *out_++ = static_cast<int32_t>(value);
    num_blocks_ += (size + kBlockSize - 1) / kBlockSize;
  }
  int64_t num_blocks() const { return num_blocks_; }

 private:
  const AuxData& arrays_;
  int32_t* out_;
  int64_t num_blocks_ = 0;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STEP_ARRAY_CHANGES_H_
