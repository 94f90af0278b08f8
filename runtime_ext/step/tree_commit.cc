// SPDX-License-Identifier: Apache-2.0
/*!
 * \file tree_commit.cc
 * \brief Commit of token trees: the accepted nodes move up in the pages, the others are dropped.
 *
 * Moving overwrites nodes, so what is about to be overwritten is kept until all layers are done: a
 * kernel that throws leaves the pages as they were. Not so where kernels are launched and run
 * later: to keep rows would cost as much as to move them, and a launch that fails after others of
 * its kind did not means that the device does. Then the nodes are given up; what was committed
 * before is as it was. When the first launch fails nothing has changed there either.
 */
#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "ffi/paged_kv_cache.h"

namespace pagedkv {

namespace {

/*! \brief How the slots of a layer's pages lie in memory. */
struct SlotLayout {
  int64_t page_size;
  int64_t rows_per_slot;
  int64_t row_bytes;

  int64_t slot_bytes() const { return rows_per_slot * row_bytes; }
  int64_t RowOffset(int64_t slot, int64_t row) const {
    const int64_t page = slot / page_size;
    return ((page * rows_per_slot + row) * page_size + slot % page_size) * row_bytes;
  }
};

/*! \brief What some slots of some layers held. */
class SavedSlots {
 public:
  SavedSlots(int64_t num_bytes, DLDevice device, ByteCounter counter)
      : stream_(CurrentStream(device)),
        buffer_(AllocateTensor({num_bytes}, kByte, device, std::move(counter))) {}

  void Save(const ffi::Tensor& pages, const SlotLayout& layout, const int32_t* slots,
            int64_t count) {
    saved_.push_back({pages, layout, slots, count, end_});
    end_ += count * layout.slot_bytes();
    Visit(saved_.back(), [&](int64_t paged, int64_t saved) {
      CopyBytes(pages, paged, buffer_, saved, layout.row_bytes, stream_);
    });
  }

  void Restore() {
    for (const Entry& entry : saved_) {
      Visit(entry, [&](int64_t paged, int64_t saved) {
        CopyBytes(buffer_, saved, entry.pages, paged, entry.layout.row_bytes, stream_);
      });
    }
  }

 private:
  struct Entry {
    ffi::Tensor pages;
    SlotLayout layout;
    const int32_t* slots;
    int64_t count;
    int64_t offset;
  };

  template <typename Visitor>
  static void Visit(const Entry& entry, Visitor visit) {
    int64_t saved = entry.offset;
    for (int64_t i = 0; i < entry.count; ++i) {
      for (int64_t row = 0; row < entry.layout.rows_per_slot; ++row) {
        visit(entry.layout.RowOffset(entry.slots[i], row), saved);
        saved += entry.layout.row_bytes;
      }
    }
  }

  void* stream_;
  ffi::Tensor buffer_;
  int64_t end_ = 0;
  std::vector<Entry> saved_;
};

}  // namespace

void PagedKVCacheObj::CommitTree(ffi::Shape sequence_ids, ffi::Shape leaf_indices) {
  RequireIdle("commit_tree");
  CommitPlan plan(&table_);
  plan.Prepare({sequence_ids.data(), sequence_ids.size()},
               {leaf_indices.data(), leaf_indices.size()});
  // A kernel that calls back into the cache finds it busy.
  const StreamOrder::Call on_stream(&stream_order_);
  phase_ = Phase::kPlanning;
  bool are_nodes_lost = false;
  try {
    plan.Acquire();
    try {
      CopyPages(plan.copies());
      if (plan.num_moves() > 0) MoveNodes(plan, &are_nodes_lost);
    } catch (...) {
      plan.Release();
      if (are_nodes_lost) {
        num_dropped_nodes_ += plan.num_committed() + plan.num_dropped();
        plan.DropNodes();
      }
      throw;
    }
  } catch (...) {
    if (!HasStreams(config_.device)) commit_aux_.reset();
    phase_ = Phase::kIdle;
    throw;
  }
  if (!HasStreams(config_.device)) commit_aux_.reset();
  num_page_copies_ += static_cast<int64_t>(plan.copies().size());
  num_committed_nodes_ += plan.num_committed();
  num_dropped_nodes_ += plan.num_dropped();
  num_moved_nodes_ += plan.num_moves();
  plan.Commit();
  phase_ = Phase::kIdle;
}

void PagedKVCacheObj::FillCommitArrays(const CommitPlan& plan) {
  std::vector<int64_t>& sizes = commit_array_sizes_;
  if (commit_aux_ == nullptr) {  // room for the nodes of a step
    const int64_t num_rows = config_.prefill_chunk_size;
    sizes.assign(1, std::min(config_.max_num_sequences, num_rows) + 1);
    sizes.resize(1 + groups_.size(), 2 * num_rows);
    commit_aux_ =
        std::make_unique<AuxData>(config_.has_merged_aux, config_.device, sizes, allocated_bytes_);
  }
  sizes.assign(1, plan.num_sequences() + 1);
  sizes.resize(1 + groups_.size(), 2 * plan.num_moves());
  commit_aux_->Layout(sizes);
  plan.FillMoveIndptr(commit_aux_->host(0));
  for (int32_t g = 0; g < table_.num_groups(); ++g) plan.FillMoves(g, commit_aux_->host(1 + g));
  commit_aux_->Upload();
}

void PagedKVCacheObj::MoveNodes(const CommitPlan& plan, bool* are_nodes_lost) {
  const int64_t num_sequences = plan.num_sequences(), num_moves = plan.num_moves();
  FillCommitArrays(plan);
  auto layout_of = [&](const Layer& layer) -> SlotLayout {
    return {config_.page_size, layer.config.rows_per_slot(),
            layer.config.qk_head_dim * config_.kv_dtype.bits / 8};
  };
  std::optional<SavedSlots> overwritten;
  if (!HasStreams(config_.device)) {
    int64_t num_bytes = 0;
    for (const Layer& layer : layers_) num_bytes += num_moves * layout_of(layer).slot_bytes();
    overwritten.emplace(num_bytes, config_.device, allocated_bytes_);
  }
  void* stream = CurrentStream(config_.device);
  try {
    for (const Layer& layer : layers_) {
      const SlotLayout layout = layout_of(layer);
      const int32_t* sources = commit_aux_->host(1 + layer.group);
      const int32_t* destinations = sources + num_moves;
      if (overwritten) overwritten->Save(layer.pages, layout, destinations, num_moves);
      const KernelSet& kernels = KernelsOf(layer);
      if (kernels.Has(KernelName::kCompactCopy)) {
        const ffi::Tensor slots = commit_aux_->Matrix(1 + layer.group, 2, num_moves);
        kernels.Get(KernelName::kCompactCopy)(layer.pages, commit_aux_->view(0), slots,
                                              num_sequences);
        *are_nodes_lost = !overwritten;
        continue;
      }
      *are_nodes_lost = !overwritten;
      for (int64_t i = 0; i < num_moves; ++i) {
        for (int64_t row = 0; row < layout.rows_per_slot; ++row) {
          CopyBytes(layer.pages, layout.RowOffset(sources[i], row), layer.pages,
                    layout.RowOffset(destinations[i], row), layout.row_bytes, stream);
        }
      }
    }
  } catch (...) {
    if (overwritten) overwritten->Restore();
    throw;
  }
}

}  // namespace pagedkv
