// SPDX-License-Identifier: Apache-2.0
/*!
 * \file debug_kv.cc
 * \brief K and V of a sequence as tensors.
 */
#include "inspect/debug_kv.h"

#include <algorithm>
#include <vector>

#include "base/error.h"

namespace pagedkv {

int64_t DebugKV::CountUniformLayers(LayerKind kind, const char* what) const {
  int64_t count = 0;
  for (const StoredLayer& layer : step_->storage().layers()) {
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

const LayerConfig& DebugKV::ShapeOf(LayerKind kind) const {
  const std::vector<StoredLayer>& layers = step_->storage().layers();
  return std::find_if(layers.begin(), layers.end(),
                      [&](const StoredLayer& layer) { return layer.config.kind == kind; })
      ->config;
}

const Sequence& DebugKV::ReadableSequence(int64_t sequence_id, int64_t begin, int64_t end) const {
  const Sequence& sequence = table_->At(sequence_id);
  if (begin < 0 || begin > end || end > sequence.length) {
    Raise(kValueError, "positions [", begin, ", ", end, ") are not within the ", sequence.length,
          " of sequence ", sequence.id);
  }
  if (begin < end) table_->RequireKept(sequence, begin);
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

/*!
 * \brief Calls visit(layer, plane, row, paged, num_bytes) for every row of the positions.
 *
 * `plane` is 0 for K and latent rows and 1 for V; `row` and `paged` are byte offsets in the tensor
 * of all layers and in the pages of the layer.
 */
template <typename Visitor>
void DebugKV::VisitRows(LayerKind kind, const Sequence& sequence, int64_t begin, int64_t end,
                        Visitor visit) const {
  int64_t first_row = 0;  // of the layer in the tensor
  for (const StoredLayer& layer : step_->storage().layers()) {
    if (layer.config.kind != kind) continue;
    const SlotLayout& layout = layer.layout;
    const int64_t num_heads = layer.config.num_kv_heads;
    const std::vector<int32_t>& pages = sequence.pages[layer.group];
    for (int64_t position = begin; position < end; ++position) {
      const int64_t page = pages[table_->PageIndex(sequence, layer.group, position)];
      const int64_t slot = page * layout.page_size + table_->OffsetInPage(sequence, position);
      const int64_t row = first_row + (position - begin) * num_heads;
      for (int64_t i = 0; i < layout.rows_per_slot; ++i) {
        visit(layer, i / num_heads, (row + i % num_heads) * layout.row_bytes,
              layout.RowOffset(slot, i), layout.row_bytes);
      }
    }
    first_row += (end - begin) * num_heads;
  }
}

void DebugKV::CopySharedPages(Sequence* sequence, int64_t begin, int64_t count) {
  table_->RequireKept(*sequence, begin);
  const StepPhase::Change change(&step_->phase());
  std::vector<PageCopy> copies;
  try {
    copies = table_->AcquireCopies(sequence, begin, begin + count);
    copier_->Copy(copies);
  } catch (...) {
    table_->ReleaseCopies(copies, /*were_made=*/true);
    throw;
  }
  copier_->CountCommitted(copies.size());
  table_->CommitCopies(copies);
  table_->Overwrite(*sequence, begin, begin + count);
}

void DebugKV::Get(int64_t sequence_id, int64_t begin, int64_t end, ffi::Tensor k, ffi::Tensor v) {
  const int64_t num_layers = CountUniformLayers(LayerKind::kMHA, "debug_get_kv");
  const Sequence& sequence = ReadableSequence(sequence_id, begin, end);
  const LayerConfig& shape = ShapeOf(LayerKind::kMHA);
  const DLDataType dtype = step_->storage().config().kv_dtype;
  step_->tensors().CheckOutput(
      "k", k, {num_layers, end - begin, shape.num_kv_heads, shape.qk_head_dim}, dtype);
  step_->tensors().CheckOutput(
      "v", v, {num_layers, end - begin, shape.num_kv_heads, shape.v_head_dim}, dtype);
  const StreamOrder::Call on_stream(&step_->stream_order());
  void* stream = CurrentStream(step_->storage().device());
  VisitRows(
      LayerKind::kMHA, sequence, begin, end,
      [&](const StoredLayer& layer, int64_t plane, int64_t row, int64_t paged, int64_t num_bytes) {
        CopyBytes(layer.pages, paged, plane == 0 ? k : v, row, num_bytes, stream);
      });
}

void DebugKV::GetMLA(int64_t sequence_id, int64_t begin, int64_t end, ffi::Tensor kv) {
  const int64_t num_layers = CountUniformLayers(LayerKind::kMLA, "debug_get_kv_mla");
  const Sequence& sequence = ReadableSequence(sequence_id, begin, end);
  step_->tensors().CheckOutput("kv", kv,
                               {num_layers, end - begin, ShapeOf(LayerKind::kMLA).qk_head_dim},
                               step_->storage().config().kv_dtype);
  const StreamOrder::Call on_stream(&step_->stream_order());
  void* stream = CurrentStream(step_->storage().device());
  VisitRows(LayerKind::kMLA, sequence, begin, end,
            [&](const StoredLayer& layer, int64_t, int64_t row, int64_t paged, int64_t num_bytes) {
              CopyBytes(layer.pages, paged, kv, row, num_bytes, stream);
            });
}

void DebugKV::Set(int64_t sequence_id, int64_t begin, ffi::Tensor k, ffi::Tensor v) {
  step_->phase().RequireIdle("debug_set_kv");
  const int64_t num_layers = CountUniformLayers(LayerKind::kMHA, "debug_set_kv");
  table_->At(sequence_id);
  if (!k.defined() || k.ndim() != 4) Raise(kValueError, "k must be a tensor with 4 dimensions");
  const int64_t count = k.size(1);
  Sequence* sequence = WritableSequence(sequence_id, begin, count);
  const LayerConfig& shape = ShapeOf(LayerKind::kMHA);
  const DLDataType dtype = step_->storage().config().kv_dtype;
  TensorChecks& tensors = step_->tensors();
  tensors.CheckInput("k", k, {num_layers, count, shape.num_kv_heads, shape.qk_head_dim}, dtype);
  tensors.CheckInput("v", v, {num_layers, count, shape.num_kv_heads, shape.v_head_dim}, dtype);
  tensors.MakeCompact({&k, &v}, Alignment::kElement);
  if (count == 0) return;
  const StreamOrder::Call on_stream(&step_->stream_order());
  void* stream = CurrentStream(step_->storage().device());
  CopySharedPages(sequence, begin, count);
  VisitRows(
      LayerKind::kMHA, *sequence, begin, begin + count,
      [&](const StoredLayer& layer, int64_t plane, int64_t row, int64_t paged, int64_t num_bytes) {
        CopyBytes(plane == 0 ? k : v, row, layer.pages, paged, num_bytes, stream);
      });
}

void DebugKV::SetMLA(int64_t sequence_id, int64_t begin, ffi::Tensor kv) {
  step_->phase().RequireIdle("debug_set_kv_mla");
  const int64_t num_layers = CountUniformLayers(LayerKind::kMLA, "debug_set_kv_mla");
  table_->At(sequence_id);
  if (!kv.defined() || kv.ndim() != 3) Raise(kValueError, "kv must be a tensor with 3 dimensions");
  const int64_t count = kv.size(1);
  Sequence* sequence = WritableSequence(sequence_id, begin, count);
  TensorChecks& tensors = step_->tensors();
  tensors.CheckInput("kv", kv, {num_layers, count, ShapeOf(LayerKind::kMLA).qk_head_dim},
                     step_->storage().config().kv_dtype);
  tensors.MakeCompact({&kv}, Alignment::kElement);
  if (count == 0) return;
  const StreamOrder::Call on_stream(&step_->stream_order());
  void* stream = CurrentStream(step_->storage().device());
  CopySharedPages(sequence, begin, count);
  VisitRows(LayerKind::kMLA, *sequence, begin, begin + count,
            [&](const StoredLayer& layer, int64_t, int64_t row, int64_t paged, int64_t num_bytes) {
              CopyBytes(kv, row, layer.pages, paged, num_bytes, stream);
            });
}

}  // namespace pagedkv
