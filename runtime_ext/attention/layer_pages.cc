// SPDX-License-Identifier: Apache-2.0
/*!
 * \file layer_pages.cc
 * \brief The page tables that a layer attends to.
 */
#include "attention/layer_pages.h"

#include "base/error.h"

namespace pagedkv {

bool LayerPages::HidesStep() const {
  // A window depends on the depth of the rows even where there are no earlier nodes.
  const ForwardPlan& plan = step_->plan();
  return plan.needs_tree_mask() && (plan.has_earlier_nodes() || layer_.config.window > 0);
}

void LayerPages::RequireHiddenStep() const {
  const KernelName name = layer_.config.tree();
  if (layer_.kernels->IsStock(name)) {
    Raise(kValueError,
          "cross_attention over token tree nodes of earlier steps is not possible "
          "with the stock cache's kernel '",
          ToString(name), "'; use attention");
  }
  if (!step_->HasAppended(layer_)) {
    Raise(kValueError,
          "cross_attention in a step with token trees reads the pages with this step's rows; call ",
          layer_.config.is_mla() ? "append_mla_kv" : "self_attention", " before it");
  }
}

PageTable LayerPages::Past() const {
  if (!HidesStep()) return step_->past().page_table(layer_.group);
  RequireHiddenStep();
  const PageTable table = WithStep();
  return {PageRange::kPast,           table.indptr, table.page_ids,     table.lengths,
          step_->past().tree_order(), table.arrays, table.lengths_array};
}

void LayerPages::AttendToSegments(const AttentionCall& call) const {
  const SharedPrefix& shared = step_->plan().shared_prefix(layer_.group);
  if (shared.segments().empty()) return;
  const LayerConfig& config = layer_.config;
  const ffi::Function& kernel = layer_.kernels->Get(config.prefill_shared());
  const StepArrays& arrays = step_->arrays();
  auto segment = [&](SegmentArray array) -> const ffi::Tensor& {
    return arrays.segment(layer_.group, array);
  };
  for (size_t level = 0; level < shared.num_levels(); ++level) {
    const auto first = static_cast<int64_t>(shared.level_begins()[level]);
    const auto last = static_cast<int64_t>(shared.level_begins()[level + 1]);
    if (config.is_mla()) {
      kernel(call.q, layer_.pages, segment(SegmentArray::kPageIndptr),
             segment(SegmentArray::kPageIds), segment(SegmentArray::kRowIndptr),
             segment(SegmentArray::kRows), call.o, call.lse, first, last, call.sm_scale);
    } else {
      kernel(call.q, layer_.pages, segment(SegmentArray::kPageIndptr),
             segment(SegmentArray::kPageIds), segment(SegmentArray::kFirstPositions),
             segment(SegmentArray::kRowIndptr), segment(SegmentArray::kRows),
             arrays.query_positions(), call.o, call.lse, first, last, config.rotary_mode(),
             config.rope_scale, config.rope_theta, call.sm_scale);
    }
  }
}

}  // namespace pagedkv
