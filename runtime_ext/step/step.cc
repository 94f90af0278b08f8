// SPDX-License-Identifier: Apache-2.0
/*!
 * \file step.cc
 * \brief One forward step: a transaction from begin_forward to end_forward or abort_forward.
 */
#include "step/step.h"

#include <algorithm>

#include "config/layer_kernels.h"
#include "state/plans/plan_arrays.h"

namespace pagedkv {

namespace {

bool CanSharePrefix(const LayerStorage& storage, const LayerGroup& group) {
  if (!storage.config().share_prefix) return false;
  for (int64_t index : group.layers) {
    const StoredLayer& layer = storage.layers()[index];
    if (!CanSharePrefix(layer.config, *layer.kernels)) return false;
  }
  return true;
}

void SharePrefixes(const LayerStorage& storage, int64_t min_saved_positions, ForwardPlan* plan) {
  for (int32_t g = 0; g < storage.num_groups(); ++g) {
    if (CanSharePrefix(storage, storage.groups()[g])) plan->SharePrefixes(g, min_saved_positions);
  }
}

}  // namespace

Step::Step(const LayerStorage& storage, SequenceTable* table, PageCopier* copier)
    : storage_(storage),
      copier_(copier),
      stream_order_(storage.device()),
      tensors_(storage.device(), storage.counter()),
      plan_(table, storage.config().prefill_chunk_size),
      workspaces_(storage),
      scratch_(storage.device(), storage.counter()),
      arrays_(storage.config(), *table, plan_, storage.NumTaps(), storage.counter()),
      past_(storage.config(), *table, plan_, storage.counter()),
      bounds_(storage, *table),
      last_append_(storage.layers().size(), 0) {
  const bool is_host = storage.device().device_type == kDLCPU;
  SharePrefixes(storage, is_host ? kMinSavedPositions : kMinSavedPositionsOnDevice, &plan_);
}

void Step::ShareEveryPrefix() {
  phase_.RequireIdle("share_every_prefix");
  SharePrefixes(storage_, /*min_saved_positions=*/1, &plan_);
}

void Step::Begin(IntSpan sequence_ids, IntSpan append_lengths, std::optional<IntSpan> tree_parents,
                 std::optional<IntSpan> spans) {
  phase_.RequireIdle("begin_forward");
  StreamOrder::Call on_stream(&stream_order_);
  StepPhase::Change change(&phase_);
  plan_.Prepare(sequence_ids, append_lengths, tree_parents);
  if (spans) plan_.PrepareSpans(*spans);
  if (spans) RequireSpanKernels();
  if (arrays_.counts_text()) plan_.RequireTextPositions();
  if (plan_.needs_tree_mask()) RequireTreeKernels();
  plan_.Acquire();
  try {
    copier_->Copy(plan_.copies());
    arrays_.Fill();
    workspaces_.SetNumRows(plan_.num_rows());
  } catch (...) {
    plan_.Release();
    throw;
  }
  copier_->CountCommitted(plan_.copies().size());
  CountPagesRead();
  plan_.Commit();
  ++number_;
  past_.BeginStep();
  stream_order_.BeginStep();
  change.BeginStep();
}

void Step::RequireTreeKernels() const {
  for (const StoredLayer& layer : storage_.layers()) {
    RequireTreeKernel(layer.config, *layer.kernels);
  }
}

void Step::RequireSpanKernels() const {
  for (const StoredLayer& layer : storage_.layers()) {
    RequireSpanKernel(layer.config, *layer.kernels);
  }
}

void Step::CountPagesRead() {
  const PlanArrays plan_arrays(plan_);
  step_pages_read_ = PagesRead();
  for (int32_t g = 0; g < storage_.num_groups(); ++g) {
    if (!storage_.groups()[g].shape.is_attention()) continue;
    const int64_t num_own = arrays_.num_page_ids(g);
    step_pages_read_.with_sharing += num_own + plan_arrays.NumSegmentPages(g);
    step_pages_read_.without_sharing += num_own + plan_arrays.NumSharedPages(g);
  }
  pages_read_.with_sharing += step_pages_read_.with_sharing;
  pages_read_.without_sharing += step_pages_read_.without_sharing;
}

void Step::End() {
  phase_.RequireOpenStep("end_forward");
  stream_order_.EndStep();
  plan_.Finish(IsWritten());
  phase_.EndStep();
}

void Step::Abort() {
  phase_.RequireOpenStep("abort_forward");
  stream_order_.EndStep();
  plan_.Abort();
  phase_.EndStep();
}

bool Step::IsWritten() const {
  const std::vector<StoredLayer>& layers = storage_.layers();
  return std::all_of(layers.begin(), layers.end(),
                     [this](const StoredLayer& layer) { return HasAppended(layer); });
}

std::vector<int64_t> Step::MissingLayers() const {
  phase_.RequireForward("missing_layers");
  std::vector<int64_t> ids;
  for (const StoredLayer& layer : storage_.layers()) {
    // A recurrent layer and its convolution have one id, and are neighbours.
    const bool is_known = !ids.empty() && ids.back() == layer.config.id;
    if (!HasAppended(layer) && !is_known) ids.push_back(layer.config.id);
  }
  return ids;
}

ffi::Tensor Step::QueryPositions() const {
  phase_.RequireForward("get_query_positions");
  return arrays_.rope_positions();
}

}  // namespace pagedkv
