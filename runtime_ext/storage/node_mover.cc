// SPDX-License-Identifier: Apache-2.0
/*!
 * \file node_mover.cc
 * \brief Moves the accepted nodes of token trees.
 */
#include "storage/node_mover.h"

#include <algorithm>
#include <optional>

#include "device/device_stream.h"
#include "storage/saved_slots.h"

namespace pagedkv {

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
    overwritten.emplace(storage_, plan.num_moves());
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
    for (const SlotLayout::Section& section : layout.sections) {
      for (int64_t row = section.first_row; row < section.end_row(); ++row) {
        CopyBytes(layer.pages, layout.RowOffset(section, sources[i], row), layer.pages,
                  layout.RowOffset(section, destinations[i], row), section.row_bytes, stream);
      }
    }
  }
}

void NodeMover::ReleaseArrays() {
  if (!HasStreams(storage_.device())) arrays_.reset();
}

}  // namespace pagedkv
