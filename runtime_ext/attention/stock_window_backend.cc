// SPDX-License-Identifier: Apache-2.0
/*!
 * \file stock_window_backend.cc
 * \brief Cuts a step into chunks that the stock cache's window kernels serve exactly.
 */
#include "attention/stock_window_backend.h"

#include <algorithm>
#include <utility>

namespace pagedkv {

StockWindowBackend::StockWindowBackend(const CacheConfig& config, size_t num_groups,
                                       ByteCounter counter)
    : page_size_(config.page_size),
      device_(config.device),
      has_merged_aux_(config.has_merged_aux),
      dtype_(config.dtype),
      counter_(std::move(counter)),
      whole_(num_groups),
      past_(num_groups) {
  int64_t o_bytes = 0, lse_bytes = 0;
  for (const LayerConfig& layer : config.layers) {
    if (!Serves(config.kernel_sets[layer.kernel_set], layer)) continue;
    o_bytes = std::max(o_bytes, layer.num_qo_heads * layer.v_head_dim * dtype_.bits / 8);
    lse_bytes = std::max<int64_t>(lse_bytes, layer.num_qo_heads * sizeof(float));
  }
  const int64_t num_rows = config.prefill_chunk_size;
  o_workspace_ = AllocateTensor({num_rows * o_bytes}, kByte, device_, counter_);
  lse_workspace_ = AllocateTensor({num_rows * lse_bytes}, kByte, device_, counter_);
}

bool StockWindowBackend::IsNeededBy(const CacheConfig& config) {
  return std::any_of(config.layers.begin(), config.layers.end(), [&](const LayerConfig& layer) {
    return Serves(config.kernel_sets[layer.kernel_set], layer);
  });
}

void StockWindowBackend::BeginStep() {
  for (std::vector<Tables>* all : {&whole_, &past_}) {
    for (Tables& tables : *all) tables.is_made = false;
  }
}

std::vector<StockWindowBackend::Chunk> StockWindowBackend::Cut(const ForwardPlan& batch,
                                                               int64_t window) {
  std::vector<Chunk> chunks;
  const int64_t most_rows = std::max<int64_t>(window - 1, 1);
  for (int64_t i = 0; i < batch.num_sequences(); ++i) {
    const int64_t past = batch.PastLength(i), end = past + batch.NumAppend(i);
    if (batch.is_decode()) {  // the pages hold the row's own position too
      chunks.push_back({&batch.SequenceAt(i), 1, std::max<int64_t>(end - window, 0), end});
      continue;
    }
    for (int64_t first = past; first < end; first += most_rows) {
      const int64_t begin = std::max<int64_t>(first - (window - 1), 0);
      chunks.push_back({&batch.SequenceAt(i), std::min(most_rows, end - first), begin, first});
    }
  }
  return chunks;
}

std::vector<StockWindowBackend::Chunk> StockWindowBackend::CutForPast(const ForwardPlan& batch,
                                                                      int64_t window) {
  std::vector<Chunk> chunks;
  for (int64_t i = 0; i < batch.num_sequences(); ++i) {
    const int64_t past = batch.PastLength(i), num_rows = batch.NumAppend(i);
    // Rows from `window - 1` on see nothing of it.
    const int64_t num_seeing = std::min(num_rows, window - 1);
    const Sequence& sequence = batch.SequenceAt(i);
    if (num_seeing > 0) {
      chunks.push_back({&sequence, num_seeing, std::max<int64_t>(past - (window - 1), 0), past});
    }
    if (num_seeing < num_rows) chunks.push_back({&sequence, num_rows - num_seeing, past, past});
  }
  return chunks;
}

const StockWindowBackend::Tables& StockWindowBackend::Make(Tables* tables, int32_t group,
                                                           const std::vector<Chunk>& chunks) {
  auto num_pages = [&](const Chunk& chunk) {
    if (chunk.begin == chunk.end) return int64_t{0};
    return (chunk.end - 1) / page_size_ - chunk.begin / page_size_ + 1;
  };
  const auto num_chunks = static_cast<int64_t>(chunks.size());
  int64_t total_pages = 0;
  for (const Chunk& chunk : chunks) total_pages += num_pages(chunk);
  std::vector<int64_t> sizes(kNum, num_chunks);
  sizes[kRowIndptr] = sizes[kPageIndptr] = num_chunks + 1;
  sizes[kPageValues] = total_pages;
  sizes[kLengthInfo] = 3 * num_chunks;
  if (tables->arrays == nullptr) {
    tables->arrays = std::make_unique<AuxData>(has_merged_aux_, device_, sizes, counter_);
  }
  AuxData& arrays = *tables->arrays;
  arrays.Layout(sizes);
  int32_t *rows = arrays.host(kRowIndptr), *indptr = arrays.host(kPageIndptr),
          *values = arrays.host(kPageValues), *info = arrays.host(kLengthInfo);
  rows[0] = indptr[0] = 0;
  for (int64_t i = 0; i < num_chunks; ++i) {
    const Chunk& chunk = chunks[i];
    const bool has_pages = chunk.begin < chunk.end;
    const int64_t first_page = chunk.begin / page_size_ - chunk.sequence->first_pages[group];
    const std::vector<int32_t>& pages = chunk.sequence->pages[group];
    rows[i + 1] = rows[i] + static_cast<int32_t>(chunk.num_rows);
    indptr[i + 1] = indptr[i] + static_cast<int32_t>(num_pages(chunk));
    values = std::copy_n(pages.begin() + (has_pages ? first_page : 0), num_pages(chunk), values);
    info[i] = has_pages ? static_cast<int32_t>((chunk.end - 1) % page_size_ + 1) : 0;
    info[num_chunks + i] = has_pages ? static_cast<int32_t>(chunk.begin % page_size_) : 0;
    info[2 * num_chunks + i] = 0;  // sinks
    arrays.host(kFirstSeen)[i] = static_cast<int32_t>(chunk.begin);
    arrays.host(kPastLengths)[i] = static_cast<int32_t>(chunk.end);
  }
  arrays.Upload();
  const int64_t shape[] = {3, num_chunks}, strides[] = {num_chunks, 1};
  tables->length_info =
      arrays.view(kLengthInfo).as_strided(ffi::ShapeView(shape, 2), ffi::ShapeView(strides, 2), 0);
  tables->has_pages = total_pages > 0;
  tables->is_made = true;
  return *tables;
}

void StockWindowBackend::Paged(const StockWindowCall& call, const Tables& tables,
                               const ffi::Tensor& o, const ffi::Tensor& lse) {
  const LayerConfig& layer = call.layer;
  const AuxData& arrays = *tables.arrays;
  if (call.batch.is_decode()) {
    call.kernels.Get(KernelName::kDecodeSliding)(
        call.q, call.pages, arrays.view(kPageIndptr), arrays.view(kPageValues), tables.length_info,
        arrays.view(kFirstSeen), call.positions, o, lse, call.rotary_mode, layer.rope_scale,
        layer.rope_theta, call.sm_scale);
  } else {
    call.kernels.Get(KernelName::kPrefillSliding)(
        call.q, arrays.view(kRowIndptr), call.pages, arrays.view(kPageIndptr),
        arrays.view(kPageValues), tables.length_info, arrays.view(kFirstSeen), call.positions, o,
        lse, /*causal=*/int64_t{1}, call.rotary_mode, layer.rope_scale, layer.rope_theta,
        call.sm_scale);
  }
}

void StockWindowBackend::Attend(const StockWindowCall& call, const ffi::Tensor& k,
                                const ffi::Tensor& v) {
  const LayerConfig& layer = call.layer;
  Tables& tables = whole_[call.group];
  if (!tables.is_made) Make(&tables, call.group, Cut(call.batch, layer.window));
  if (call.batch.is_decode()) return Paged(call, tables, call.o, call.lse);
  const ffi::Tensor& rows = tables.arrays->view(kRowIndptr);
  call.kernels.Get(KernelName::kPrefillRagged)(
      call.q, rows, k, v, rows, call.positions, tables.arrays->view(kPastLengths), call.o, call.lse,
      /*causal=*/int64_t{1}, call.rotary_mode, layer.rope_scale, layer.rope_theta, call.sm_scale);
  if (!tables.has_pages) return;
  StepView o(dtype_, {layer.num_qo_heads, layer.v_head_dim}), lse(kFloat32, {layer.num_qo_heads});
  o.Set(o_workspace_, 0, call.batch.num_rows());
  lse.Set(lse_workspace_, 0, call.batch.num_rows());
  Paged(call, tables, o.get(), lse.get());
  call.kernels.Get(KernelName::kMerge)(call.o, call.lse, o.get(), lse.get());
}

void StockWindowBackend::AttendToPast(const StockWindowCall& call) {
  Tables& tables = past_[call.group];
  if (!tables.is_made) {
    Make(&tables, call.group, CutForPast(call.batch, call.layer.window));
  }
  Paged(call, tables, call.o, call.lse);
}

}  // namespace pagedkv
