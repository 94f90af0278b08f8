// SPDX-License-Identifier: Apache-2.0
/*!
 * \file paged_backend.cc
 * \brief Attention with kernels of this project.
 */
#include "attention/backends/paged_backend.h"

#include "storage/row_io.h"

namespace pagedkv {

PagedBackend::PagedBackend(Step* step, const StoredLayer& layer, const SharedBackendState& shared)
    : step_(step),
      layer_(layer),
      pages_(step, layer),
      ragged_(*step, layer, shared.flashinfer.get()),
      has_rope_append_(layer.kernels->Has(KernelName::kRopeAppend)),
      has_stock_kernels_(false) {
  for (KernelName name : {layer.config.decode(), layer.config.prefill(), layer.config.tree()}) {
    has_stock_kernels_ = has_stock_kernels_ || layer.kernels->IsStock(name);
  }
}

Alignment PagedBackend::page_alignment() const {
  return has_stock_kernels_ ? Alignment::kStock : Alignment::kElement;
}

void PagedBackend::Append(const ffi::Tensor& qkv) {
  has_rope_append_ ? RotateAndAppend(qkv) : SplitAndAppend(qkv);
}

void PagedBackend::RotateAndAppend(const ffi::Tensor& qkv) {
  const StepArrays& arrays = step_->arrays();
  const ffi::Function& kernel = layer_.kernels->Get(KernelName::kRopeAppend);
  const ffi::Tensor& q = step_->workspaces().group(layer_.group).q.get();
  const int64_t apply_rope = layer_.config.has_normal_rope();
  const ffi::Tensor& factors = config().rope_ext_factors;
  const ffi::Tensor& scales = layer_.config.kv_scales;
  const auto append = [&](auto... last) {
    kernel(qkv, arrays.query_indptr(), arrays.rope_positions(), arrays.slots(layer_.group), q,
           layer_.pages, apply_rope, last...);
  };
  const auto append_by_scales = [&](auto... last) {
    scales.defined() ? append(last..., scales) : append(last...);
  };
  factors.defined() && apply_rope ? append_by_scales(factors) : append_by_scales();
}

void PagedBackend::SplitAndAppend(const ffi::Tensor& qkv) {
  const StepArrays& arrays = step_->arrays();
  const GroupWorkspace& workspace = step_->workspaces().group(layer_.group);
  const ffi::Tensor &q = workspace.q.get(), &k = workspace.k.get(), &v = workspace.v.get();
  const ffi::Function& split = layer_.kernels->Get(KernelName::kSplitRotary);
  const ffi::Tensor& factors = config().rope_ext_factors;
  const int64_t apply_rope = layer_.config.has_normal_rope();
  if (apply_rope && factors.defined()) {
    split(qkv, arrays.rope_positions(), q, k, v, factors);
  } else {
    split(qkv, arrays.rope_positions(), q, k, v, apply_rope);
  }
  AppendRows(layer_, k, v, arrays.slots(layer_.group));
}

void PagedBackend::Attend(const AttentionCall& call, const ffi::Tensor&, const ffi::Tensor&) {
  AttendToPages(call, pages_.WithStep());
}

bool PagedBackend::CanAppendWithPrefill() const {
  if (!layer_.kernels->Has(KernelName::kAppendPrefill) ||
      !layer_.kernels->IsOwn(layer_.config.prefill()) || layer_.config.window > 0 ||
      layer_.config.has_inline_rope() || plan().is_decode() || plan().has_spans() ||
      HasTreeMask(PageRange::kWithStep) || !plan().shared_prefix(layer_.group).segments().empty()) {
    return false;
  }
  // Sequences of one row are slower in a prefill tile than in `prefill`, which attends to them as
  // decode does.
  for (int64_t i = 0; i < plan().num_sequences(); ++i) {
    if (plan().NumAppend(i) == 1) return false;
  }
  return true;
}

void PagedBackend::AppendAndAttend(const ffi::Tensor& qkv, const AttentionCall& call,
                                   const ffi::Tensor& k, const ffi::Tensor& v) {
  if (!CanAppendWithPrefill()) return AttentionBackend::AppendAndAttend(qkv, call, k, v);
  const StepArrays& arrays = step_->arrays();
  const PageTable table = pages_.WithStep();
  const int64_t apply_rope = layer_.config.has_normal_rope();
  const ffi::Function& kernel = layer_.kernels->Get(KernelName::kAppendPrefill);
  WithLastArguments(call, /*window=*/std::nullopt, [&](auto... last) {
    kernel(qkv, arrays.query_indptr(), arrays.rope_positions(), arrays.slots(layer_.group),
           layer_.pages, table.indptr, table.page_ids, table.lengths,
           arrays.first_positions(layer_.group), arrays.query_positions(), call.o, call.lse,
           apply_rope, call.sm_scale, last...);
  });
}

void PagedBackend::AttendToPast(const AttentionCall& call) { AttendToPages(call, pages_.Past()); }

void PagedBackend::AttendToPages(const AttentionCall& call, const PageTable& table) {
  if (HasTreeMask(table.range)) {
    AttendWithTreeMask(call, table);
  } else if (plan().is_decode()) {
    Decode(call, table);
  } else {
    Prefill(call, table);
  }
  pages_.AttendToSegments(call);
}

void PagedBackend::Decode(const AttentionCall& call, const PageTable& table) {
  CallDecode(layer_.config.decode(), call, table, table.lengths);
}

void PagedBackend::Prefill(const AttentionCall& call, const PageTable& table) {
  const bool has_spans = plan().has_spans() && table.range == PageRange::kWithStep;
  const LayerConfig& layer = layer_.config;
  CallPrefill(has_spans ? layer.prefill_spans() : layer.prefill(), call, table, table.lengths);
}

void PagedBackend::CallDecode(KernelName name, const AttentionCall& call, const PageTable& table,
                              const ffi::Tensor& lengths) const {
  const LayerConfig& config = layer_.config;
  const StepArrays& arrays = step_->arrays();
  // The kernel takes the last position of the pages for the row's own. The past has no such one.
  const bool ends_with_row = config.is_chunked || table.range == PageRange::kWithStep;
  const int64_t window = ends_with_row ? config.signed_window() : config.window - 1;
  WithLastArguments(call, WindowArgument(window), [&](auto... last) {
    layer_.kernels->Get(name)(call.q, layer_.pages, table.indptr, table.page_ids, lengths,
                              arrays.first_positions(layer_.group), arrays.query_positions(),
                              call.o, call.lse, config.rotary_mode(), config.rope_scale,
                              config.rope_theta, call.sm_scale, last...);
  });
}

void PagedBackend::CallPrefill(KernelName name, const AttentionCall& call, const PageTable& table,
                               const ffi::Tensor& lengths) const {
  const LayerConfig& config = layer_.config;
  const StepArrays& arrays = step_->arrays();
  const int64_t is_causal = table.range == PageRange::kWithStep;
  auto launch = [&](auto... last) {
    layer_.kernels->Get(name)(
        call.q, arrays.query_indptr(), layer_.pages, table.indptr, table.page_ids, lengths,
        arrays.first_positions(layer_.group), arrays.query_positions(), call.o, call.lse, is_causal,
        config.rotary_mode(), config.rope_scale, config.rope_theta, call.sm_scale, last...);
  };
  WithLastArguments(call, WindowArgument(config.signed_window()), [&](auto... last) {
    name == config.prefill_spans() ? launch(arrays.row_reach(), last...) : launch(last...);
  });
}

void PagedBackend::AttendWithTreeMask(const AttentionCall& call, const PageTable& table) const {
  const LayerConfig& config = layer_.config;
  const StepArrays& arrays = step_->arrays();
  WithLastArguments(call, WindowArgument(config.signed_window()), [&](auto... last) {
    layer_.kernels->Get(config.tree())(
        call.q, arrays.query_indptr(), layer_.pages, table.indptr, table.page_ids, table.lengths,
        arrays.first_positions(layer_.group), arrays.query_positions(), call.o, call.lse,
        config.rotary_mode(), config.rope_scale, config.rope_theta, call.sm_scale,
        arrays.tree_order_indptr(), table.tree_order, last...);
  });
}

}  // namespace pagedkv
