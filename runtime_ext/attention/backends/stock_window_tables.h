// SPDX-License-Identifier: Apache-2.0
/*!
 * \file stock_window_tables.h
 * \brief Cuts a step into chunks that the stock cache's window kernels serve exactly.
 *
 * Those kernels know the window that they were built for, and do not take the argument of ours:
 *   - decode_sliding lets a row see all that length_info leaves of its pages;
 *   - prefill_sliding takes pages that hold the past alone, of which row r of a sequence sees the
 *     last `window - r - 1` positions. What the rows see of each other comes from prefill_ragged,
 *     which knows no window, and is merged.
 * So a step is cut into chunks of at most `window - 1` rows, and each is a sequence of its own for
 * the kernels: no row then sees too much of its chunk, and all see some of the past before it.
 */
#ifndef TVM_PAGEDKV_ATTENTION_BACKENDS_STOCK_WINDOW_TABLES_H_
#define TVM_PAGEDKV_ATTENTION_BACKENDS_STOCK_WINDOW_TABLES_H_

#include <tvm/ffi/container/tensor.h>

#include <memory>
#include <vector>

#include "device/aux_data.h"
#include "step/step.h"

namespace pagedkv {

/*! \brief The chunks of a layer group in a step; C is their number. */
struct ChunkTable {
  int64_t step = 0;  // for which it was made
  bool has_pages = false;
  std::unique_ptr<AuxData> arrays;
  ffi::Tensor length_info;  // [3, C]: last page length, first slot of the window, sinks

  enum Array { kRowIndptr, kPageIndptr, kPageIds, kLengthInfo, kFirstSeen, kPastLengths, kNum };
  const ffi::Tensor& row_indptr() const { return arrays->view(kRowIndptr); }      // [C + 1]
  const ffi::Tensor& page_indptr() const { return arrays->view(kPageIndptr); }    // [C + 1]
  const ffi::Tensor& page_ids() const { return arrays->view(kPageIds); }          // [indptr[C]]
  const ffi::Tensor& first_seen() const { return arrays->view(kFirstSeen); }      // [C]
  const ffi::Tensor& past_lengths() const { return arrays->view(kPastLengths); }  // [C]
};

/*! \brief The chunk tables of all groups, and scratch that layers share. */
class StockWindowTables {
 public:
  explicit StockWindowTables(const Step& step);
  static bool IsNeededBy(const CacheConfig& config);

  /*! \brief Chunks with the window of each row, this step's rows included. */
  const ChunkTable& WithStep(int32_t group);
  /*! \brief Chunks with what the window of each row has of the past. */
  const ChunkTable& Past(int32_t group);

  const ffi::Tensor& o_workspace() const { return o_workspace_; }      // bytes
  const ffi::Tensor& lse_workspace() const { return lse_workspace_; }  // bytes

 private:
  /*! \brief Some rows of a sequence, and the positions that the kernels find in its pages. */
  struct Chunk {
    const Sequence* sequence;
    int64_t num_rows;
    int64_t begin, end;
  };

  std::vector<Chunk> Cut(int64_t window) const;
  std::vector<Chunk> CutForPast(int64_t window) const;
  void Make(ChunkTable* table, int32_t group, const std::vector<Chunk>& chunks) const;

  const Step& step_;
  std::vector<ChunkTable> with_step_, past_;  // [group]
  ffi::Tensor o_workspace_, lse_workspace_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_ATTENTION_BACKENDS_STOCK_WINDOW_TABLES_H_
