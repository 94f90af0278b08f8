// SPDX-License-Identifier: Apache-2.0
/*!
 * \file layer_call.h
 * \brief One layer's attention in a step, as a backend is given it.
 */
#ifndef TVM_PAGEDKV_ATTENTION_LAYER_CALL_H_
#define TVM_PAGEDKV_ATTENTION_LAYER_CALL_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>

#include "config/cache_config.h"
#include "config/kernels.h"
#include "state/forward_plan.h"

namespace pagedkv {

struct LayerCall {
  const KernelSet& kernels;
  const LayerConfig& layer;
  int32_t group;
  const ForwardPlan& batch;
  double sm_scale;
  const ffi::Tensor& q;
  const ffi::Tensor& o;
  const ffi::Tensor& lse;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_ATTENTION_LAYER_CALL_H_
