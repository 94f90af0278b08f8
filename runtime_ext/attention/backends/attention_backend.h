// SPDX-License-Identifier: Apache-2.0
/*!
 * \file attention_backend.h
 * \brief Append and attention of a layer with K and V. Chosen when the cache is created.
 *
 *     PagedBackend              kernels of this project: one pass over the pages
 *       StockBackend            kernels of the stock cache: sequences with a window take two passes
 *         FlashInferBackend     FlashInfer's functions where the set has them
 *       StockWindowBackend      layers with a window over kernels of the stock cache
 *
 * A kernel set may mix kernels of all kinds, so each backend asks its base where it has none.
 */
#ifndef TVM_PAGEDKV_ATTENTION_BACKENDS_ATTENTION_BACKEND_H_
#define TVM_PAGEDKV_ATTENTION_BACKENDS_ATTENTION_BACKEND_H_

#include <tvm/ffi/container/tensor.h>

#include <memory>

#include "attention/attention_call.h"
#include "attention/backends/flashinfer.h"
#include "attention/backends/stock_window_tables.h"
#include "step/step.h"

namespace pagedkv {

class AttentionBackend {
 public:
  virtual ~AttentionBackend() = default;

  /*! \brief Alignment of the tensors that Append, Attend and AttendToPast need in this step. */
  virtual Alignment page_alignment() const = 0;
  /*! \brief Alignment of the tensors that AttendToRows needs in this step. */
  virtual Alignment row_alignment() const = 0;
  /*! \throws Error (ValueError) when the kernel for AttendToRows is missing. */
  virtual void RequireRowKernel() const = 0;

  /*!
   * \brief Splits and rotates qkv, writes K and V to the pages, and Q to the group's workspace.
   * \param qkv [T, num_qo_heads + 2 * num_kv_heads, head_dim].
   */
  virtual void Append(const ffi::Tensor& qkv) = 0;
  /*! \brief Attends to the past and causally to this step's rows k and v, which are appended. */
  virtual void Attend(const AttentionCall& call, const ffi::Tensor& k, const ffi::Tensor& v) = 0;
  /*! \brief Append, then Attend, for which call.q, k and v are the group's workspace. */
  virtual void AppendAndAttend(const ffi::Tensor& qkv, const AttentionCall& call,
                               const ffi::Tensor& k, const ffi::Tensor& v) {
    Append(qkv);
    Attend(call, k, v);
  }
  /*! \brief Attends to the past alone. */
  virtual void AttendToPast(const AttentionCall& call) = 0;
  /*! \brief Attends causally to this step's rows alone. */
  virtual void AttendToRows(const AttentionCall& call, const ffi::Tensor& k,
                            const ffi::Tensor& v) = 0;
};

/*! \brief State that the backends of a cache share; null where no layer needs it. */
struct SharedBackendState {
  std::unique_ptr<FlashInfer> flashinfer;
  std::unique_ptr<StockWindowTables> stock_windows;

  explicit SharedBackendState(const Step& step);
};

std::unique_ptr<AttentionBackend> MakeAttentionBackend(Step* step, const StoredLayer& layer,
                                                       const SharedBackendState& shared);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_ATTENTION_BACKENDS_ATTENTION_BACKEND_H_
