// SPDX-License-Identifier: Apache-2.0
/*!
 * \file attention.cc
 * \brief The calls of a model for a layer within a step: checks, then the layer's backend.
 */
#include "attention/attention.h"

#include <tvm/ffi/container/shape.h>

#include <array>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "device/device_memory.h"
#include "storage/row_io.h"

namespace pagedkv {

namespace {

constexpr int64_t kMaxBudget = std::numeric_limits<int32_t>::max();

void CheckScale(double sm_scale) {
  if (!std::isfinite(sm_scale)) Raise(kValueError, "sm_scale must be finite, got ", sm_scale);
}

}  // namespace

Attention::Attention(Step* step)
    : step_(step), storage_(step->storage()), shared_(*step), listed_(step), choice_(step) {
  for (const StoredLayer& layer : storage_.layers()) {
    LayerEntry entry;
    if (!layer.config.is_attention()) {
      // see Recurrence
      layers_.push_back(std::move(entry));
      continue;
    }
    entry.sinks = std::make_unique<SinkLogits>(step, layer);
    if (layer.config.is_mla()) {
      entry.mla = std::make_unique<MLAAttention>(step, layer);
    } else {
      entry.backend = MakeAttentionBackend(step, layer, shared_);
    }
    layers_.push_back(std::move(entry));
  }
}

void Attention::AttendFused(int64_t layer_id, double sm_scale, ffi::Tensor qkv, ffi::Tensor o,
                            ffi::Optional<ffi::Tensor> sink_logits) {
  const Step::LayerCall scope(step_, "attention");
  AppendAndAttend(layer_id, sm_scale, std::move(qkv), /*reach=*/{}, o, sink_logits);
}

void Attention::AttendToList(int64_t layer_id, double sm_scale, ffi::Tensor qkv,
                             ffi::Tensor positions, ffi::Tensor o,
                             ffi::Optional<ffi::Tensor> sink_logits) {
  const Step::LayerCall scope(step_, "attention_to_positions");
  const RowLists lists{std::move(positions)};
  AppendAndAttend(layer_id, sm_scale, std::move(qkv), {&lists}, o, sink_logits);
}

void Attention::AttendToBlocks(int64_t layer_id, int64_t block_size, double sm_scale,
                               ffi::Tensor qkv, ffi::Tensor blocks, ffi::Tensor o,
                               ffi::Optional<ffi::Tensor> sink_logits) {
  const Step::LayerCall scope(step_, "attention_to_blocks");
  const RowLists lists{std::move(blocks), block_size};
  AppendAndAttend(layer_id, sm_scale, std::move(qkv), {&lists}, o, sink_logits);
}

void Attention::AttendWithinBudget(int64_t layer_id, int64_t budget, double sm_scale,
                                   ffi::Tensor qkv, ffi::Tensor o,
                                   ffi::Optional<ffi::Tensor> sink_logits) {
  const Step::LayerCall scope(step_, "attention_within_budget");
  if (!(sm_scale > 0)) {
    Raise(kValueError, "a budget needs a positive sm_scale, got ", sm_scale);
  }
  AppendAndAttend(layer_id, sm_scale, std::move(qkv), {nullptr, budget}, o, sink_logits);
}

int64_t Attention::PagesToChoose(const StoredLayer& layer, int64_t budget) const {
  if (!step_->bounds().Has(layer)) {
    Raise(kValueError, "layer ", layer.config.id,
          " was made without bounds of its pages: its LayerSpec needs page_bounds=True, and no ",
          "window");
  }
  const int64_t page_size = storage_.config().page_size;
  if (budget < 2 * page_size || budget > kMaxBudget) {
    Raise(kValueError, "budget must be between ", 2 * page_size, " positions, two pages, and ",
          kMaxBudget, ", got ", budget);
  }
  const ForwardPlan& plan = step_->plan();
  if (!plan.is_decode() || plan.has_windows() || plan.has_spans() || plan.needs_tree_mask()) {
    return 0;
  }
  for (int64_t i = 0; i < plan.num_sequences(); ++i) {
    if (plan.PastLength(i) >= budget / page_size * page_size) return budget / page_size;
  }
  return 0;
}

RowLists Attention::ChoosePages(const StoredLayer& layer, const ffi::Tensor& q, int64_t num_pages) {
  const PageTable table = step_->arrays().page_table(layer.group);
  const ffi::Tensor& bounds = step_->bounds().Update(layer, table);
  const std::array<int64_t, 3> shape{q.size(0), layer.config.num_kv_heads, num_pages};
  const ffi::Tensor blocks = AllocateTensor(ffi::ShapeView(shape.data(), shape.size()), kInt32,
                                            storage_.device(), UncountedBytes());
  layer.kernels->Get(KernelName::kChoosePages)(q, bounds, table.indptr, table.page_ids, blocks);
  return {blocks, storage_.config().page_size};
}

void Attention::AppendAndAttend(int64_t layer_id, double sm_scale, ffi::Tensor qkv,
                                const Reach& reach, const ffi::Tensor& o,
                                const ffi::Optional<ffi::Tensor>& sink_logits) {
  CheckScale(sm_scale);
  const StoredLayer& layer = storage_.At(layer_id);
  const LayerConfig& config = layer.config;
  if (config.is_mla()) {
    Raise(kValueError, "layer ", layer_id,
          " is an MLA layer: call append_mla_kv, self_attention and cross_attention");
  }
  AttentionBackend& backend = *layers_[layer.index].backend;
  TensorChecks& tensors = step_->tensors();
  const int64_t num_rows = step_->plan().num_rows();
  const DLDataType dtype = storage_.config().dtype;
  const int64_t num_keys = config.num_qo_heads + config.num_kv_heads;
  if (config.has_two_widths()) {
    const int64_t v_width = config.num_kv_heads * config.v_head_dim;
    tensors.CheckInput("qkv", qkv, {num_rows, num_keys * config.qk_head_dim + v_width}, dtype);
  } else {
    tensors.CheckInput("qkv", qkv, {num_rows, num_keys + config.num_kv_heads, config.qk_head_dim},
                       dtype);
  }
  tensors.CheckOutput("o", o, {num_rows, config.num_qo_heads, config.v_head_dim}, dtype);
  const Alignment alignment = backend.page_alignment();
  tensors.CheckAlignment("o", o, alignment);
  const SinkLogits& sinks = SinksOf(layer);
  sinks.Check(sink_logits);
  if (reach.lists) listed_.Check(layer, *reach.lists);
  const int64_t num_pages = reach.budget ? PagesToChoose(layer, *reach.budget) : 0;
  tensors.MakeCompact({&qkv}, alignment);
  const GroupWorkspace& workspace = step_->workspaces().group(layer.group);
  const AttentionCall call{sm_scale, workspace.q.get(), o, workspace.lse.get(),
                           sinks.Argument(sink_logits)};
  if (reach.lists || num_pages > 0) {
    backend.Append(qkv);
    step_->NoteAppend(layer);  // before bounds are looked at
    listed_.Attend(layer, call, reach.lists ? *reach.lists : ChoosePages(layer, call.q, num_pages));
  } else {
    backend.AppendAndAttend(qkv, call, workspace.k.get(), workspace.v.get());
    step_->NoteAppend(layer);
  }
  sinks.Apply(sink_logits, call);
}

void Attention::AttendShared(int64_t source_id, double sm_scale, ffi::Tensor q,
                             ffi::Tensor current_k, ffi::Tensor current_v, ffi::Tensor o,
                             ffi::Optional<ffi::Tensor> sink_logits) {
  const Step::LayerCall scope(step_, "attention_with_shared_kv");
  CheckScale(sm_scale);
  const StoredLayer& source = storage_.At(source_id);
  const LayerConfig& config = source.config;
  if (config.is_mla()) {
    Raise(kValueError, "attention_with_shared_kv needs a source with K and V, and layer ",
          source_id, " is an MLA layer");
  }
  AttentionBackend& backend = *layers_[source.index].backend;
  TensorChecks& tensors = step_->tensors();
  const int64_t num_rows = step_->plan().num_rows();
  const DLDataType dtype = storage_.config().dtype;
  tensors.CheckInput("q", q, {num_rows, config.num_qo_heads, config.qk_head_dim}, dtype);
  tensors.CheckInput("current_k", current_k, {num_rows, config.num_kv_heads, config.qk_head_dim},
                     dtype);
  tensors.CheckInput("current_v", current_v, {num_rows, config.num_kv_heads, config.v_head_dim},
                     dtype);
  tensors.CheckOutput("o", o, {num_rows, config.num_qo_heads, config.v_head_dim}, dtype);
  if (!step_->HasAppended(source)) {
    Raise(kValueError, "layer ", source_id,
          " has not appended this step's K and V; run its attention before the layers that share "
          "them");
  }
  const Alignment alignment = backend.page_alignment();
  tensors.CheckAlignment("o", o, alignment);
  const SinkLogits& sinks = SinksOf(source);
  sinks.Check(sink_logits);
  tensors.MakeCompact({&q, &current_k, &current_v}, alignment);
  const AttentionCall call{sm_scale, q, o, step_->workspaces().group(source.group).lse.get(),
                           sinks.Argument(sink_logits)};
  // The source has appended first, so its pages hold current_k and current_v already.
  backend.Attend(call, current_k, current_v);
  sinks.Apply(sink_logits, call);
}

void Attention::SelfAttend(int64_t layer_id, double sm_scale, ffi::Tensor q, ffi::Tensor k,
                           ffi::Tensor v, ffi::Tensor o, ffi::Tensor lse,
                           ffi::Optional<ffi::Tensor> sink_logits) {
  const Step::LayerCall scope(step_, "self_attention");
  CheckScale(sm_scale);
  const StoredLayer& layer = storage_.At(layer_id);
  const SinkLogits& sinks = SinksOf(layer);
  sinks.Check(sink_logits);
  if (layer.config.is_mla()) {
    return layers_[layer.index].mla->SelfAttend(sm_scale, q, k, v, o, lse,
                                                sinks.Argument(sink_logits));
  }
  const LayerConfig& config = layer.config;
  AttentionBackend& backend = *layers_[layer.index].backend;
  TensorChecks& tensors = step_->tensors();
  const ForwardPlan& plan = step_->plan();
  const int64_t num_rows = plan.num_rows();
  const DLDataType dtype = storage_.config().dtype;
  tensors.CheckInput("q", q, {num_rows, config.num_qo_heads, config.qk_head_dim}, dtype);
  tensors.CheckInput("k", k, {num_rows, config.num_kv_heads, config.qk_head_dim}, dtype);
  tensors.CheckInput("v", v, {num_rows, config.num_kv_heads, config.v_head_dim}, dtype);
  tensors.CheckOutput("o", o, {num_rows, config.num_qo_heads, config.v_head_dim}, dtype);
  tensors.CheckOutput("lse", lse, {num_rows, config.num_qo_heads}, kFloat32);
  const Alignment alignment = backend.row_alignment();
  for (const ffi::Tensor& each : {o, lse}) {
    tensors.CheckAlignment("every tensor", each, alignment);
  }
  if (plan.has_windows() && config.window == 0 && layer.kernels->IsOwn(config.prefill())) {
    plan.RequireRowsSeeEachOther("self_attention");
  }
  if (plan.has_spans()) {
    Raise(kValueError, "self_attention is not possible in a step with spans; call attention");
  }
  backend.RequireRowKernel();  // before anything is written
  tensors.MakeCompact({&q, &k, &v}, alignment);
  AppendRows(layer, k, v, step_->arrays().slots(layer.group));
  step_->NoteAppend(layer);
  const AttentionCall call{sm_scale, q, o, lse, sinks.Argument(sink_logits)};
  backend.AttendToRows(call, k, v);
  sinks.Apply(sink_logits, call);
}

void Attention::CrossAttend(int64_t layer_id, double sm_scale, ffi::Tensor q, ffi::Tensor o,
                            ffi::Tensor lse, ffi::Optional<ffi::Tensor> sink_logits) {
  const Step::LayerCall scope(step_, "cross_attention");
  CheckScale(sm_scale);
  const StoredLayer& layer = storage_.At(layer_id);
  const SinkLogits& sinks = SinksOf(layer);
  sinks.Check(sink_logits);
  if (layer.config.is_mla()) {
    return layers_[layer.index].mla->CrossAttend(sm_scale, q, o, lse, sinks.Argument(sink_logits));
  }
  const LayerConfig& config = layer.config;
  AttentionBackend& backend = *layers_[layer.index].backend;
  TensorChecks& tensors = step_->tensors();
  const int64_t num_rows = step_->plan().num_rows();
  const DLDataType dtype = storage_.config().dtype;
  tensors.CheckInput("q", q, {num_rows, config.num_qo_heads, config.qk_head_dim}, dtype);
  tensors.CheckOutput("o", o, {num_rows, config.num_qo_heads, config.v_head_dim}, dtype);
  tensors.CheckOutput("lse", lse, {num_rows, config.num_qo_heads}, kFloat32);
  const Alignment alignment = backend.page_alignment();
  for (const ffi::Tensor& each : {o, lse}) {
    tensors.CheckAlignment("every tensor", each, alignment);
  }
  tensors.MakeCompact({&q}, alignment);
  const AttentionCall call{sm_scale, q, o, lse, sinks.Argument(sink_logits)};
  backend.AttendToPast(call);
  sinks.Apply(sink_logits, call);
}

void Attention::CrossAttendToList(int64_t layer_id, double sm_scale, ffi::Tensor q,
                                  ffi::Tensor positions, ffi::Tensor o, ffi::Tensor lse,
                                  ffi::Optional<ffi::Tensor> sink_logits) {
  const Step::LayerCall scope(step_, "cross_attention_to_positions");
  AttendToLists(layer_id, sm_scale, std::move(q), {std::move(positions)}, o, lse, sink_logits);
}

void Attention::CrossAttendToBlocks(int64_t layer_id, int64_t block_size, double sm_scale,
                                    ffi::Tensor q, ffi::Tensor blocks, ffi::Tensor o,
                                    ffi::Tensor lse, ffi::Optional<ffi::Tensor> sink_logits) {
  const Step::LayerCall scope(step_, "cross_attention_to_blocks");
  AttendToLists(layer_id, sm_scale, std::move(q), {std::move(blocks), block_size}, o, lse,
                sink_logits);
}

void Attention::AttendToLists(int64_t layer_id, double sm_scale, ffi::Tensor q,
                              const RowLists& lists, const ffi::Tensor& o, const ffi::Tensor& lse,
                              const ffi::Optional<ffi::Tensor>& sink_logits) {
  CheckScale(sm_scale);
  const StoredLayer& layer = storage_.At(layer_id);
  const LayerConfig& config = layer.config;
  TensorChecks& tensors = step_->tensors();
  const int64_t num_rows = step_->plan().num_rows();
  const DLDataType dtype = storage_.config().dtype;
  tensors.CheckInput("q", q, {num_rows, config.num_qo_heads, config.qk_head_dim}, dtype);
  tensors.CheckOutput("o", o, {num_rows, config.num_qo_heads, config.v_head_dim}, dtype);
  tensors.CheckOutput("lse", lse, {num_rows, config.num_qo_heads}, kFloat32);
  const SinkLogits& sinks = SinksOf(layer);
  sinks.Check(sink_logits);
  listed_.Check(layer, lists);
  if (!step_->HasAppended(layer)) {
    Raise(kValueError, "layer ", layer_id, " has not appended this step's rows, which lists may ",
          "name; call ", config.is_mla() ? "append_mla_kv" : "attention", " before it");
  }
  tensors.MakeCompact({&q}, Alignment::kElement);
  const AttentionCall call{sm_scale, q, o, lse, sinks.Argument(sink_logits)};
  listed_.Attend(layer, call, lists);
  sinks.Apply(sink_logits, call);
}

void Attention::ChooseTopK(int64_t layer_id, double scale, ffi::Tensor q, ffi::Tensor weights,
                           ffi::Tensor positions) {
  const Step::LayerCall scope(step_, "index_top_k");
  CheckScale(scale);
  const StoredLayer& layer = storage_.At(layer_id);
  choice_.TopK(layer, scale, std::move(q), std::move(weights), positions);
}

void Attention::ChooseTopBlocks(int64_t layer_id, int64_t block_size, int64_t init_blocks,
                                int64_t local_blocks, ffi::Tensor q, ffi::Tensor blocks) {
  const Step::LayerCall scope(step_, "index_top_blocks");
  const StoredLayer& layer = storage_.At(layer_id);
  choice_.TopBlocks(layer, {block_size, init_blocks, local_blocks}, std::move(q), blocks);
}

void Attention::AppendMLAKV(int64_t layer_id, ffi::Tensor kv) {
  const Step::LayerCall scope(step_, "append_mla_kv");
  const StoredLayer& layer = storage_.At(layer_id);
  if (!layer.config.is_mla()) {
    Raise(kValueError, "append_mla_kv needs an MLA layer, and layer ", layer_id, " is none");
  }
  layers_[layer.index].mla->Append(std::move(kv));
}

ffi::Array<ffi::Tensor> Attention::Merge(ffi::Tensor o, ffi::Tensor lse, ffi::Tensor o_other,
                                         ffi::Tensor lse_other) {
  if (!o.defined()) Raise(kTypeError, "o must be a tensor, got None");
  if (o.ndim() != 3) {
    Raise(kValueError, "o must have shape [rows, heads, dim], got ", ShapeText(o.shape()));
  }
  TensorChecks& tensors = step_->tensors();
  const DLDataType dtype = storage_.config().dtype;
  tensors.CheckOutput("o", o, {o.size(0), o.size(1), o.size(2)}, dtype);
  tensors.CheckOutput("lse", lse, {o.size(0), o.size(1)}, kFloat32);
  tensors.CheckInput("o_other", o_other, {o.size(0), o.size(1), o.size(2)}, dtype);
  tensors.CheckInput("lse_other", lse_other, {o.size(0), o.size(1)}, kFloat32);
  tensors.MakeCompact({&o_other, &lse_other}, Alignment::kElement);
  MergeKernels(o.size(1), o.size(2)).Get(KernelName::kMerge)(o, lse, o_other, lse_other);
  return {o, lse};
}

const KernelSet& Attention::MergeKernels(int64_t num_heads, int64_t width) const {
  // The call names no layer, so the shape decides whose kernel fits.
  for (const StoredLayer& layer : storage_.layers()) {
    const LayerConfig& config = layer.config;
    if (!config.is_attention() || !layer.kernels->Has(KernelName::kMerge)) continue;
    int64_t merged = config.original_v_head_dim ? config.original_v_head_dim : config.v_head_dim;
    if (config.num_qo_heads == num_heads && merged == width) return *layer.kernels;
  }
  return storage_.config().kernel_sets[0];  // which may take any shape, or refuse it
}

}  // namespace pagedkv
