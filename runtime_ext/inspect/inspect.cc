// SPDX-License-Identifier: Apache-2.0
/*!
 * \file inspect.cc
 * \brief What looks at a cache from outside: K and V of a sequence, statistics, integrity.
 */
#include <tvm/ffi/dtype.h>

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "ffi/paged_kv_cache.h"

namespace pagedkv {

using StringMap = ffi::Map<ffi::String, ffi::Any>;

int64_t PagedKVCacheObj::CountUniformLayers(LayerKind kind, const char* what) const {
  int64_t count = 0;
  for (const Layer& layer : layers_) {
    if (layer.config.kind != kind) continue;
    ++count;
    if (!layer.config.HasShapeOf(ShapeOf(kind))) {
      Raise(kValueError, what, " takes all ", ToString(kind),
            " layers in one tensor, but those of this cache differ in their heads");
    }
  }
  if (count == 0) Raise(kValueError, what, " needs layers of kind ", ToString(kind));
  return count;
}

const LayerConfig& PagedKVCacheObj::ShapeOf(LayerKind kind) const {
  return std::find_if(layers_.begin(), layers_.end(),
                      [&](const Layer& layer) { return layer.config.kind == kind; })
      ->config;
}

void PagedKVCacheObj::CheckPositions(const Sequence& sequence, int64_t begin, int64_t end) const {
  if (begin < 0 || begin > end || end > sequence.length) {
    Raise(kValueError, "positions [", begin, ", ", end, ") are not within the ", sequence.length,
          " of sequence ", sequence.id);
  }
  if (begin < end) table_.RequireKept(sequence, begin);
}

/*! \brief Calls visit(layer, plane, row offset in K or V, row offset in the pages), in bytes. */
template <typename Visitor>
void PagedKVCacheObj::VisitRows(LayerKind kind, const Sequence& sequence, int64_t begin,
                                int64_t end, Visitor visit) const {
  const int64_t page_size = config_.page_size;
  int64_t l = 0;  // among the layers of this kind
  for (const Layer& layer : layers_) {
    if (layer.config.kind != kind) continue;
    const int64_t num_heads = layer.config.num_kv_heads;
    const int64_t num_planes = layer.config.rows_per_slot() / num_heads;
    const int64_t row_bytes = layer.config.qk_head_dim * config_.kv_dtype.bits / 8;
    for (int64_t position = begin; position < end; ++position) {
      int64_t page = sequence.pages[layer.group][table_.PageIndex(sequence, layer.group, position)];
      int64_t offset = table_.OffsetInPage(sequence, position);
      int64_t row = (l * (end - begin) + position - begin) * num_heads;
      for (int64_t head = 0; head < num_heads; ++head) {
        for (int64_t plane = 0; plane < num_planes; ++plane) {
          int64_t paged_row = ((page * num_planes + plane) * num_heads + head) * page_size + offset;
          visit(layer, plane, (row + head) * row_bytes, paged_row * row_bytes, row_bytes);
        }
      }
    }
    ++l;
  }
}

/*! \brief As VisitRows, after the pages that are shared with other sequences were copied. */
template <typename Visitor>
void PagedKVCacheObj::WriteRows(LayerKind kind, Sequence* sequence, int64_t begin, int64_t count,
                                Visitor visit) {
  if (count == 0) return;
  table_.RequireKept(*sequence, begin);
  phase_ = Phase::kPlanning;
  std::vector<PageCopy> copies;
  try {
    copies = table_.AcquireCopies(sequence, begin, begin + count);
    CopyPages(copies);
  } catch (...) {
    table_.ReleaseCopies(copies, /*were_made=*/true);
    phase_ = Phase::kIdle;
    throw;
  }
  table_.CommitCopies(copies);
  table_.Overwrite(*sequence, begin, begin + count);
  num_page_copies_ += static_cast<int64_t>(copies.size());
  phase_ = Phase::kIdle;
  VisitRows(kind, *sequence, begin, begin + count, visit);
}

void PagedKVCacheObj::DebugGetKV(int64_t sequence_id, int64_t begin, int64_t end, ffi::Tensor k,
                                 ffi::Tensor v) {
  const int64_t num_layers = CountUniformLayers(LayerKind::kMHA, "debug_get_kv");
  const Sequence& sequence = table_.At(sequence_id);
  CheckPositions(sequence, begin, end);
  const LayerConfig& shape = ShapeOf(LayerKind::kMHA);
  CheckTensor("k", k, {num_layers, end - begin, shape.num_kv_heads, shape.qk_head_dim},
              config_.kv_dtype);
  CheckTensor("v", v, {num_layers, end - begin, shape.num_kv_heads, shape.v_head_dim},
              config_.kv_dtype);
  const StreamOrder::Call on_stream(&stream_order_);
  void* stream = CurrentStream(config_.device);
  VisitRows(LayerKind::kMHA, sequence, begin, end,
            [&](const Layer& layer, int64_t plane, int64_t offset, int64_t paged, int64_t bytes) {
              CopyBytes(layer.pages, paged, plane == 0 ? k : v, offset, bytes, stream);
            });
}

void PagedKVCacheObj::DebugGetKVMLA(int64_t sequence_id, int64_t begin, int64_t end,
                                    ffi::Tensor kv) {
  const int64_t num_layers = CountUniformLayers(LayerKind::kMLA, "debug_get_kv_mla");
  const Sequence& sequence = table_.At(sequence_id);
  CheckPositions(sequence, begin, end);
  CheckTensor("kv", kv, {num_layers, end - begin, ShapeOf(LayerKind::kMLA).qk_head_dim},
              config_.kv_dtype);
  const StreamOrder::Call on_stream(&stream_order_);
  void* stream = CurrentStream(config_.device);
  VisitRows(LayerKind::kMLA, sequence, begin, end,
            [&](const Layer& layer, int64_t, int64_t offset, int64_t paged, int64_t bytes) {
              CopyBytes(layer.pages, paged, kv, offset, bytes, stream);
            });
}

void PagedKVCacheObj::DebugSetKV(int64_t sequence_id, int64_t begin, ffi::Tensor k, ffi::Tensor v) {
  RequireIdle("debug_set_kv");
  const int64_t num_layers = CountUniformLayers(LayerKind::kMHA, "debug_set_kv");
  Sequence& sequence = table_.At(sequence_id);
  if (!k.defined() || k.ndim() != 4) Raise(kValueError, "k must be a tensor with 4 dimensions");
  const int64_t count = k.size(1);
  if (begin < 0 || begin > sequence.length || count > sequence.length - begin) {
    Raise(kValueError, count, " positions from ", begin, " are not within the ", sequence.length,
          " of sequence ", sequence_id);
  }
  const LayerConfig& shape = ShapeOf(LayerKind::kMHA);
  CheckInput("k", k, {num_layers, count, shape.num_kv_heads, shape.qk_head_dim}, config_.kv_dtype);
  CheckInput("v", v, {num_layers, count, shape.num_kv_heads, shape.v_head_dim}, config_.kv_dtype);
  MakeCompact({&k, &v}, /*is_stock=*/false);
  const StreamOrder::Call on_stream(&stream_order_);
  void* stream = CurrentStream(config_.device);
  WriteRows(LayerKind::kMHA, &sequence, begin, count,
            [&](const Layer& layer, int64_t plane, int64_t offset, int64_t paged, int64_t bytes) {
              CopyBytes(plane == 0 ? k : v, offset, layer.pages, paged, bytes, stream);
            });
}

void PagedKVCacheObj::DebugSetKVMLA(int64_t sequence_id, int64_t begin, ffi::Tensor kv) {
  RequireIdle("debug_set_kv_mla");
  const int64_t num_layers = CountUniformLayers(LayerKind::kMLA, "debug_set_kv_mla");
  Sequence& sequence = table_.At(sequence_id);
  if (!kv.defined() || kv.ndim() != 3) Raise(kValueError, "kv must be a tensor with 3 dimensions");
  const int64_t count = kv.size(1);
  if (begin < 0 || begin > sequence.length || count > sequence.length - begin) {
    Raise(kValueError, count, " positions from ", begin, " are not within the ", sequence.length,
          " of sequence ", sequence_id);
  }
  CheckInput("kv", kv, {num_layers, count, ShapeOf(LayerKind::kMLA).qk_head_dim}, config_.kv_dtype);
  MakeCompact({&kv}, /*is_stock=*/false);
  const StreamOrder::Call on_stream(&stream_order_);
  void* stream = CurrentStream(config_.device);
  WriteRows(LayerKind::kMLA, &sequence, begin, count,
            [&](const Layer& layer, int64_t, int64_t offset, int64_t paged, int64_t bytes) {
              CopyBytes(kv, offset, layer.pages, paged, bytes, stream);
            });
}

StringMap PagedKVCacheObj::Stats() const {
  ffi::Array<ffi::Any> groups;
  int64_t num_pages = 0, num_free = 0, num_cached = 0, num_used = 0, num_shared = 0;
  int64_t num_reclaimed = 0;
  for (int32_t g = 0; g < table_.num_groups(); ++g) {
    const PagePool& pool = table_.pool(g);
    num_pages += pool.num_pages();
    num_free += pool.num_free();
    num_cached += pool.num_cached();
    num_reclaimed += pool.num_reclaimed();
    num_used += pool.num_used();
    num_shared += pool.num_shared();
    groups.push_back(StringMap{{"num_layers", static_cast<int64_t>(groups_[g].layers.size())},
                               {"window", groups_[g].shape.window},
                               {"num_pages", pool.num_pages()},
                               {"num_free_pages", pool.num_free()},
                               {"num_cached_pages", pool.num_cached()},
                               {"num_reclaimed_pages", pool.num_reclaimed()},
                               {"num_used_pages", pool.num_used()},
                               {"num_shared_pages", pool.num_shared()}});
  }
  int64_t num_uncommitted = 0, num_windows = 0, num_dropped = 0;
  for (const auto& [id, sequence] : table_.sequences()) {
    num_uncommitted += sequence.tree.size();
    num_windows += sequence.window.size > 0;
    num_dropped += sequence.window.num_dropped;
  }
  int64_t more_aux_bytes = 0, more_copied = 0;
  for (const auto& aux : {past_aux_.get(), commit_aux_.get(), copy_aux_.get()}) {
    if (aux == nullptr) continue;
    more_aux_bytes += aux->num_bytes();
    more_copied += aux->num_bytes_copied();
  }
  return {{"page_pool_bytes", page_pool_bytes_},
          {"workspace_bytes", workspace_bytes_},
          {"aux_bytes", aux_->num_bytes() + more_aux_bytes},
          {"allocated_bytes", allocated_bytes_->load()},
          {"num_pages", num_pages},
          {"num_free_pages", num_free},
          {"num_cached_pages", num_cached},
          {"num_reclaimed_pages", num_reclaimed},
          {"num_used_pages", num_used},
          {"num_shared_pages", num_shared},
          {"groups", groups},
          {"num_sequences", table_.num_sequences()},
          {"num_importing_sequences", table_.num_importing()},
          {"total_tokens", table_.total_length()},
          {"num_windowed_sequences", num_windows},
          {"num_dropped_tokens", num_dropped},
          {"num_forwards", num_forwards_},
          {"num_pinned_pages", table_.num_pins()},
          {"num_send_blocks", static_cast<int64_t>(blocks_.size())},
          {"cow_page_copies", num_page_copies_},
          {"copied_inputs", num_copied_inputs_},
          {"aux_bytes_copied", aux_->num_bytes_copied() + more_copied},
          {"pages_read", pages_read_},
          {"pages_read_without_sharing", pages_read_without_sharing_},
          {"step_pages_read", step_pages_read_},
          {"step_pages_read_without_sharing", step_pages_read_without_sharing_},
          {"uncommitted_tree_nodes", num_uncommitted},
          {"committed_tree_nodes", num_committed_nodes_},
          {"dropped_tree_nodes", num_dropped_nodes_},
          {"moved_tree_nodes", num_moved_nodes_}};
}

StringMap PagedKVCacheObj::Describe() const {
  ffi::Array<ffi::Any> layers;
  for (const Layer& layer : layers_) {
    layers.push_back(StringMap{{"id", layer.config.id},
                               {"kind", ffi::String(ToString(layer.config))},
                               {"window", layer.config.window},
                               {"group", layer.group},
                               {"num_qo_heads", layer.config.num_qo_heads},
                               {"num_kv_heads", layer.config.num_kv_heads},
                               {"qk_head_dim", layer.config.qk_head_dim},
                               {"v_head_dim", layer.config.v_head_dim},
                               {"mla_original_qk_head_dim", layer.config.original_qk_head_dim},
                               {"mla_original_v_head_dim", layer.config.original_v_head_dim},
                               {"rope_theta", layer.config.rope_theta},
                               {"rope_scale", layer.config.rope_scale},
                               {"kernel_set", layer.config.kernel_set}});
  }
  return {{"max_num_sequences", config_.max_num_sequences},
          {"max_total_tokens", config_.max_total_tokens},
          {"prefill_chunk_size", config_.prefill_chunk_size},
          {"page_size", config_.page_size},
          {"dtype", ffi::DLDataTypeToString(config_.dtype)},
          {"kv_dtype", ffi::DLDataTypeToString(config_.kv_dtype)},
          {"rope_mode", static_cast<int64_t>(config_.rope_mode)},
          {"share_prefix", config_.share_prefix},
          {"sliding_window", config_.has_sequence_windows},
          {"enable_kv_transfer", config_.enable_kv_transfer},
          {"aux_manager", ffi::String(aux_->is_merged() ? "merged" : "plain")},
          {"layout", ffi::String(checkpoint_layout_.Text())},
          {"device", config_.device},
          {"layers", layers},
          {"layer_indptr", ffi::Shape(config_.stage.layer_indptr)},
          {"stage", config_.stage.index}};
}

ffi::Shape PagedKVCacheObj::SequenceIds() const {
  std::vector<int64_t> ids;
  for (const auto& [id, sequence] : table_.sequences()) {
    if (sequence.import == nullptr) ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  return ffi::Shape(ids);
}

void PagedKVCacheObj::CheckGroup(int64_t group) const {
  if (group < 0 || group >= table_.num_groups()) {
    Raise(kIndexError, "group ", group, " is not in [0, ", table_.num_groups(), ")");
  }
}

ffi::Shape PagedKVCacheObj::PageTable(int64_t sequence_id, int64_t group) const {
  CheckGroup(group);
  const std::vector<int32_t>& pages = table_.Peek(sequence_id).pages[group];
  return ffi::Shape(pages.begin(), pages.end());
}

ffi::Shape PagedKVCacheObj::CachedPages(int64_t group) const {
  CheckGroup(group);
  const std::vector<int32_t> pages = table_.pool(static_cast<int32_t>(group)).cached_pages().List();
  return ffi::Shape(pages.begin(), pages.end());
}

int64_t PagedKVCacheObj::FirstPosition(int64_t sequence_id, int64_t group) const {
  CheckGroup(group);
  return table_.FirstPosition(table_.Peek(sequence_id), static_cast<int32_t>(group));
}

ffi::Shape PagedKVCacheObj::Window(int64_t sequence_id) const {
  const SequenceWindow& window = table_.Peek(sequence_id).window;
  return {window.size, window.num_sinks, window.num_dropped};
}

void PagedKVCacheObj::CheckIntegrity() const {
  table_.CheckIntegrity(/*has_slid=*/phase_ != Phase::kForward);
}

void PagedKVCacheObj::ShuffleFreePages(int64_t seed) {
  RequireIdle("shuffle_free_pages");
  for (int32_t g = 0; g < table_.num_groups(); ++g) {
    table_.pool(g).ShuffleFree(static_cast<uint64_t>(seed));
  }
}

void PagedKVCacheObj::PoisonFreePages() {
  const int64_t page_size = config_.page_size;
  for (int32_t g = 0; g < table_.num_groups(); ++g) {
    std::vector<bool> is_held(table_.pool(g).num_pages() * page_size, false);
    auto hold = [&](int32_t page) {
      std::fill_n(is_held.begin() + page * page_size, page_size, true);
    };
    for (const auto& [id, sequence] : table_.sequences()) {
      const SequenceWindow& window = sequence.window;
      const int64_t text_length = window.TextLength(sequence.length);
      for (size_t i = 0; i < sequence.pages[g].size(); ++i) {
        const int64_t begin = table_.PageBegin(sequence, g, static_cast<int64_t>(i));
        for (int64_t text = begin; text < std::min(text_length, begin + page_size); ++text) {
          // Layers with a window may see what the sequence has dropped.
          const bool is_dropped = !table_.HasWindow(g) && text >= window.num_sinks &&
                                  text < window.num_sinks + window.num_dropped;
          if (!is_dropped) is_held[sequence.pages[g][i] * page_size + text - begin] = true;
        }
      }
      if (sequence.receive == nullptr) continue;
      const Receive::Group& backup = sequence.receive->groups[g];
      for (int32_t page : backup.gone) hold(page);
      if (backup.replaced >= 0) hold(backup.replaced);
    }
    const PagePool& pool = table_.pool(g);
    for (int32_t page = 0; page < pool.num_pages(); ++page) {
      const bool is_known = pool.NumKeepers(page) > 0 || pool.cached_pages().Contains(page);
      if (is_known || table_.IsPinned(g, page)) hold(page);
    }
    for (int64_t l : groups_[g].layers) PoisonSlots(layers_[l], is_held);
  }
}

/*! \brief Writes NaN to the slots of a layer that are not held. */
void PagedKVCacheObj::PoisonSlots(const Layer& layer, const std::vector<bool>& is_held) {
  const int64_t page_size = config_.page_size;
  const int64_t row_bytes = layer.config.qk_head_dim * config_.kv_dtype.bits / 8;
  const int64_t num_heads = layer.config.rows_per_slot();  // of K, then of V; or the latent one
  const int64_t page_bytes = num_heads * page_size * row_bytes;
  ffi::Tensor ones =
      AllocateTensor({page_bytes}, kByte, {kDLCPU, 0}, std::make_shared<std::atomic<int64_t>>(0));
  // All bits set: a NaN in every type of float.
  std::fill_n(static_cast<char*>(ones.data_ptr()), page_bytes, '\xff');
  const StreamOrder::Call on_stream(&stream_order_);
  void* stream = CurrentStream(config_.device);
  const auto num_pages = static_cast<int64_t>(is_held.size()) / page_size;
  for (int64_t page = 0; page < num_pages; ++page) {
    const auto first = is_held.begin() + page * page_size;
    for (int64_t begin = 0, end; begin < page_size; begin = end) {
      const bool is_free = !first[begin];
      for (end = begin + 1; end < page_size && first[end] != is_free;) ++end;
      if (!is_free) continue;
      const bool is_whole = end - begin == page_size;
      for (int64_t head = 0; head < (is_whole ? 1 : num_heads); ++head) {
        const int64_t row = (page * num_heads + head) * page_size + begin;
        const int64_t num_bytes = is_whole ? page_bytes : (end - begin) * row_bytes;
        CopyBytes(ones, 0, layer.pages, row * row_bytes, num_bytes, stream);
      }
    }
  }
}

}  // namespace pagedkv
