// SPDX-License-Identifier: Apache-2.0
/*!
 * \file attention_call.h
 * \brief The tensors of one attention call of a layer. T is the number of rows of the step.
 */
#ifndef TVM_PAGEDKV_ATTENTION_ATTENTION_CALL_H_
#define TVM_PAGEDKV_ATTENTION_ATTENTION_CALL_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <optional>

namespace pagedkv {

namespace ffi = tvm::ffi;

struct AttentionCall {
  double sm_scale;
  const ffi::Tensor& q;       // [T, num_qo_heads, qk_head_dim]
  const ffi::Tensor& o;       // [T, num_qo_heads, v_head_dim], written
  const ffi::Tensor& lse;     // [T, num_qo_heads] float32, written: log2 of the sum of exponentials
  ffi::Tensor sink_logits{};  // [num_qo_heads] float32; undefined: the layer's kernels take none
};

/*!
 * \brief Calls launch(...) with the last arguments of a kernel: a window, where kernels of the
 * layer take one, then sinks, where they take these.
 */
template <typename Launch>
void WithLastArguments(const AttentionCall& call, std::optional<int64_t> window,
                       const Launch& launch) {
  const ffi::Tensor& sinks = call.sink_logits;
  if (window) {
    sinks.defined() ? launch(*window, sinks) : launch(*window);
  } else {
    sinks.defined() ? launch(sinks) : launch();
  }
}

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_ATTENTION_ATTENTION_CALL_H_
