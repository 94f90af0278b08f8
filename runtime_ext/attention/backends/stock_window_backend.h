// SPDX-License-Identifier: Apache-2.0
/*!
 * \file stock_window_backend.h
 * \brief A layer with a window over kernels of the stock cache: see stock_window_tables.h.
 */
#ifndef TVM_PAGEDKV_ATTENTION_BACKENDS_STOCK_WINDOW_BACKEND_H_
#define TVM_PAGEDKV_ATTENTION_BACKENDS_STOCK_WINDOW_BACKEND_H_

#include "attention/backends/paged_backend.h"

namespace pagedkv {

/*! \brief Steps with a tree mask are those of PagedBackend: the tree kernels take the window. */
class StockWindowBackend : public PagedBackend {
 public:
  StockWindowBackend(Step* step, const StoredLayer& layer, const SharedBackendState& shared);

  void Append(const ffi::Tensor& qkv) override { SplitAndAppend(qkv); }
  void Attend(const AttentionCall& call, const ffi::Tensor& k, const ffi::Tensor& v) override;
  void AttendToPast(const AttentionCall& call) override;

 private:
  /*! \brief The rows of each chunk attend to each other. */
  void AttendWithinChunks(const AttentionCall& call, const ChunkTable& chunks, const ffi::Tensor& k,
                          const ffi::Tensor& v) const;
  void AttendToChunkPages(const AttentionCall& call, const ChunkTable& chunks) const;

  StockWindowTables* tables_;
  StepView o_, lse_;  // partial state over the pages
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_ATTENTION_BACKENDS_STOCK_WINDOW_BACKEND_H_
