// SPDX-License-Identifier: Apache-2.0
/*!
 * \file mla_attention.cc
 * \brief What an MLA layer calls within a step.
 *
 * A model appends the step's latent rows, then attends in one of three ways:
 *   - self_attention, not absorbed, over the rows of this step: a prompt without a past;
 *   - cross_attention alone, absorbed, in a step of one row per sequence or of token trees: it
 * covers the pages with this step's rows;
 *   - self_attention, then cross_attention, which then covers the past alone, and their merge.
 * So cross_attention covers this step's rows where every sequence appends one row, or the rows are
 * tree nodes (of trees that branch or not), and self_attention of the layer was not called in the
 * step. In all other steps it covers the past.
 */
#include "base/error.h"
#include "ffi/paged_kv_cache.h"

namespace pagedkv {

namespace {

/*! \brief The last dimension of a tensor [rows, heads, dim]; the whole shape is checked after it.
 */
int64_t WidthOf(const char* name, const ffi::Tensor& tensor) {
  if (!tensor.defined()) Raise(kTypeError, name, " must be a tensor, got None");
  if (tensor.ndim() != 3) Raise(kValueError, name, " must have 3 dimensions, got ", tensor.ndim());
  return tensor.size(2);
}

}  // namespace

PagedKVCacheObj::Layer& PagedKVCacheObj::MLALayerAt(int64_t layer_id, const char* what) {
  Layer& layer = LayerAt(layer_id);
  if (!layer.config.is_mla()) {
    Raise(kValueError, what, " needs an MLA layer, and layer ", layer_id, " is none");
  }
  return layer;
}

void PagedKVCacheObj::AppendMLAKV(int64_t layer_id, ffi::Tensor kv) {
  const LayerCallScope scope(this, "append_mla_kv");
  Layer& layer = MLALayerAt(layer_id, "append_mla_kv");
  CheckInput("kv", kv, {plan_.num_rows(), layer.config.qk_head_dim}, config_.dtype);
  const ffi::Function& append = KernelsOf(layer).Get(KernelName::kTransposeAppendMLA);
  MakeCompact({&kv}, HasStockKernel(layer, {KernelName::kTransposeAppendMLA}));
  append(layer.pages, kv, aux_->view(ArrayIndex(layer.group, kSlots)));
  layer.last_append = num_forwards_;
}

void PagedKVCacheObj::MLASelfAttention(Layer* layer, double sm_scale, ffi::Tensor q, ffi::Tensor k,
                                       ffi::Tensor v, const ffi::Tensor& o,
                                       const ffi::Tensor& lse) {
  const LayerConfig& config = layer->config;
  const int64_t num_rows = plan_.num_rows(), num_heads = config.num_qo_heads;
  // The positional form of the stock front end does not tell these dims: then the kernel checks.
  const bool is_known = config.original_qk_head_dim != 0;
  const int64_t qk_head_dim = is_known ? config.original_qk_head_dim : WidthOf("k", k);
  const int64_t v_head_dim = is_known ? config.original_v_head_dim : WidthOf("v", v);
  CheckInput("q", q, {num_rows, num_heads, qk_head_dim}, config_.dtype);
  CheckInput("k", k, {num_rows, num_heads, qk_head_dim}, config_.dtype);
  CheckInput("v", v, {num_rows, num_heads, v_head_dim}, config_.dtype);
  CheckTensor("o", o, {num_rows, num_heads, v_head_dim}, config_.dtype);
  CheckTensor("lse", lse, {num_rows, num_heads}, kFloat32);
  if (layer->last_whole_attention == num_forwards_) {
    Raise(kValueError,
          "cross_attention of this MLA layer has covered this step's rows already; where every "
          "sequence appends one row, and with token trees, call self_attention before it or not "
          "at all");
  }
  const bool is_stock = HasStockKernel(*layer, {RaggedKernel(*layer)});
  if (is_stock) {
    for (const ffi::Tensor& each : {o, lse}) CheckAlignment("every tensor", each);
  }
  MakeCompact({&q, &k, &v}, is_stock);
  RaggedAttention(*layer, sm_scale, q, k, v, o, lse);
  layer->last_self_attention = num_forwards_;
}

void PagedKVCacheObj::MLACrossAttention(Layer* layer, double sm_scale, ffi::Tensor q,
                                        const ffi::Tensor& o, const ffi::Tensor& lse) {
  const LayerConfig& config = layer->config;
  const int64_t num_rows = plan_.num_rows(), num_heads = config.num_qo_heads;
  CheckInput("q", q, {num_rows, num_heads, config.qk_head_dim}, config_.dtype);
  CheckTensor("o", o, {num_rows, num_heads, config.v_head_dim}, config_.dtype);
  CheckTensor("lse", lse, {num_rows, num_heads}, kFloat32);
  const bool is_stock = HasStockKernel(*layer, {KernelName::kMLAPrefill});
  if (is_stock) {
    for (const ffi::Tensor& each : {o, lse}) CheckAlignment("every tensor", each);
  }
  const bool covers_step =
      (plan_.is_decode() || plan_.has_trees()) && layer->last_self_attention != num_forwards_;
  if (covers_step && layer->last_append != num_forwards_) {
    Raise(kValueError,
          "where every sequence appends one row, and with token trees, cross_attention of an MLA "
          "layer covers this step's rows; call append_mla_kv before it");
  }
  MakeCompact({&q}, is_stock);
  const PageArrays pages = covers_step ? StepPages(*layer) : PastPages(*layer);
  if (UsesTreeKernel(*layer, pages.range)) {
    TreeAttention(*layer, pages, sm_scale, q, o, lse);
  } else {
    KernelsOf(*layer).Get(KernelName::kMLAPrefill)(
        q, common(kQueryIndptr), layer->pages, pages.indptr, pages.values, pages.last_page_lengths,
        o, lse, /*causal=*/static_cast<int64_t>(covers_step), sm_scale);
  }
  AttendToSegments(*layer, sm_scale, q, o, lse);
  if (covers_step) layer->last_whole_attention = num_forwards_;
}

}  // namespace pagedkv
