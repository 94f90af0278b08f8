// SPDX-License-Identifier: Apache-2.0
/*!
 * \file debug_kv.cc
 * \brief K and V of a sequence as tensors.
 */
#include "inspect/debug_kv.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"
#include "storage/saved_slots.h"

namespace pagedkv {

int64_t DebugKV::CountUniformLayers(LayerKind kind, const char* what) const {
  int64_t count = 0;
  for (const StoredLayer& layer : step_->storage().layers()) {
    if (layer.config.kind != kind) continue;
    ++count;
    const LayerConfig& first = ShapeOf(kind);
    const LayerStorage& storage = step_->storage();
    if (!layer.config.HasShapeOf(first) ||
        storage.RowDtype(layer.config) != storage.RowDtype(first)) {
      Raise(kValueError, what, " takes all ", ToString(kind),
            " layers in one tensor, but those of this cache differ in their heads or kv_dtype");
    }
  }
  if (count == 0) Raise(kValueError, what, " needs layers of kind ", ToString(kind));
  return count;
}

const LayerConfig& DebugKV::ShapeOf(LayerKind kind) const {
  const std::vector<StoredLayer>& layers = step_->storage().layers();
  return std::find_if(layers.begin(), layers.end(),
                      [&](const StoredLayer& layer) { return layer.config.kind == kind; })
      ->config;
}

const Sequence& DebugKV::ReadableSequence(LayerKind kind, int64_t sequence_id, int64_t begin,
                                          int64_t end) const {
  const Sequence& sequence = table_->At(sequence_id);
  if (begin < 0 || begin > end || end > sequence.length) {
    Raise(kValueError, "positions [", begin, ", ", end, ") are not within the ", sequence.length,
          " of sequence ", sequence.id);
  }
  const std::vector<LayerGroup>& groups = step_->storage().groups();
  for (int32_t g = 0; g < table_->num_groups() && begin < end; ++g) {
    if (groups[g].shape.kind == kind) table_->RequireKept(sequence, begin, g);
  }
  return sequence;
}

Sequence* DebugKV::WritableSequence(int64_t sequence_id, int64_t begin, int64_t count) {
  Sequence& sequence = table_->At(sequence_id);
  if (begin < 0 || begin > sequence.length || count > sequence.length - begin) {
    Raise(kValueError, count, " positions from ", begin, " are not within the ", sequence.length,
          " of sequence ", sequence_id);
  }
  return &sequence;
}

std::vector<int32_t> DebugKV::SlotsOf(const Sequence& sequence, int32_t group, int64_t begin,
                                      int64_t end) const {
  const int64_t page_size = table_->page_size();
  std::vector<int32_t> slots;
  for (int64_t position = begin; position < end; ++position) {
    const int64_t page =
        sequence.pages[group][table_->geometry().PageIndex(sequence, group, position)];
    slots.push_back(static_cast<int32_t>(page * page_size +
                                         table_->geometry().OffsetInPage(sequence, position)));
  }
  return slots;
}

void DebugKV::Read(LayerKind kind, const Sequence& sequence, int64_t begin, int64_t end,
                   const LayerRows& rows) const {
  const StreamOrder::Call on_stream(&step_->stream_order());
  int64_t index = 0;
  for (const StoredLayer& layer : step_->storage().layers()) {
    if (layer.config.kind != kind) continue;
    ReadRows(layer, SlotsOf(sequence, layer.group, begin, end), rows, index++);
  }
}

void DebugKV::Write(LayerKind kind, Sequence* sequence, int64_t begin, int64_t count,
                    const LayerRows& rows) {
  table_->RequireKept(*sequence, begin);
  const StreamOrder::Call on_stream(&step_->stream_order());
  const StepPhase::Change change(&step_->phase());
  step_->bounds().Forget();
  CopyOnWrite copies(table_);
  copies.Acquire(sequence, begin, begin + count);
  try {
    copier_->Copy(copies.copies());
    WriteToSlots(kind, SlotsBehind(copies.copies(), *sequence, begin, begin + count), rows);
  } catch (...) {
    copies.Release(/*were_made=*/true);
    throw;
  }
  copier_->CountCommitted(copies.copies().size());
  copies.Commit();
  copies.Overwrite(*sequence, begin, begin + count);
  table_->prefixes().Drop(sequence);  // the rows are no longer those of its tokens
  const std::vector<StoredLayer>& layers = step_->storage().layers();
  if (std::all_of(layers.begin(), layers.end(),
                  [kind](const StoredLayer& layer) { return layer.config.kind == kind; })) {
    table_->NoteWritten(sequence, begin, begin + count);
  }
}

std::vector<std::vector<int32_t>> DebugKV::SlotsBehind(const std::vector<PageCopy>& copies,
                                                       const Sequence& sequence, int64_t begin,
                                                       int64_t end) const {
  const auto page_size = static_cast<int32_t>(table_->page_size());
  std::vector<std::vector<int32_t>> slots;
  for (int32_t g = 0; g < table_->num_groups(); ++g) {
    slots.push_back(SlotsOf(sequence, g, begin, end));
    for (int32_t& slot : slots.back()) {
      for (const PageCopy& copy : copies) {
        if (copy.group != g || copy.source != slot / page_size) continue;
        slot = copy.destination * page_size + slot % page_size;
        break;
      }
    }
  }
  return slots;
}

void DebugKV::WriteToSlots(LayerKind kind, const std::vector<std::vector<int32_t>>& slots,
                           const LayerRows& rows) const {
  const std::vector<StoredLayer>& layers = step_->storage().layers();
  // A kernel may throw when others have written already; byte copies do not.
  std::optional<SavedSlots> overwritten;
  if (std::any_of(layers.begin(), layers.end(),
                  [](const StoredLayer& layer) { return layer.config.codec.has_value(); })) {
    overwritten.emplace(step_->storage(), static_cast<int64_t>(slots[0].size()));
  }
  int64_t index = 0;
  try {
    for (const StoredLayer& layer : layers) {
      if (layer.config.kind != kind) continue;
      const std::vector<int32_t>& own = slots[layer.group];
      if (overwritten) overwritten->Save(layer, own.data(), static_cast<int64_t>(own.size()));
      WriteRows(layer, own, rows.At(index++));
    }
  } catch (...) {
    if (overwritten) overwritten->Restore();
    throw;
  }
}

void DebugKV::Get(int64_t sequence_id, int64_t begin, int64_t end, ffi::Tensor k, ffi::Tensor v) {
  const int64_t num_layers = CountUniformLayers(LayerKind::kMHA, "debug_get_kv");
  const Sequence& sequence = ReadableSequence(LayerKind::kMHA, sequence_id, begin, end);
  const LayerConfig& shape = ShapeOf(LayerKind::kMHA);
  const DLDataType dtype = step_->storage().RowDtype(shape);
  step_->tensors().CheckOutput(
      "k", k, {num_layers, end - begin, shape.num_kv_heads, shape.qk_head_dim}, dtype);
  step_->tensors().CheckOutput(
      "v", v, {num_layers, end - begin, shape.num_kv_heads, shape.v_head_dim}, dtype);
  Read(LayerKind::kMHA, sequence, begin, end, {std::move(k), std::move(v)});
}

void DebugKV::GetMLA(int64_t sequence_id, int64_t begin, int64_t end, ffi::Tensor kv) {
  const int64_t num_layers = CountUniformLayers(LayerKind::kMLA, "debug_get_kv_mla");
  const Sequence& sequence = ReadableSequence(LayerKind::kMLA, sequence_id, begin, end);
  const LayerConfig& shape = ShapeOf(LayerKind::kMLA);
  step_->tensors().CheckOutput("kv", kv, {num_layers, end - begin, shape.qk_head_dim},
                               step_->storage().RowDtype(shape));
  Read(LayerKind::kMLA, sequence, begin, end, {std::move(kv), {}});
}

void DebugKV::Set(int64_t sequence_id, int64_t begin, ffi::Tensor k, ffi::Tensor v) {
  step_->phase().RequireIdle("debug_set_kv");
  const int64_t num_layers = CountUniformLayers(LayerKind::kMHA, "debug_set_kv");
  table_->At(sequence_id);
  if (!k.defined() || k.ndim() != 4) Raise(kValueError, "k must be a tensor with 4 dimensions");
  const int64_t count = k.size(1);
  Sequence* sequence = WritableSequence(sequence_id, begin, count);
  const LayerConfig& shape = ShapeOf(LayerKind::kMHA);
  const DLDataType dtype = step_->storage().RowDtype(shape);
  TensorChecks& tensors = step_->tensors();
  tensors.CheckInput("k", k, {num_layers, count, shape.num_kv_heads, shape.qk_head_dim}, dtype);
  tensors.CheckInput("v", v, {num_layers, count, shape.num_kv_heads, shape.v_head_dim}, dtype);
  tensors.MakeCompact({&k, &v}, Alignment::kElement);
  if (count == 0) return;
  Write(LayerKind::kMHA, sequence, begin, count, {std::move(k), std::move(v)});
}

void DebugKV::SetMLA(int64_t sequence_id, int64_t begin, ffi::Tensor kv) {
  step_->phase().RequireIdle("debug_set_kv_mla");
  const int64_t num_layers = CountUniformLayers(LayerKind::kMLA, "debug_set_kv_mla");
  table_->At(sequence_id);
  if (!kv.defined() || kv.ndim() != 3) Raise(kValueError, "kv must be a tensor with 3 dimensions");
  const int64_t count = kv.size(1);
  Sequence* sequence = WritableSequence(sequence_id, begin, count);
  const LayerConfig& shape = ShapeOf(LayerKind::kMLA);
  TensorChecks& tensors = step_->tensors();
  tensors.CheckInput("kv", kv, {num_layers, count, shape.qk_head_dim},
                     step_->storage().RowDtype(shape));
  tensors.MakeCompact({&kv}, Alignment::kElement);
  if (count == 0) return;
  Write(LayerKind::kMLA, sequence, begin, count, {std::move(kv), {}});
}

}  // namespace pagedkv
