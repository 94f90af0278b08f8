// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_table.h
 * \brief Page tables and shared segments as kernels take them; B is the number of sequences of the
 * step.
 */
#ifndef TVM_PAGEDKV_STEP_PAGE_TABLE_H_
#define TVM_PAGEDKV_STEP_PAGE_TABLE_H_

#include <tvm/ffi/container/tensor.h>

#include <cstddef>
#include <cstdint>

#include "device/aux_data.h"
#include "state/plans/forward_plan.h"

namespace pagedkv {

/*! \brief The page table of a layer group, as a kernel takes it. */
struct PageTable {
  PageRange range;
  const ffi::Tensor& indptr;    // [B + 1]
  const ffi::Tensor& page_ids;  // [indptr[B]]
  /*!
   * \brief Slots in use on the last page of each sequence, [B]. When a sequence has a window,
   * followed by the three rows of PlanArrays::FillWindows: [4 * B].
   */
  const ffi::Tensor& lengths;
  /*! \brief The tree nodes that each node sees, [num_tree_nodes, 2]; empty without a tree mask. */
  const ffi::Tensor& tree_order;
  const AuxData* arrays;
  size_t lengths_array;

  /*! \brief The first rows of `lengths` as a matrix [num_rows, B]: stock kernels take that. */
  ffi::Tensor LengthMatrix(int64_t num_rows, int64_t num_sequences) const {
    return arrays->Matrix(lengths_array, num_rows, num_sequences);
  }
};

/*! \brief Arrays of the shared segments of a group. S is the number of segments. */
enum class SegmentArray : int {
  kPageIndptr,      // [S + 1]
  kPageIds,         // [indptr[S]]
  kFirstPositions,  // [S]
  kRowIndptr,       // [S + 1]
  kRows,            // rows of the step that attend to each segment
  kNumArrays,
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STEP_PAGE_TABLE_H_
