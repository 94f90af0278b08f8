// SPDX-License-Identifier: Apache-2.0
/*!
 * \file ragged_attention.cc
 * \brief Attention of the step's rows to each other.
 */
#include "attention/ragged_attention.h"

namespace pagedkv {

RaggedAttention::RaggedAttention(const Step& step, const StoredLayer& layer, FlashInfer* flashinfer)
    : step_(step), layer_(layer), flashinfer_(flashinfer) {
  if (!layer.kernels->IsFlashInfer(KernelName::kPrefillRagged)) flashinfer_ = nullptr;
}

KernelName RaggedAttention::Kernel() const {
  const ForwardPlan& plan = step_.plan();
  const bool has_tree = plan.needs_tree_mask();
  const KernelName plain = has_tree ? KernelName::kTree : KernelName::kPrefillRagged;
  const int64_t window = layer_.config.window;
  if (window == 0) return plain;
  const KernelName sliding =
      has_tree ? KernelName::kTreeSliding : KernelName::kPrefillRaggedSliding;
  // A set may lack the sliding kernel; the plain one does while no row is outside the window.
  const bool is_cut = layer_.config.is_chunked || plan.max_append() > window;
  return is_cut || layer_.kernels->Has(sliding) ? sliding : plain;
}

void RaggedAttention::Attend(const AttentionCall& call, const ffi::Tensor& k,
                             const ffi::Tensor& v) const {
  const KernelName name = Kernel();
  if (flashinfer_ != nullptr && name == KernelName::kPrefillRagged) {
    return flashinfer_->AttendToRows(call, layer_, k, v);
  }
  const LayerConfig& config = layer_.config;
  const StepArrays& arrays = step_.arrays();
  const ffi::Function& kernel = layer_.kernels->Get(name);
  const int64_t mode = config.rotary_mode();
  const bool is_sliding =
      name == KernelName::kTreeSliding || name == KernelName::kPrefillRaggedSliding;
  const auto window = is_sliding ? std::optional<int64_t>(config.signed_window()) : std::nullopt;
  WithLastArguments(call, window, [&](auto... last) {
    if (step_.plan().needs_tree_mask()) {
      kernel(call.q, arrays.query_indptr(), k, v, arrays.query_indptr(), arrays.query_positions(),
             arrays.tree_order_indptr(), arrays.tree_order(), call.o, call.lse, mode,
             config.rope_scale, config.rope_theta, call.sm_scale, last...);
    } else {
      kernel(call.q, arrays.query_indptr(), k, v, arrays.query_indptr(), arrays.query_positions(),
             arrays.past_lengths(), call.o, call.lse, /*causal=*/int64_t{1}, mode,
             config.rope_scale, config.rope_theta, call.sm_scale, last...);
    }
  });
}

}  // namespace pagedkv
