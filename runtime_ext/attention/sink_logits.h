// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sink_logits.h
 * \brief Learned sinks of a layer: a logit per query head that joins the softmax without a value.
 *
 * Kernels of layers that are made for sinks take them as their last argument. Other layers get
 * them in a pass over the outputs, with the kernel `apply_sinks`.
 */
#ifndef TVM_PAGEDKV_ATTENTION_SINK_LOGITS_H_
#define TVM_PAGEDKV_ATTENTION_SINK_LOGITS_H_

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/optional.h>

#include "attention/attention_call.h"
#include "step/step.h"

namespace pagedkv {

class SinkLogits {
 public:
  /*! \param step Must outlive this, as must `layer`. */
  SinkLogits(Step* step, const StoredLayer& layer);

  /*! \throws Error (ValueError) for sinks that do not fit, or that the layer cannot have. */
  void Check(const ffi::Optional<ffi::Tensor>& logits) const;
  /*! \brief The last argument of the layer's kernels, or an undefined tensor if they have none. */
  ffi::Tensor Argument(const ffi::Optional<ffi::Tensor>& logits) const;
  /*! \brief Lets the sinks into the softmax of what is in call.o, if no kernel has done so. */
  void Apply(const ffi::Optional<ffi::Tensor>& logits, const AttentionCall& call) const;

 private:
  ffi::Tensor Compact(const ffi::Tensor& logits) const;

  Step* step_;
  const StoredLayer& layer_;
  ffi::Tensor none_;  // [num_qo_heads], all -inf, for calls without sinks
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_ATTENTION_SINK_LOGITS_H_
