// SPDX-License-Identifier: Apache-2.0
/*!
 * \file inspect.cc
 * \brief What looks at a cache from outside: K and V of a sequence, statistics, integrity.
 */
#include <tvm/ffi/dtype.h>
#include <tvm/runtime/device_api.h>

#include <algorithm>
#include <limits>

#include "error.h"
#include "paged_kv_cache.h"

namespace pagedkv {

using tvm::runtime::DeviceAPI;
using StringMap = ffi::Map<ffi::String, ffi::Any>;

void PagedKVCacheObj::CheckUniformLayers(const char* what) const {
  auto differs = [&](const Group& g) { return !g.shape.HasShapeOf(groups_[0].shape); };
  if (std::any_of(groups_.begin(), groups_.end(), differs)) {
    Raise(kValueError, what,
          " takes all layers in one tensor, but the layers of this cache differ "
          "in their heads");
  }
}

/*! \brief Calls visit(layer, plane, row offset in K or V, row offset in the pages), in bytes. */
template <typename Visitor>
void PagedKVCacheObj::VisitRows(const Sequence& sequence, int64_t begin, int64_t end,
                                Visitor visit) const {
  const int64_t page_size = config_.page_size;
  for (size_t l = 0; l < layers_.size(); ++l) {
    const Layer& layer = layers_[l];
    const int64_t num_heads = layer.config.num_kv_heads;
    const int64_t row_bytes = layer.config.qk_head_dim * config_.kv_dtype.bits / 8;
    for (int64_t position = begin; position < end; ++position) {
      int64_t index = position / page_size - sequence.first_pages[layer.group];
      int64_t page = sequence.pages[layer.group][index];
      int64_t row = (static_cast<int64_t>(l) * (end - begin) + position - begin) * num_heads;
      for (int64_t head = 0; head < num_heads; ++head) {
        for (int64_t plane = 0; plane < 2; ++plane) {
          int64_t paged_row =
              ((page * 2 + plane) * num_heads + head) * page_size + position % page_size;
          visit(layer, plane, (row + head) * row_bytes, paged_row * row_bytes, row_bytes);
        }
      }
    }
  }
}

void PagedKVCacheObj::DebugGetKV(int64_t sequence_id, int64_t begin, int64_t end, ffi::Tensor k,
                                 ffi::Tensor v) {
  CheckUniformLayers("debug_get_kv");
  const Sequence& sequence = table_.At(sequence_id);
  if (begin < 0 || begin > end || end > sequence.length) {
    Raise(kValueError, "positions [", begin, ", ", end, ") are not within the ", sequence.length,
          " of sequence ", sequence_id);
  }
  if (begin < end) table_.RequireKept(sequence, begin);
  const LayerConfig& shape = groups_[0].shape;
  const auto num_layers = static_cast<int64_t>(layers_.size());
  CheckTensor("k", k, {num_layers, end - begin, shape.num_kv_heads, shape.qk_head_dim},
              config_.kv_dtype);
  CheckTensor("v", v, {num_layers, end - begin, shape.num_kv_heads, shape.v_head_dim},
              config_.kv_dtype);
  void* stream = DeviceAPI::Get(config_.device)->GetCurrentStream(config_.device);
  VisitRows(sequence, begin, end,
            [&](const Layer& layer, int64_t plane, int64_t offset, int64_t paged, int64_t bytes) {
              CopyBytes(layer.pages, paged, plane == 0 ? k : v, offset, bytes, stream);
            });
}

void PagedKVCacheObj::DebugSetKV(int64_t sequence_id, int64_t begin, ffi::Tensor k, ffi::Tensor v) {
  RequireIdle("debug_set_kv");
  CheckUniformLayers("debug_set_kv");
  Sequence& sequence = table_.At(sequence_id);
  if (!k.defined() || k.ndim() != 4) Raise(kValueError, "k must be a tensor with 4 dimensions");
  const int64_t count = k.size(1);
  if (begin < 0 || begin > sequence.length || count > sequence.length - begin) {
    Raise(kValueError, count, " positions from ", begin, " are not within the ", sequence.length,
          " of sequence ", sequence_id);
  }
  const LayerConfig& shape = groups_[0].shape;
  const auto num_layers = static_cast<int64_t>(layers_.size());
  CheckTensor("k", k, {num_layers, count, shape.num_kv_heads, shape.qk_head_dim}, config_.kv_dtype);
  CheckTensor("v", v, {num_layers, count, shape.num_kv_heads, shape.v_head_dim}, config_.kv_dtype);
  if (count == 0) return;
  table_.RequireKept(sequence, begin);

  phase_ = Phase::kPlanning;
  std::vector<PageCopy> copies;
  try {
    copies = table_.AcquireCopies(&sequence, begin, begin + count);
    CopyPages(copies);
  } catch (...) {
    table_.ReleaseCopies(copies);
    phase_ = Phase::kIdle;
    throw;
  }
  table_.CommitCopies(copies);
  num_page_copies_ += static_cast<int64_t>(copies.size());
  phase_ = Phase::kIdle;
  void* stream = DeviceAPI::Get(config_.device)->GetCurrentStream(config_.device);
  VisitRows(sequence, begin, begin + count,
            [&](const Layer& layer, int64_t plane, int64_t offset, int64_t paged, int64_t bytes) {
              CopyBytes(plane == 0 ? k : v, offset, layer.pages, paged, bytes, stream);
            });
}

StringMap PagedKVCacheObj::Stats() const {
  ffi::Array<ffi::Any> groups;
  int64_t num_pages = 0, num_free = 0, num_used = 0, num_shared = 0;
  for (int32_t g = 0; g < table_.num_groups(); ++g) {
    const PagePool& pool = table_.pool(g);
    num_pages += pool.num_pages();
    num_free += pool.num_free();
    num_used += pool.num_used();
    num_shared += pool.num_shared();
    groups.push_back(StringMap{{"num_layers", static_cast<int64_t>(groups_[g].layers.size())},
                               {"window", groups_[g].shape.window},
                               {"num_pages", pool.num_pages()},
                               {"num_free_pages", pool.num_free()},
                               {"num_used_pages", pool.num_used()},
                               {"num_shared_pages", pool.num_shared()}});
  }
  const int64_t past_aux_bytes = past_aux_ ? past_aux_->num_bytes() : 0;
  const int64_t past_copied = past_aux_ ? past_aux_->num_bytes_copied() : 0;
  return {{"page_pool_bytes", page_pool_bytes_},
          {"workspace_bytes", workspace_bytes_},
          {"aux_bytes", aux_->num_bytes() + past_aux_bytes},
          {"allocated_bytes", allocated_bytes_->load()},
          {"num_pages", num_pages},
          {"num_free_pages", num_free},
          {"num_used_pages", num_used},
          {"num_shared_pages", num_shared},
          {"groups", groups},
          {"num_sequences", table_.num_sequences()},
          {"total_tokens", table_.total_length()},
          {"num_forwards", num_forwards_},
          {"cow_page_copies", num_page_copies_},
          {"aux_bytes_copied", aux_->num_bytes_copied() + past_copied}};
}

StringMap PagedKVCacheObj::Describe() const {
  ffi::Array<ffi::Any> layers;
  for (const Layer& layer : layers_) {
    layers.push_back(StringMap{{"kind", ffi::String(layer.config.window ? "mha_sliding" : "mha")},
                               {"window", layer.config.window},
                               {"group", layer.group},
                               {"num_qo_heads", layer.config.num_qo_heads},
                               {"num_kv_heads", layer.config.num_kv_heads},
                               {"qk_head_dim", layer.config.qk_head_dim},
                               {"v_head_dim", layer.config.v_head_dim},
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
          {"aux_manager", ffi::String(aux_->is_merged() ? "merged" : "plain")},
          {"device", config_.device},
          {"layers", layers}};
}

ffi::Shape PagedKVCacheObj::SequenceIds() const {
  std::vector<int64_t> ids;
  for (const auto& [id, sequence] : table_.sequences()) ids.push_back(id);
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
  const std::vector<int32_t>& pages = table_.At(sequence_id).pages[group];
  return ffi::Shape(pages.begin(), pages.end());
}

int64_t PagedKVCacheObj::FirstPosition(int64_t sequence_id, int64_t group) const {
  CheckGroup(group);
  return table_.FirstPosition(table_.At(sequence_id), static_cast<int32_t>(group));
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
  if (config_.device.device_type != kDLCPU) {
    Raise(kNotImplementedError, "poison_free_pages on a device other than a CPU");
  }
  const int64_t page_size = config_.page_size;
  for (int32_t g = 0; g < table_.num_groups(); ++g) {
    std::vector<int64_t> num_valid(table_.pool(g).num_pages(), 0);
    for (const auto& [id, sequence] : table_.sequences()) {
      for (size_t i = 0; i < sequence.pages[g].size(); ++i) {
        int64_t& valid = num_valid[sequence.pages[g][i]];
        int64_t first = (sequence.first_pages[g] + static_cast<int64_t>(i)) * page_size;
        int64_t rest = sequence.length - first;
        valid = std::max(valid, std::min(rest, page_size));
      }
    }
    for (int64_t l : groups_[g].layers) {
      const Layer& layer = layers_[l];
      const int64_t row_bytes = layer.config.qk_head_dim * config_.kv_dtype.bits / 8;
      const int64_t num_heads = 2 * layer.config.num_kv_heads;  // of K, then of V
      auto* data = static_cast<char*>(layer.pages.data_ptr());
      for (size_t page = 0; page < num_valid.size(); ++page) {
        for (int64_t head = 0; head < num_heads; ++head) {
          char* rows = data + (page * num_heads + head) * page_size * row_bytes;
          // All bits set are a NaN in every type of float.
          std::fill(rows + num_valid[page] * row_bytes, rows + page_size * row_bytes, '\xff');
        }
      }
    }
  }
}

}  // namespace pagedkv
