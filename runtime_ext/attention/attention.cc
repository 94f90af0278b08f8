// SPDX-License-Identifier: Apache-2.0
/*!
 * \file attention.cc
 * \brief What a layer calls within a step: append first, then one attention over the pages.
 */
#include <tvm/ffi/container/shape.h>

#include "base/error.h"
#include "ffi/paged_kv_cache.h"

namespace pagedkv {

ffi::Tensor PagedKVCacheObj::QueryPositions() const {
  RequireForward("get_query_positions");
  return rope_positions();
}

void PagedKVCacheObj::AttentionWithFusedQKV(int64_t layer_id, double sm_scale, ffi::Tensor qkv,
                                            ffi::Tensor o, ffi::Optional<ffi::Tensor> sinks) {
  const LayerCallScope scope(this, "attention");
  CheckScale(sm_scale);
  Layer& layer = LayerAt(layer_id);
  const LayerConfig& config = layer.config;
  if (config.is_mla()) {
    Raise(kValueError, "layer ", layer_id,
          " is an MLA layer: call append_mla_kv, self_attention and cross_attention");
  }
  const int64_t num_rows = plan_.num_rows();
  CheckInput("qkv", qkv,
             {num_rows, config.num_qo_heads + 2 * config.num_kv_heads, config.qk_head_dim},
             config_.dtype);
  CheckTensor("o", o, {num_rows, config.num_qo_heads, config.v_head_dim}, config_.dtype);
  const bool is_stock =
      HasStockKernel(layer, {config.decode(), config.prefill(), config.tree(), PagedKernel(layer)});
  if (is_stock) CheckAlignment("o", o);
  CheckSinks(layer, sinks);
  MakeCompact({&qkv}, is_stock);
  Append(layer, qkv);
  layer.last_append = num_forwards_;
  const Group& group = groups_[layer.group];
  AttendToStep(layer, sm_scale, group.q.get(), group.k.get(), group.v.get(), o, group.lse.get());
  ApplySinks(layer, sinks, o);
}

void PagedKVCacheObj::CheckSinks(const Layer& layer,
                                 const ffi::Optional<ffi::Tensor>& sinks) const {
  if (!sinks) return;
  CheckInput("sinks", *sinks, {layer.config.num_qo_heads}, kFloat32);
  KernelsOf(layer).Get(KernelName::kApplySinks);
}

void PagedKVCacheObj::ApplySinks(const Layer& layer, const ffi::Optional<ffi::Tensor>& sinks,
                                 const ffi::Tensor& o) {
  if (!sinks) return;
  ffi::Tensor compact = *sinks;
  MakeCompact({&compact}, /*is_stock=*/false);
  KernelsOf(layer).Get(KernelName::kApplySinks)(o, groups_[layer.group].lse.get(), compact);
}

void PagedKVCacheObj::Append(const Layer& layer, const ffi::Tensor& qkv) {
  const KernelSet& kernels = KernelsOf(layer);
  const Group& group = groups_[layer.group];
  const ffi::Tensor& slots = aux_->view(ArrayIndex(layer.group, kSlots));
  const ffi::Tensor& positions = rope_positions();
  const ffi::Tensor& factors = config_.rope_ext_factors;
  const int64_t apply_rope = config_.rope_mode == RopeMode::kNormal;
  if (kernels.Has(KernelName::kRopeAppend) && !AttendsInParts(layer) && !HasStockWindow(layer)) {
    const ffi::Function& rope_append = kernels.Get(KernelName::kRopeAppend);
    const ffi::Tensor& indptr = common(kQueryIndptr);
    if (factors.defined()) {
      rope_append(qkv, indptr, positions, slots, group.q.get(), layer.pages, apply_rope, factors);
    } else {
      rope_append(qkv, indptr, positions, slots, group.q.get(), layer.pages, apply_rope);
    }
    return;
  }
  const ffi::Function& split_rotary = kernels.Get(KernelName::kSplitRotary);
  if (factors.defined()) {
    split_rotary(qkv, positions, group.q.get(), group.k.get(), group.v.get(), factors);
  } else {
    split_rotary(qkv, positions, group.q.get(), group.k.get(), group.v.get(), apply_rope);
  }
  kernels.Get(KernelName::kTransposeAppend)(layer.pages, group.k.get(), group.v.get(), slots);
}

void PagedKVCacheObj::AttendToStep(const Layer& layer, double sm_scale, const ffi::Tensor& q,
                                   const ffi::Tensor& k, const ffi::Tensor& v, const ffi::Tensor& o,
                                   const ffi::Tensor& lse) {
  if (UsesStockWindow(layer, PageRange::kWithStep)) {
    return stock_window_->Attend(StockWindow(layer, sm_scale, q, o, lse), k, v);
  }
  if (!AttendsInParts(layer)) {
    return PagedAttention(layer, StepPages(layer), sm_scale, q, o, lse);
  }
  // The stock kernel is right about the past only: with `causal` it would take the window of a
  // layer for the one of the sequence.
  RaggedAttention(layer, sm_scale, q, k, v, o, lse);
  const ffi::Tensor past_o =
      AllocateTensor(o.shape(), config_.dtype, config_.device, allocated_bytes_);
  const ffi::Tensor past_lse =
      AllocateTensor({q.size(0), q.size(1)}, kFloat32, config_.device, allocated_bytes_);
  PagedAttention(layer, PastPages(layer), sm_scale, q, past_o, past_lse);
  KernelsOf(layer).Get(KernelName::kMerge)(o, lse, past_o, past_lse);
}

void PagedKVCacheObj::SelfAttention(int64_t layer_id, double sm_scale, ffi::Tensor q, ffi::Tensor k,
                                    ffi::Tensor v, ffi::Tensor o, ffi::Tensor lse) {
  const LayerCallScope scope(this, "self_attention");
  CheckScale(sm_scale);
  Layer& layer = LayerAt(layer_id);
  if (layer.config.is_mla()) {
    return MLASelfAttention(&layer, sm_scale, q, k, v, o, lse);
  }
  const LayerConfig& config = layer.config;
  const int64_t num_rows = plan_.num_rows();
  CheckInput("q", q, {num_rows, config.num_qo_heads, config.qk_head_dim}, config_.dtype);
  CheckInput("k", k, {num_rows, config.num_kv_heads, config.qk_head_dim}, config_.dtype);
  CheckInput("v", v, {num_rows, config.num_kv_heads, config.v_head_dim}, config_.dtype);
  CheckTensor("o", o, {num_rows, config.num_qo_heads, config.v_head_dim}, config_.dtype);
  CheckTensor("lse", lse, {num_rows, config.num_qo_heads}, kFloat32);
  const KernelName ragged = RaggedKernel(layer);
  const bool is_stock = HasStockKernel(layer, {ragged});
  if (is_stock) {
    for (const ffi::Tensor& each : {o, lse}) CheckAlignment("every tensor", each);
  }
  if (plan_.has_windows() && config.window == 0 && KernelsOf(layer).IsOwn(config.prefill())) {
    plan_.RequireRowsSeeEachOther("self_attention");
  }
  // Kernels are found before anything is written.
  const KernelSet& kernels = KernelsOf(layer);
  kernels.Get(ragged);
  const ffi::Function& append = kernels.Get(KernelName::kTransposeAppend);
  MakeCompact({&q, &k, &v}, is_stock);
  append(layer.pages, k, v, aux_->view(ArrayIndex(layer.group, kSlots)));
  layer.last_append = num_forwards_;
  RaggedAttention(layer, sm_scale, q, k, v, o, lse);
}

void PagedKVCacheObj::CrossAttention(int64_t layer_id, double sm_scale, ffi::Tensor q,
                                     ffi::Tensor o, ffi::Tensor lse) {
  const LayerCallScope scope(this, "cross_attention");
  CheckScale(sm_scale);
  Layer& layer = LayerAt(layer_id);
  if (layer.config.is_mla()) {
    return MLACrossAttention(&layer, sm_scale, q, o, lse);
  }
  const LayerConfig& config = layer.config;
  const int64_t num_rows = plan_.num_rows();
  CheckInput("q", q, {num_rows, config.num_qo_heads, config.qk_head_dim}, config_.dtype);
  CheckTensor("o", o, {num_rows, config.num_qo_heads, config.v_head_dim}, config_.dtype);
  CheckTensor("lse", lse, {num_rows, config.num_qo_heads}, kFloat32);
  const bool is_stock =
      HasStockKernel(layer, {config.decode(), config.prefill(), config.tree(), PagedKernel(layer)});
  if (is_stock) {
    for (const ffi::Tensor& each : {o, lse}) CheckAlignment("every tensor", each);
  }
  MakeCompact({&q}, is_stock);
  if (UsesStockWindow(layer, PageRange::kPast)) {
    stock_window_->AttendToPast(StockWindow(layer, sm_scale, q, o, lse));
    return;
  }
  PagedAttention(layer, PastPages(layer), sm_scale, q, o, lse);
}

void PagedKVCacheObj::AttentionWithSharedKV(int64_t source_id, double sm_scale, ffi::Tensor q,
                                            ffi::Tensor current_k, ffi::Tensor current_v,
                                            ffi::Tensor o, ffi::Optional<ffi::Tensor> sinks) {
  const LayerCallScope scope(this, "attention_with_shared_kv");
  CheckScale(sm_scale);
  const Layer& source = LayerAt(source_id);
  const LayerConfig& config = source.config;
  if (config.is_mla()) {
    Raise(kValueError, "attention_with_shared_kv needs a source with K and V, and layer ",
          source_id, " is an MLA layer");
  }
  const int64_t num_rows = plan_.num_rows();
  CheckInput("q", q, {num_rows, config.num_qo_heads, config.qk_head_dim}, config_.dtype);
  CheckInput("current_k", current_k, {num_rows, config.num_kv_heads, config.qk_head_dim},
             config_.dtype);
  CheckInput("current_v", current_v, {num_rows, config.num_kv_heads, config.v_head_dim},
             config_.dtype);
  CheckTensor("o", o, {num_rows, config.num_qo_heads, config.v_head_dim}, config_.dtype);
  if (source.last_append != num_forwards_) {
    Raise(kValueError, "layer ", source_id,
          " has not appended this step's K and V; run its attention before the layers that share "
          "them");
  }
  const bool is_stock = HasStockKernel(
      source, {config.decode(), config.prefill(), config.tree(), PagedKernel(source)});
  if (is_stock) CheckAlignment("o", o);
  CheckSinks(source, sinks);
  MakeCompact({&q, &current_k, &current_v}, is_stock);
  // The source has appended first, so its pages hold current_k and current_v already.
  AttendToStep(source, sm_scale, q, current_k, current_v, o, groups_[source.group].lse.get());
  ApplySinks(source, sinks, o);
}

ffi::Array<ffi::Tensor> PagedKVCacheObj::MergeAttention(ffi::Tensor o, ffi::Tensor lse,
                                                        ffi::Tensor o_other,
                                                        ffi::Tensor lse_other) {
  if (!o.defined()) Raise(kTypeError, "o must be a tensor, got None");
  if (o.ndim() != 3) {
    Raise(kValueError, "o must have shape [rows, heads, dim], got ", ffi::Shape(o.shape()));
  }
  CheckTensor("o", o, {o.size(0), o.size(1), o.size(2)}, config_.dtype);
  CheckTensor("lse", lse, {o.size(0), o.size(1)}, kFloat32);
  CheckInput("o_other", o_other, {o.size(0), o.size(1), o.size(2)}, config_.dtype);
  CheckInput("lse_other", lse_other, {o.size(0), o.size(1)}, kFloat32);
  MakeCompact({&o_other, &lse_other}, /*is_stock=*/false);
  MergeKernels(o.size(1), o.size(2)).Get(KernelName::kMerge)(o, lse, o_other, lse_other);
  return {o, lse};
}

const KernelSet& PagedKVCacheObj::MergeKernels(int64_t num_heads, int64_t width) const {
  // The call names no layer, so it is the shape that tells whose kernel fits.
  for (const Layer& layer : layers_) {
    const LayerConfig& config = layer.config;
    int64_t merged = config.original_v_head_dim ? config.original_v_head_dim : config.v_head_dim;
    if (config.num_qo_heads == num_heads && merged == width) return KernelsOf(layer);
  }
  return config_.kernel_sets[0];  // which may take any shape, or refuse it
}

}  // namespace pagedkv
