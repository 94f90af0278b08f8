// SPDX-License-Identifier: Apache-2.0
/*!
 * \file stock_window_tables.cc
 * \brief Cuts a step into chunks that the stock cache's window kernels serve exactly.
 */
#include "attention/backends/stock_window_tables.h"

#include <algorithm>

#include "config/layer_kernels.h"

namespace pagedkv {

StockWindowTables::StockWindowTables(const Step& step)
    : step_(step), with_step_(step.storage().num_groups()), past_(step.storage().num_groups()) {
  const CacheConfig& config = step.storage().config();
  int64_t o_bytes = 0, lse_bytes = 0;
  for (const StoredLayer& layer : step.storage().layers()) {
    const LayerConfig& shape = layer.config;
    if (!HasStockWindow(shape, *layer.kernels)) continue;
    o_bytes = std::max(o_bytes, shape.num_qo_heads * shape.v_head_dim * ItemSize(config.dtype));
    lse_bytes = std::max(lse_bytes, shape.num_qo_heads * ItemSize(kFloat32));
  }
  const int64_t num_rows = config.prefill_chunk_size;
  const ByteCounter& counter = step.storage().counter();
  o_workspace_ = AllocateTensor({num_rows * o_bytes}, kByte, config.device, counter);
  lse_workspace_ = AllocateTensor({num_rows * lse_bytes}, kByte, config.device, counter);
}

bool StockWindowTables::IsNeededBy(const CacheConfig& config) {
  return std::any_of(config.layers.begin(), config.layers.end(), [&](const LayerConfig& layer) {
    return HasStockWindow(layer, config.kernel_sets[layer.kernel_set]);
  });
}

const ChunkTable& StockWindowTables::WithStep(int32_t group) {
  ChunkTable& table = with_step_[group];
  const int64_t window = step_.storage().groups()[group].shape.window;
  if (table.step != step_.number()) Make(&table, group, Cut(window));
  return table;
}

const ChunkTable& StockWindowTables::Past(int32_t group) {
  ChunkTable& table = past_[group];
  const int64_t window = step_.storage().groups()[group].shape.window;
  if (table.step != step_.number()) Make(&table, group, CutForPast(window));
  return table;
}

std::vector<StockWindowTables::Chunk> StockWindowTables::Cut(int64_t window) const {
  const ForwardPlan& batch = step_.plan();
  std::vector<Chunk> chunks;
  const int64_t max_rows = std::max<int64_t>(window - 1, 1);
  for (int64_t i = 0; i < batch.num_sequences(); ++i) {
    const int64_t past = batch.PastLength(i), end = past + batch.NumAppend(i);
    if (batch.is_decode()) {  // the pages hold the row's own position too
      chunks.push_back({&batch.SequenceAt(i), 1, std::max<int64_t>(end - window, 0), end});
      continue;
    }
    for (int64_t first = past; first < end; first += max_rows) {
      const int64_t begin = std::max<int64_t>(first - (window - 1), 0);
      chunks.push_back({&batch.SequenceAt(i), std::min(max_rows, end - first), begin, first});
    }
  }
  return chunks;
}

std::vector<StockWindowTables::Chunk> StockWindowTables::CutForPast(int64_t window) const {
  const ForwardPlan& batch = step_.plan();
  std::vector<Chunk> chunks;
  for (int64_t i = 0; i < batch.num_sequences(); ++i) {
    const int64_t past = batch.PastLength(i), num_rows = batch.NumAppend(i);
    // Rows from `window - 1` on see nothing of the past.
    const int64_t num_seeing = std::min(num_rows, window - 1);
    const Sequence& sequence = batch.SequenceAt(i);
    if (num_seeing > 0) {
      chunks.push_back({&sequence, num_seeing, std::max<int64_t>(past - (window - 1), 0), past});
    }
    if (num_seeing < num_rows) chunks.push_back({&sequence, num_rows - num_seeing, past, past});
  }
  return chunks;
}

void StockWindowTables::Make(ChunkTable* table, int32_t group,
                             const std::vector<Chunk>& chunks) const {
  const CacheConfig& config = step_.storage().config();
  const int64_t page_size = config.page_size;
  auto num_pages = [&](const Chunk& chunk) {
    if (chunk.begin == chunk.end) return int64_t{0};
    return (chunk.end - 1) / page_size - chunk.begin / page_size + 1;
  };
  const auto num_chunks = static_cast<int64_t>(chunks.size());
  int64_t total_pages = 0;
  for (const Chunk& chunk : chunks) total_pages += num_pages(chunk);
  std::vector<int64_t> sizes(ChunkTable::kNum, num_chunks);
  sizes[ChunkTable::kRowIndptr] = sizes[ChunkTable::kPageIndptr] = num_chunks + 1;
  sizes[ChunkTable::kPageIds] = total_pages;
  sizes[ChunkTable::kLengthInfo] = 3 * num_chunks;
  if (table->arrays == nullptr) {
    table->arrays = std::make_unique<AuxData>(config.has_merged_aux, config.device, sizes,
                                              step_.storage().counter());
  }
  AuxData& arrays = *table->arrays;
  arrays.Layout(sizes);
  int32_t *rows = arrays.host(ChunkTable::kRowIndptr),
          *indptr = arrays.host(ChunkTable::kPageIndptr),
          *page_ids = arrays.host(ChunkTable::kPageIds),
          *info = arrays.host(ChunkTable::kLengthInfo);
  rows[0] = indptr[0] = 0;
  for (int64_t i = 0; i < num_chunks; ++i) {
    const Chunk& chunk = chunks[i];
    const bool has_pages = chunk.begin < chunk.end;
    const int64_t first_page = chunk.begin / page_size - chunk.sequence->first_pages[group];
    const std::vector<int32_t>& pages = chunk.sequence->pages[group];
    rows[i + 1] = rows[i] + static_cast<int32_t>(chunk.num_rows);
    indptr[i + 1] = indptr[i] + static_cast<int32_t>(num_pages(chunk));
    page_ids =
        std::copy_n(pages.begin() + (has_pages ? first_page : 0), num_pages(chunk), page_ids);
    info[i] = has_pages ? static_cast<int32_t>((chunk.end - 1) % page_size + 1) : 0;
    info[num_chunks + i] = has_pages ? static_cast<int32_t>(chunk.begin % page_size) : 0;
    info[2 * num_chunks + i] = 0;  // attention sinks
    arrays.host(ChunkTable::kFirstSeen)[i] = static_cast<int32_t>(chunk.begin);
    arrays.host(ChunkTable::kPastLengths)[i] = static_cast<int32_t>(chunk.end);
  }
  arrays.Upload();
  const int64_t shape[] = {3, num_chunks}, strides[] = {num_chunks, 1};
  table->length_info = arrays.view(ChunkTable::kLengthInfo)
                           .as_strided(ffi::ShapeView(shape, 2), ffi::ShapeView(strides, 2), 0);
  table->has_pages = total_pages > 0;
  table->step = step_.number();
}

}  // namespace pagedkv
