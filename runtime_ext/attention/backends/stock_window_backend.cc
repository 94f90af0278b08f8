// SPDX-License-Identifier: Apache-2.0
/*!
 * \file stock_window_backend.cc
 * \brief A layer with a window over kernels of the stock cache.
 */
#include "attention/backends/stock_window_backend.h"

namespace pagedkv {

StockWindowBackend::StockWindowBackend(Step* step, const StoredLayer& layer,
                                       const SharedBackendState& shared)
    : PagedBackend(step, layer, shared),
      tables_(shared.stock_windows.get()),
      o_(config().dtype, {layer.config.num_qo_heads, layer.config.v_head_dim}),
      lse_(kFloat32, {layer.config.num_qo_heads}) {}

void StockWindowBackend::Attend(const AttentionCall& call, const ffi::Tensor& k,
                                const ffi::Tensor& v) {
  if (HasTreeMask(PageRange::kWithStep)) return PagedBackend::Attend(call, k, v);
  const ChunkTable& chunks = tables_->WithStep(layer_.group);
  if (plan().is_decode()) return AttendToChunkPages(call, chunks);
  AttendWithinChunks(call, chunks, k, v);
  if (!chunks.has_pages) return;
  o_.Set(tables_->o_workspace(), 0, plan().num_rows());
  lse_.Set(tables_->lse_workspace(), 0, plan().num_rows());
  AttendToChunkPages({call.sm_scale, call.q, o_.get(), lse_.get()}, chunks);
  layer_.kernels->Get(KernelName::kMerge)(call.o, call.lse, o_.get(), lse_.get());
}

void StockWindowBackend::AttendToPast(const AttentionCall& call) {
  if (HasTreeMask(PageRange::kPast)) return PagedBackend::AttendToPast(call);
  AttendToChunkPages(call, tables_->Past(layer_.group));
}

void StockWindowBackend::AttendWithinChunks(const AttentionCall& call, const ChunkTable& chunks,
                                            const ffi::Tensor& k, const ffi::Tensor& v) const {
  const LayerConfig& layer = layer_.config;
  layer_.kernels->Get(KernelName::kPrefillRagged)(
      call.q, chunks.row_indptr(), k, v, chunks.row_indptr(), step_->arrays().query_positions(),
      chunks.past_lengths(), call.o, call.lse, /*causal=*/int64_t{1}, layer.rotary_mode(),
      layer.rope_scale, layer.rope_theta, call.sm_scale);
}

void StockWindowBackend::AttendToChunkPages(const AttentionCall& call,
                                            const ChunkTable& chunks) const {
  const LayerConfig& layer = layer_.config;
  const ffi::Tensor& positions = step_->arrays().query_positions();
  if (plan().is_decode()) {
    layer_.kernels->Get(KernelName::kDecodeSliding)(
        call.q, layer_.pages, chunks.page_indptr(), chunks.page_ids(), chunks.length_info,
        chunks.first_seen(), positions, call.o, call.lse, layer.rotary_mode(), layer.rope_scale,
        layer.rope_theta, call.sm_scale);
  } else {
    layer_.kernels->Get(KernelName::kPrefillSliding)(
        call.q, chunks.row_indptr(), layer_.pages, chunks.page_indptr(), chunks.page_ids(),
        chunks.length_info, chunks.first_seen(), positions, call.o, call.lse,
        /*causal=*/int64_t{1}, layer.rotary_mode(), layer.rope_scale, layer.rope_theta,
        call.sm_scale);
  }
}

}  // namespace pagedkv
