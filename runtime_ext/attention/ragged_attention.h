// SPDX-License-Identifier: Apache-2.0
/*!
 * \file ragged_attention.h
 * \brief Attention of the step's rows to each other, over K and V that are no pages.
 */
#ifndef TVM_PAGEDKV_ATTENTION_RAGGED_ATTENTION_H_
#define TVM_PAGEDKV_ATTENTION_RAGGED_ATTENTION_H_

#include "attention/attention_call.h"
#include "attention/backends/flashinfer.h"
#include "step/step.h"

namespace pagedkv {

class RaggedAttention {
 public:
  /*! \param flashinfer Not null when a kernel set of the cache has FlashInfer's functions. */
  RaggedAttention(const Step& step, const StoredLayer& layer, FlashInfer* flashinfer);

  /*! \throws Error (ValueError) when the kernel for this step is missing. */
  void RequireKernel() const { layer_.kernels->Get(Kernel()); }
  Alignment alignment() const {
    return layer_.kernels->IsStock(Kernel()) ? Alignment::kStock : Alignment::kElement;
  }
  /*! \param k [T, num_kv_heads, qk_head_dim], and v [T, num_kv_heads, v_head_dim]. */
  void Attend(const AttentionCall& call, const ffi::Tensor& k, const ffi::Tensor& v) const;

 private:
  KernelName Kernel() const;

  const Step& step_;
  const StoredLayer& layer_;
  FlashInfer* flashinfer_;  // where it has the kernel prefill_ragged
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_ATTENTION_RAGGED_ATTENTION_H_
