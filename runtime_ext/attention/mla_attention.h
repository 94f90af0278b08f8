// SPDX-License-Identifier: Apache-2.0
/*!
 * \file mla_attention.h
 * \brief An MLA layer within a step.
 *
 * A model appends the latent rows of the step, then attends in one of three ways:
 *   - self_attention, not absorbed, over the rows of this step: a prompt without a past;
 *   - cross_attention alone, absorbed, in a step of one row per sequence or of token trees: it
 *     covers the pages with this step's rows;
 *   - self_attention, then cross_attention, which then covers the past alone, and their merge.
 * So cross_attention covers this step's rows when every sequence appends one row, or the rows are
 * tree nodes (of trees that branch or not), and self_attention of the layer was not called in the
 * step. In all other steps it covers the past.
 */
#ifndef TVM_PAGEDKV_ATTENTION_MLA_ATTENTION_H_
#define TVM_PAGEDKV_ATTENTION_MLA_ATTENTION_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>

#include "attention/attention_call.h"
#include "attention/layer_pages.h"
#include "attention/ragged_attention.h"
#include "step/step.h"

namespace pagedkv {

class MLAAttention {
 public:
  MLAAttention(Step* step, const StoredLayer& layer);

  // Within a Step::LayerCall; shapes as for Attention. `sink_logits` as in AttentionCall.
  void Append(ffi::Tensor kv);
  void SelfAttend(double sm_scale, ffi::Tensor q, ffi::Tensor k, ffi::Tensor v,
                  const ffi::Tensor& o, const ffi::Tensor& lse, const ffi::Tensor& sink_logits);
  void CrossAttend(double sm_scale, ffi::Tensor q, const ffi::Tensor& o, const ffi::Tensor& lse,
                   const ffi::Tensor& sink_logits);

 private:
  void AttendToPages(const AttentionCall& call, const PageTable& table) const;

  Step* step_;
  const StoredLayer& layer_;
  LayerPages pages_;
  RaggedAttention ragged_;
  Alignment append_alignment_, page_alignment_;
  // Numbers of the last steps with a SelfAttend, and with a CrossAttend that covered the step's
  // rows.
  int64_t last_self_attention_ = 0;
  int64_t last_whole_attention_ = 0;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_ATTENTION_MLA_ATTENTION_H_
