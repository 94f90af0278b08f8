// SPDX-License-Identifier: Apache-2.0
/*!
 * \file attention.cc
 * \brief What a layer calls within a step: append first, then one attention over the pages.
 */
#include <algorithm>
#include <cmath>
#include <string>

#include "error.h"
#include "paged_kv_cache.h"

namespace pagedkv {

namespace {

constexpr DLDataType kFloat32{kDLFloat, 32, 1};
constexpr size_t kNumPastArrays = 3;  // of a group: as GroupArray's first ones

bool Equal(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

template <typename Shape>
std::string ToString(const Shape& shape) {
  std::string text;
  for (int64_t n : shape) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return "[" + text + "]";
}

}  // namespace

void PagedKVCacheObj::RequireForward(const char* what) const {
  if (phase_ != Phase::kForward) {
    Raise(kValueError, what, " is possible within a step only; call begin_forward first");
  }
}

const PagedKVCacheObj::Layer& PagedKVCacheObj::LayerAt(int64_t layer) const {
  config_.stage.RequireOwn(layer);
  const int64_t index = config_.layer_index[layer - config_.stage.begin()];
  if (index < 0) {
    Raise(kValueError, "layer ", layer, " is a linear attention layer: it keeps no K and V here");
  }
  return layers_[index];
}

void PagedKVCacheObj::CheckTensor(const char* name, const ffi::Tensor& tensor,
                                  std::initializer_list<int64_t> shape, DLDataType dtype) const {
  if (!tensor.defined()) Raise(kTypeError, name, " must be a tensor, got None");
  ffi::ShapeView actual = tensor.shape();
  if (!std::equal(actual.begin(), actual.end(), shape.begin(), shape.end())) {
    Raise(kValueError, name, " must have shape ", ToString(shape), ", got ", ToString(actual));
  }
  if (!Equal(tensor.dtype(), dtype)) {
    Raise(kValueError, name, " must be ", ffi::DLDataTypeToString(dtype), ", got ",
          ffi::DLDataTypeToString(tensor.dtype()));
  }
  DLDevice device = tensor.device();
  if (device.device_type != config_.device.device_type ||
      device.device_id != config_.device.device_id) {
    Raise(kValueError, name, " must be on the cache's device (type ", config_.device.device_type,
          ", id ", config_.device.device_id, "), got type ", device.device_type, ", id ",
          device.device_id);
  }
  if (!tensor.IsContiguous()) Raise(kValueError, name, " must be contiguous");
}

void PagedKVCacheObj::CheckScale(double sm_scale) const {
  if (!std::isfinite(sm_scale)) Raise(kValueError, "sm_scale must be finite, got ", sm_scale);
}

void PagedKVCacheObj::CheckAlignment(const char* name, const ffi::Tensor& tensor) const {
  constexpr size_t kStockAlignment = 64;
  if (!tensor.IsAligned(kStockAlignment)) {
    Raise(kValueError, name, " must start at a multiple of ", kStockAlignment,
          " bytes: the stock kernels of this cache rely on it");
  }
}

bool PagedKVCacheObj::HasStockKernel(const Layer& layer,
                                     std::initializer_list<KernelName> names) const {
  const KernelSet& kernels = KernelsOf(layer);
  return std::any_of(names.begin(), names.end(),
                     [&](KernelName name) { return kernels.IsStock(name); });
}

ffi::Tensor PagedKVCacheObj::QueryPositions() const {
  RequireForward("get_query_positions");
  return common(kQueryPositions);
}

void PagedKVCacheObj::AttentionWithFusedQKV(int64_t layer_id, double sm_scale, ffi::Tensor qkv,
                                            ffi::Tensor o, ffi::Optional<ffi::Tensor> sinks) {
  RequireForward("attention");
  CheckScale(sm_scale);
  Layer& layer = LayerAt(layer_id);
  const LayerConfig& config = layer.config;
  if (config.is_mla()) {
    Raise(kValueError, "layer ", layer_id,
          " is an MLA layer: call append_mla_kv, self_attention and cross_attention");
  }
  const int64_t num_rows = plan_.num_rows();
  CheckTensor("qkv", qkv,
              {num_rows, config.num_qo_heads + 2 * config.num_kv_heads, config.qk_head_dim},
              config_.dtype);
  CheckTensor("o", o, {num_rows, config.num_qo_heads, config.v_head_dim}, config_.dtype);
  if (HasStockKernel(layer,
                     {config.decode(), config.prefill(), config.tree(), PagedKernel(layer)})) {
    CheckAlignment("qkv", qkv);
    CheckAlignment("o", o);
  }
  CheckSinks(layer, sinks);
  Append(layer, qkv);
  layer.last_append = num_forwards_;
  const Group& group = groups_[layer.group];
  AttendToStep(layer, sm_scale, group.q.get(), group.k.get(), group.v.get(), o, group.lse.get());
  ApplySinks(layer, sinks, o);
}

void PagedKVCacheObj::CheckSinks(const Layer& layer,
                                 const ffi::Optional<ffi::Tensor>& sinks) const {
  if (!sinks) return;
  CheckTensor("sinks", *sinks, {layer.config.num_qo_heads}, kFloat32);
  KernelsOf(layer).Get(KernelName::kApplySinks);
}

void PagedKVCacheObj::ApplySinks(const Layer& layer, const ffi::Optional<ffi::Tensor>& sinks,
                                 const ffi::Tensor& o) const {
  if (!sinks) return;
  KernelsOf(layer).Get(KernelName::kApplySinks)(o, groups_[layer.group].lse.get(), *sinks);
}

void PagedKVCacheObj::Append(const Layer& layer, const ffi::Tensor& qkv) {
  const KernelSet& kernels = KernelsOf(layer);
  const Group& group = groups_[layer.group];
  const ffi::Tensor& slots = aux_->view(ArrayIndex(layer.group, kSlots));
  const ffi::Tensor& positions = common(kQueryPositions);
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

KernelName PagedKVCacheObj::PagedKernel(const Layer& layer) const {
  const LayerConfig& config = layer.config;
  const KernelName name = plan_.is_decode() ? config.decode() : config.prefill();
  if (config.window > 0 || !plan_.has_windows() || KernelsOf(layer).IsOwn(name)) return name;
  return plan_.is_decode() ? KernelName::kDecodeSliding : KernelName::kPrefillSliding;
}

bool PagedKVCacheObj::AttendsInParts(const Layer& layer) const {
  return layer.config.window == 0 && PagedKernel(layer) == KernelName::kPrefillSliding;
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

void PagedKVCacheObj::PagedAttention(const Layer& layer, const PageArrays& pages, double sm_scale,
                                     const ffi::Tensor& q, const ffi::Tensor& o,
                                     const ffi::Tensor& lse) {
  if (UsesTreeKernel(layer, pages.range)) {
    TreeAttention(layer, pages, sm_scale, q, o, lse);
    return AttendToSegments(layer, sm_scale, q, o, lse);
  }
  const bool is_causal = pages.range == PageRange::kWithStep;
  const KernelSet& kernels = KernelsOf(layer);
  const LayerConfig& config = layer.config;
  const ffi::Tensor& first_positions = aux_->view(ArrayIndex(layer.group, kFirstPositions));
  const ffi::Tensor& positions = common(kQueryPositions);
  const KernelName name = PagedKernel(layer);
  const ffi::Function& kernel = kernels.Get(name);
  ffi::Tensor length_info = pages.last_page_lengths;
  if (kernels.IsStock(name) && NumLengthRows(layer.group) > 1) {
    length_info = pages.arrays.Matrix(pages.lengths_index, 3, plan_.num_sequences());
  }
  if (kernels.IsFlashInfer(name)) {
    const FlashInferPages table{layer.pages, pages.indptr, pages.values, pages.last_page_lengths};
    flashinfer_->Paged({kernels, config, layer.group, plan_, sm_scale, q, o, lse}, pages.range,
                       common(kQueryIndptr), table);
    return;
  }
  // Kernels of layers with a window take it as their last argument.
  auto decode = [&](auto... window) {
    kernel(q, layer.pages, pages.indptr, pages.values, length_info, first_positions, positions, o,
           lse, rotary_mode(), config.rope_scale, config.rope_theta, sm_scale, window...);
  };
  auto prefill = [&](auto... window) {
    kernel(q, common(kQueryIndptr), layer.pages, pages.indptr, pages.values, length_info,
           first_positions, positions, o, lse, static_cast<int64_t>(is_causal), rotary_mode(),
           config.rope_scale, config.rope_theta, sm_scale, window...);
  };
  if (config.window == 0) {
    plan_.is_decode() ? decode() : prefill();
    AttendToSegments(layer, sm_scale, q, o, lse);
  } else if (plan_.is_decode()) {
    // For decode the last of the pages' positions is the row's own; in the past it is not there.
    decode(is_causal ? config.window : config.window - 1);
  } else {
    prefill(config.window);
  }
}

StockWindowCall PagedKVCacheObj::StockWindow(const Layer& layer, double sm_scale,
                                             const ffi::Tensor& q, const ffi::Tensor& o,
                                             const ffi::Tensor& lse) const {
  return {KernelsOf(layer),
          layer.config,
          layer.group,
          plan_,
          rotary_mode(),
          sm_scale,
          layer.pages,
          common(kQueryPositions),
          q,
          o,
          lse};
}

PagedKVCacheObj::PageArrays PagedKVCacheObj::StepPages(const Layer& layer) const {
  const size_t lengths = ArrayIndex(layer.group, kLastPageLengths);
  return {PageRange::kWithStep,
          aux_->view(ArrayIndex(layer.group, kPageIndptr)),
          aux_->view(ArrayIndex(layer.group, kPageValues)),
          aux_->view(lengths),
          common(kTreeOrder),
          *aux_,
          lengths};
}

PagedKVCacheObj::PageArrays PagedKVCacheObj::PastPages(const Layer& layer) {
  if (HidesStep(layer)) RequireHiddenStep(layer);
  if (!has_past_arrays_) FillPastArrays();
  const ffi::Tensor& tree_order = past_aux_->view(0);
  if (HidesStep(layer)) {
    const PageArrays step = StepPages(layer);
    return {PageRange::kPast, step.indptr, step.values,       step.last_page_lengths,
            tree_order,       step.arrays, step.lengths_index};
  }
  const size_t first = 1 + layer.group * kNumPastArrays;
  return {PageRange::kPast,
          past_aux_->view(first),
          past_aux_->view(first + 1),
          past_aux_->view(first + 2),
          tree_order,
          *past_aux_,
          first + 2};
}

void PagedKVCacheObj::FillPastArrays() {
  std::vector<int64_t> sizes{plan_.needs_tree_mask() ? plan_.num_tree_nodes() : 0};
  for (int32_t g = 0; g < table_.num_groups(); ++g) {
    sizes.push_back(plan_.num_sequences() + 1);
    sizes.push_back(plan_.NumPages(g, PageRange::kPast));
    sizes.push_back(NumLengthRows(g) * plan_.num_sequences());
  }
  if (past_aux_ == nullptr) {
    past_aux_ = std::make_unique<AuxData>(config_.has_merged_aux, config_.device, sizes,
                                          allocated_bytes_, std::vector<std::vector<int64_t>>{{2}});
  }
  past_aux_->Layout(sizes);
  if (plan_.needs_tree_mask()) plan_.FillTreeOrder(PageRange::kPast, past_aux_->host(0));
  for (int32_t g = 0; g < table_.num_groups(); ++g) {
    auto host = [&](size_t i) { return past_aux_->host(1 + g * kNumPastArrays + i); };
    plan_.FillPageIndptr(g, PageRange::kPast, host(0));
    plan_.FillPageValues(g, PageRange::kPast, host(1));
    FillLengths(g, PageRange::kPast, host(2));
  }
  past_aux_->Upload();
  has_past_arrays_ = true;
}

void PagedKVCacheObj::SelfAttention(int64_t layer_id, double sm_scale, ffi::Tensor q, ffi::Tensor k,
                                    ffi::Tensor v, ffi::Tensor o, ffi::Tensor lse) {
  RequireForward("self_attention");
  CheckScale(sm_scale);
  Layer& layer = LayerAt(layer_id);
  if (layer.config.is_mla()) {
    return MLASelfAttention(&layer, sm_scale, q, k, v, o, lse);
  }
  const LayerConfig& config = layer.config;
  const int64_t num_rows = plan_.num_rows();
  CheckTensor("q", q, {num_rows, config.num_qo_heads, config.qk_head_dim}, config_.dtype);
  CheckTensor("k", k, {num_rows, config.num_kv_heads, config.qk_head_dim}, config_.dtype);
  CheckTensor("v", v, {num_rows, config.num_kv_heads, config.v_head_dim}, config_.dtype);
  CheckTensor("o", o, {num_rows, config.num_qo_heads, config.v_head_dim}, config_.dtype);
  CheckTensor("lse", lse, {num_rows, config.num_qo_heads}, kFloat32);
  const KernelName ragged = RaggedKernel(layer);
  if (HasStockKernel(layer, {ragged})) {
    for (const ffi::Tensor& each : {q, k, v, o, lse}) CheckAlignment("every tensor", each);
  }
  if (plan_.has_windows() && config.window == 0 && KernelsOf(layer).IsOwn(config.prefill())) {
    plan_.RequireRowsSeeEachOther("self_attention");
  }
  // Kernels are found before anything is written.
  const KernelSet& kernels = KernelsOf(layer);
  kernels.Get(ragged);
  kernels.Get(KernelName::kTransposeAppend)(layer.pages, k, v,
                                            aux_->view(ArrayIndex(layer.group, kSlots)));
  layer.last_append = num_forwards_;
  RaggedAttention(layer, sm_scale, q, k, v, o, lse);
}

KernelName PagedKVCacheObj::RaggedKernel(const Layer& layer) const {
  const KernelName plain = plan_.needs_tree_mask() ? KernelName::kTree : KernelName::kPrefillRagged;
  if (layer.config.window == 0) return plain;
  const KernelName sliding =
      plan_.needs_tree_mask() ? KernelName::kTreeSliding : KernelName::kPrefillRaggedSliding;
  // The plain kernel does for steps that the window does not cut, and sets may have no other.
  const bool is_cut = plan_.max_append() > layer.config.window;
  return is_cut || KernelsOf(layer).Has(sliding) ? sliding : plain;
}

void PagedKVCacheObj::RaggedAttention(const Layer& layer, double sm_scale, const ffi::Tensor& q,
                                      const ffi::Tensor& k, const ffi::Tensor& v,
                                      const ffi::Tensor& o, const ffi::Tensor& lse) {
  const KernelSet& kernels = KernelsOf(layer);
  const LayerConfig& config = layer.config;
  const KernelName name = RaggedKernel(layer);
  const ffi::Function& kernel = kernels.Get(name);
  const int64_t mode = config.is_mla() ? 0 : rotary_mode();  // models rotate latent rows themselves
  // Kernels of layers with a window take it as their last argument.
  auto call = [&](auto... window) {
    if (plan_.needs_tree_mask()) {
      kernel(q, common(kQueryIndptr), k, v, common(kQueryIndptr), common(kQueryPositions),
             common(kTreeOrderIndptr), common(kTreeOrder), o, lse, mode, config.rope_scale,
             config.rope_theta, sm_scale, window...);
    } else {
      kernel(q, common(kQueryIndptr), k, v, common(kQueryIndptr), common(kQueryPositions),
             common(kPastLengths), o, lse, /*causal=*/int64_t{1}, mode, config.rope_scale,
             config.rope_theta, sm_scale, window...);
    }
  };
  if (kernels.IsFlashInfer(name)) {
    flashinfer_->Ragged({kernels, config, layer.group, plan_, sm_scale, q, o, lse},
                        common(kQueryIndptr), k, v);
  } else if (name == KernelName::kTreeSliding || name == KernelName::kPrefillRaggedSliding) {
    call(config.window);
  } else {
    call();
  }
}

void PagedKVCacheObj::CrossAttention(int64_t layer_id, double sm_scale, ffi::Tensor q,
                                     ffi::Tensor o, ffi::Tensor lse) {
  RequireForward("cross_attention");
  CheckScale(sm_scale);
  Layer& layer = LayerAt(layer_id);
  if (layer.config.is_mla()) {
    return MLACrossAttention(&layer, sm_scale, q, o, lse);
  }
  const LayerConfig& config = layer.config;
  const int64_t num_rows = plan_.num_rows();
  CheckTensor("q", q, {num_rows, config.num_qo_heads, config.qk_head_dim}, config_.dtype);
  CheckTensor("o", o, {num_rows, config.num_qo_heads, config.v_head_dim}, config_.dtype);
  CheckTensor("lse", lse, {num_rows, config.num_qo_heads}, kFloat32);
  if (HasStockKernel(layer,
                     {config.decode(), config.prefill(), config.tree(), PagedKernel(layer)})) {
    for (const ffi::Tensor& each : {q, o, lse}) CheckAlignment("every tensor", each);
  }
  if (UsesStockWindow(layer, PageRange::kPast)) {
    stock_window_->AttendToPast(StockWindow(layer, sm_scale, q, o, lse));
    return;
  }
  PagedAttention(layer, PastPages(layer), sm_scale, q, o, lse);
}

void PagedKVCacheObj::AttentionWithSharedKV(int64_t source_id, double sm_scale, ffi::Tensor q,
                                            ffi::Tensor current_k, ffi::Tensor current_v,
                                            ffi::Tensor o, ffi::Optional<ffi::Tensor> sinks) {
  RequireForward("attention_with_shared_kv");
  CheckScale(sm_scale);
  const Layer& source = LayerAt(source_id);
  const LayerConfig& config = source.config;
  if (config.is_mla()) {
    Raise(kValueError, "attention_with_shared_kv needs a source with K and V, and layer ",
          source_id, " is an MLA layer");
  }
  const int64_t num_rows = plan_.num_rows();
  CheckTensor("q", q, {num_rows, config.num_qo_heads, config.qk_head_dim}, config_.dtype);
  CheckTensor("current_k", current_k, {num_rows, config.num_kv_heads, config.qk_head_dim},
              config_.dtype);
  CheckTensor("current_v", current_v, {num_rows, config.num_kv_heads, config.v_head_dim},
              config_.dtype);
  CheckTensor("o", o, {num_rows, config.num_qo_heads, config.v_head_dim}, config_.dtype);
  if (source.last_append != num_forwards_) {
    Raise(kValueError, "layer ", source_id,
          " has not appended this step's K and V; run its attention before the layers that share "
          "them");
  }
  if (HasStockKernel(source,
                     {config.decode(), config.prefill(), config.tree(), PagedKernel(source)})) {
    CheckAlignment("q", q);
    CheckAlignment("o", o);
  }
  CheckSinks(source, sinks);
  // The source has appended first, so its pages hold current_k and current_v already.
  AttendToStep(source, sm_scale, q, current_k, current_v, o, groups_[source.group].lse.get());
  ApplySinks(source, sinks, o);
}

ffi::Array<ffi::Tensor> PagedKVCacheObj::MergeAttention(ffi::Tensor o, ffi::Tensor lse,
                                                        ffi::Tensor o_other,
                                                        ffi::Tensor lse_other) {
  if (!o.defined()) Raise(kTypeError, "o must be a tensor, got None");
  if (o.ndim() != 3) {
    Raise(kValueError, "o must have shape [rows, heads, dim], got ", ToString(o.shape()));
  }
  CheckTensor("o", o, {o.size(0), o.size(1), o.size(2)}, config_.dtype);
  CheckTensor("lse", lse, {o.size(0), o.size(1)}, kFloat32);
  CheckTensor("o_other", o_other, {o.size(0), o.size(1), o.size(2)}, config_.dtype);
  CheckTensor("lse_other", lse_other, {o.size(0), o.size(1)}, kFloat32);
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
