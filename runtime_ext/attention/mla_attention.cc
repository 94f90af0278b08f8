// SPDX-License-Identifier: Apache-2.0
/*!
 * \file mla_attention.cc
 * \brief An MLA layer within a step.
 */
#include "attention/mla_attention.h"

#include "base/error.h"

namespace pagedkv {

namespace {

/*! \brief The last dimension of a tensor [rows, heads, dim]; CheckInput checks the whole shape. */
int64_t WidthOf(const char* name, const ffi::Tensor& tensor) {
  if (!tensor.defined()) Raise(kTypeError, name, " must be a tensor, got None");
  if (tensor.ndim() != 3) Raise(kValueError, name, " must have 3 dimensions, got ", tensor.ndim());
  return tensor.size(2);
}

Alignment AlignmentOf(const StoredLayer& layer, KernelName name) {
  return layer.kernels->IsStock(name) ? Alignment::kStock : Alignment::kElement;
}

}  // namespace

MLAAttention::MLAAttention(Step* step, const StoredLayer& layer)
    : step_(step),
      layer_(layer),
      pages_(step, layer),
      ragged_(*step, layer, /*flashinfer=*/nullptr),
      append_alignment_(AlignmentOf(layer, KernelName::kTransposeAppendMLA)),
      page_alignment_(AlignmentOf(layer, layer.config.prefill())) {}

void MLAAttention::Append(ffi::Tensor kv) {
  step_->tensors().CheckInput("kv", kv, {step_->plan().num_rows(), layer_.config.qk_head_dim},
                              step_->storage().config().dtype);
  const ffi::Function& append = layer_.kernels->Get(KernelName::kTransposeAppendMLA);
  step_->tensors().MakeCompact({&kv}, append_alignment_);
  append(layer_.pages, kv, step_->arrays().slots(layer_.group));
  step_->NoteAppend(layer_);
}

void MLAAttention::SelfAttend(double sm_scale, ffi::Tensor q, ffi::Tensor k, ffi::Tensor v,
                              const ffi::Tensor& o, const ffi::Tensor& lse,
                              const ffi::Tensor& sink_logits) {
  const LayerConfig& config = layer_.config;
  TensorChecks& tensors = step_->tensors();
  const DLDataType dtype = step_->storage().config().dtype;
  const int64_t num_rows = step_->plan().num_rows(), num_heads = config.num_qo_heads;
  // The positional form of the stock front end does not give these dims: then the kernel checks.
  const bool is_known = config.original_qk_head_dim != 0;
  const int64_t qk_head_dim = is_known ? config.original_qk_head_dim : WidthOf("k", k);
  const int64_t v_head_dim = is_known ? config.original_v_head_dim : WidthOf("v", v);
  tensors.CheckInput("q", q, {num_rows, num_heads, qk_head_dim}, dtype);
  tensors.CheckInput("k", k, {num_rows, num_heads, qk_head_dim}, dtype);
  tensors.CheckInput("v", v, {num_rows, num_heads, v_head_dim}, dtype);
  tensors.CheckOutput("o", o, {num_rows, num_heads, v_head_dim}, dtype);
  tensors.CheckOutput("lse", lse, {num_rows, num_heads}, kFloat32);
  if (last_whole_attention_ == step_->number()) {
    Raise(kValueError,
          "cross_attention of this MLA layer has covered this step's rows already; where every "
          "sequence appends one row, and with token trees, call self_attention before it or not "
          "at all");
  }
  const Alignment alignment = ragged_.alignment();
  for (const ffi::Tensor& each : {o, lse}) {
    tensors.CheckAlignment("every tensor", each, alignment);
  }
  tensors.MakeCompact({&q, &k, &v}, alignment);
  ragged_.Attend({sm_scale, q, o, lse, sink_logits}, k, v);
  last_self_attention_ = step_->number();
}

void MLAAttention::CrossAttend(double sm_scale, ffi::Tensor q, const ffi::Tensor& o,
                               const ffi::Tensor& lse, const ffi::Tensor& sink_logits) {
  const LayerConfig& config = layer_.config;
  const ForwardPlan& plan = step_->plan();
  TensorChecks& tensors = step_->tensors();
  const DLDataType dtype = step_->storage().config().dtype;
  const int64_t num_rows = plan.num_rows(), num_heads = config.num_qo_heads;
  tensors.CheckInput("q", q, {num_rows, num_heads, config.qk_head_dim}, dtype);
  tensors.CheckOutput("o", o, {num_rows, num_heads, config.v_head_dim}, dtype);
  tensors.CheckOutput("lse", lse, {num_rows, num_heads}, kFloat32);
  for (const ffi::Tensor& each : {o, lse}) {
    tensors.CheckAlignment("every tensor", each, page_alignment_);
  }
  const bool covers_step =
      (plan.is_decode() || plan.has_trees()) && last_self_attention_ != step_->number();
  if (covers_step && !step_->HasAppended(layer_)) {
    Raise(kValueError,
          "where every sequence appends one row, and with token trees, cross_attention of an MLA "
          "layer covers this step's rows; call append_mla_kv before it");
  }
  tensors.MakeCompact({&q}, page_alignment_);
  AttendToPages({sm_scale, q, o, lse, sink_logits},
                covers_step ? pages_.WithStep() : pages_.Past());
  if (covers_step) last_whole_attention_ = step_->number();
}

void MLAAttention::AttendToPages(const AttentionCall& call, const PageTable& table) const {
  const StepArrays& arrays = step_->arrays();
  const LayerConfig& config = layer_.config;
  const bool has_tree = pages_.NeedsTreeMask(table.range);
  const auto& kernel = layer_.kernels->Get(has_tree ? config.tree() : config.prefill());
  const auto window = config.window ? std::optional<int64_t>(config.window) : std::nullopt;
  WithLastArguments(call, window, [&](auto... last) {
    if (has_tree && window) {
      kernel(call.q, arrays.query_indptr(), layer_.pages, table.indptr, table.page_ids,
             table.lengths, arrays.first_positions(layer_.group), arrays.query_positions(), call.o,
             call.lse, call.sm_scale, arrays.tree_order_indptr(), table.tree_order, last...);
    } else if (has_tree) {
      kernel(call.q, arrays.query_indptr(), layer_.pages, table.indptr, table.page_ids,
             table.lengths, call.o, call.lse, call.sm_scale, arrays.tree_order_indptr(),
             table.tree_order, last...);
    } else {
      const int64_t is_causal = table.range == PageRange::kWithStep;
      kernel(call.q, arrays.query_indptr(), layer_.pages, table.indptr, table.page_ids,
             table.lengths, call.o, call.lse, is_causal, call.sm_scale, last...);
    }
  });
  pages_.AttendToSegments(call);
}

}  // namespace pagedkv
