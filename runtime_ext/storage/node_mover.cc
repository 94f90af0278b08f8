// SPDX-License-Identifier: Apache-2.0
/*!
 * \file node_mover.cc
 * \brief Moves the accepted nodes of token trees.
 */
#include "storage/node_mover.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "device/device_stream.h"

namespace pagedkv {

namespace {

/*! \brief The content of some slots of some layers, to be restored after a failure. */
class SavedSlots {
 public:
  SavedSlots(int64_t num_bytes, DLDevice device, ByteCounter counter)
      : stream_(CurrentStream(device)),
        buffer_(AllocateTensor({num_bytes}, kByte, device, std::move(counter))) {}

  void Save(const StoredLayer& layer, const int32_t* slots, int64_t count) {
    saved_.push_back({&layer, slots, count, end_});
    end_ += count * layer.layout.slot_bytes();
    Visit(saved_.back(), [&](int64_t paged, int64_t saved) {
      CopyBytes(layer.pages, paged, buffer_, saved, layer.layout.row_bytes, stream_);
    });
  }

  void Restore() {
    for (const Entry& entry : saved_) {
      Visit(entry, [&](int64_t paged, int64_t saved) {
        CopyBytes(buffer_, saved, entry.layer->pages, paged, entry.layer->layout.row_bytes,
                  stream_);
      });
    }
  }

 private:
  struct Entry {
    const StoredLayer* layer;
    const int32_t* slots;
    int64_t count;
    int64_t offset;
  };

  template <typename Visitor>
  static void Visit(const Entry& entry, Visitor visit) {
    const SlotLayout& layout = entry.layer->layout;
    int64_t saved = entry.offset;
    for (int64_t i = 0; i < entry.count; ++i) {
      for (int64_t row = 0; row < layout.rows_per_slot; ++row) {
        visit(layout.RowOffset(entry.slots[i], row), saved);
        saved += layout.row_bytes;
      }
    }
  }

  void* stream_;
  ffi::Tensor buffer_;
  int64_t end_ = 0;
  std::vector<Entry> saved_;
};

}  // namespace

void NodeMover::FillArrays(const CommitPlan& plan) {
  const CacheConfig& config = storage_.config();
  const int32_t num_groups = storage_.num_groups();
  if (arrays_ == nullptr) {  // room for the nodes of a step
    const int64_t num_rows = config.prefill_chunk_size;
    array_sizes_.assign(1, std::min(config.max_num_sequences, num_rows) + 1);
    array_sizes_.resize(1 + num_groups, 2 * num_rows);
    arrays_ = std::make_unique<AuxData>(config.has_merged_aux, config.device, array_sizes_,
                                        storage_.counter());
  }
  array_sizes_.assign(1, plan.num_sequences() + 1);
  array_sizes_.resize(1 + num_groups, 2 * plan.num_moves());
  arrays_->Layout(array_sizes_);
  plan.FillMoveIndptr(arrays_->host(0));
  for (int32_t g = 0; g < num_groups; ++g) plan.FillMoves(g, arrays_->host(1 + g));
  arrays_->Upload();
}

void NodeMover::Move(const CommitPlan& plan, bool* are_nodes_lost) {
  FillArrays(plan);
  std::optional<SavedSlots> overwritten;
  if (!HasStreams(storage_.device())) {
    int64_t num_bytes = 0;
    for (const StoredLayer& layer : storage_.layers()) {
      num_bytes += plan.num_moves() * layer.layout.slot_bytes();
    }
    overwritten.emplace(num_bytes, storage_.device(), storage_.counter());
  }
  void* stream = CurrentStream(storage_.device());
  try {
    for (const StoredLayer& layer : storage_.layers()) {
      const int32_t* destinations = arrays_->host(1 + layer.group) + plan.num_moves();
      if (overwritten) overwritten->Save(layer, destinations, plan.num_moves());
      // A kernel that throws has moved nothing; copies may fail halfway.
      const bool has_kernel = layer.kernels->Has(KernelName::kCompactCopy);
      if (!has_kernel) *are_nodes_lost = !overwritten;
      MoveLayer(layer, plan, stream);
      *are_nodes_lost = !overwritten;
    }
  } catch (...) {
    if (overwritten) overwritten->Restore();
    throw;
  }
}

void NodeMover::MoveLayer(const StoredLayer& layer, const CommitPlan& plan, void* stream) const {
  const size_t array = 1 + layer.group;
  if (layer.kernels->Has(KernelName::kCompactCopy)) {
    const ffi::Tensor slots = arrays_->Matrix(array, 2, plan.num_moves());
    layer.kernels->Get(KernelName::kCompactCopy)(layer.pages, arrays_->view(0), slots,
                                                 plan.num_sequences());
    return;
  }
  const int32_t* sources = arrays_->host(array);
  const int32_t* destinations = sources + plan.num_moves();
  const SlotLayout& layout = layer.layout;
  for (int64_t i = 0; i < plan.num_moves(); ++i) {
    for (int64_t row = 0; row < layout.rows_per_slot; ++row) {
      CopyBytes(layer.pages, layout.RowOffset(sources[i], row), layer.pages,
                layout.RowOffset(destinations[i], row), layout.row_bytes, stream);
    }
  }
}

void NodeMover::ReleaseArrays() {
  if (!HasStreams(storage_.device())) arrays_.reset();
}

}  // namespace pagedkv
