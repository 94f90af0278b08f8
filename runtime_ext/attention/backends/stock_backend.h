// SPDX-License-Identifier: Apache-2.0
/*!
 * \file stock_backend.h
 * \brief Attention with kernels of the stock cache, which differ where a sequence has a window.
 *
 * Then the kernels decode_sliding and prefill_sliding serve layers without a window of their own:
 * they take the windows of the sequences as a matrix. With `causal`, prefill_sliding would take the
 * window for one of the layer, so it serves the past only: the rows of the step attend to each
 * other in a pass of their own, and the two partial states are merged.
 */
#ifndef TVM_PAGEDKV_ATTENTION_BACKENDS_STOCK_BACKEND_H_
#define TVM_PAGEDKV_ATTENTION_BACKENDS_STOCK_BACKEND_H_

#include "attention/backends/paged_backend.h"

namespace pagedkv {

class StockBackend : public PagedBackend {
 public:
  StockBackend(Step* step, const StoredLayer& layer, const SharedBackendState& shared);

  Alignment page_alignment() const override;
  void Append(const ffi::Tensor& qkv) override;
  void Attend(const AttentionCall& call, const ffi::Tensor& k, const ffi::Tensor& v) override;

 protected:
  void Decode(const AttentionCall& call, const PageTable& table) override;
  void Prefill(const AttentionCall& call, const PageTable& table) override;

 private:
  /*! \brief Whether this step has sequences with a window and the kernel for it is not ours. */
  bool HasForeignWindows() const {
    return plan().has_windows() && !(plan().is_decode() ? is_decode_own_ : is_prefill_own_);
  }
  bool AttendsInParts() const { return HasForeignWindows() && !plan().is_decode(); }

  bool is_decode_own_, is_prefill_own_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_ATTENTION_BACKENDS_STOCK_BACKEND_H_
