// SPDX-License-Identifier: Apache-2.0
/*!
 * \file attention_kernels.cc
 * \brief Which kernel attends, over the pages or among the rows of the step, and what it is given.
 */
#include <algorithm>
#include <memory>
#include <vector>

#include "ffi/paged_kv_cache.h"

namespace pagedkv {

namespace {

constexpr size_t kNumPastArrays = 3;  // of a group: as GroupArray's first ones

}  // namespace

PagedKVCacheObj::PageArrays PagedKVCacheObj::StepPages(const Layer& layer) const {
  const size_t lengths = ArrayIndex(layer.group, kLastPageLengths);
  return {PageRange::kWithStep,
          aux_->view(ArrayIndex(layer.group, kPageIndptr)),
          aux_->view(ArrayIndex(layer.group, kPageValues)),
          aux_->view(lengths),
          common(kTreeOrder),
          *aux_,
          lengths};
}

PagedKVCacheObj::PageArrays PagedKVCacheObj::PastPages(const Layer& layer) {
  if (HidesStep(layer)) RequireHiddenStep(layer);
  if (!has_past_arrays_) FillPastArrays();
  const ffi::Tensor& tree_order = past_aux_->view(0);
  if (HidesStep(layer)) {
    const PageArrays step = StepPages(layer);
    return {PageRange::kPast, step.indptr, step.values,       step.last_page_lengths,
            tree_order,       step.arrays, step.lengths_index};
  }
  const size_t first = 1 + layer.group * kNumPastArrays;
  return {PageRange::kPast,
          past_aux_->view(first),
          past_aux_->view(first + 1),
          past_aux_->view(first + 2),
          tree_order,
          *past_aux_,
          first + 2};
}

void PagedKVCacheObj::FillPastArrays() {
  std::vector<int64_t>& sizes = past_array_sizes_;
  if (past_aux_ == nullptr) {  // room for every step, as InitialArraySizes has it
    const int64_t num_rows = config_.prefill_chunk_size;
    const int64_t num_sequences = std::min(config_.max_num_sequences, num_rows);
    sizes.assign(1, num_rows);
    for (int32_t g = 0; g < table_.num_groups(); ++g) {
      const int64_t num_pages = table_.pool(g).num_pages();
      sizes.insert(sizes.end(), {num_sequences + 1, num_pages, 4 * num_sequences});
    }
    past_aux_ = std::make_unique<AuxData>(config_.has_merged_aux, config_.device, sizes,
                                          allocated_bytes_, std::vector<std::vector<int64_t>>{{2}});
  }
  sizes.assign(1, plan_.needs_tree_mask() ? plan_.num_tree_nodes() : 0);
  for (int32_t g = 0; g < table_.num_groups(); ++g) {
    sizes.push_back(plan_.num_sequences() + 1);
    sizes.push_back(plan_.NumPages(g, PageRange::kPast));
    sizes.push_back(NumLengthRows(g) * plan_.num_sequences());
  }
  past_aux_->Layout(sizes);
  if (plan_.needs_tree_mask()) plan_.FillTreeOrder(PageRange::kPast, past_aux_->host(0));
  for (int32_t g = 0; g < table_.num_groups(); ++g) {
    auto host = [&](size_t i) { return past_aux_->host(1 + g * kNumPastArrays + i); };
    plan_.FillPageIndptr(g, PageRange::kPast, host(0));
    plan_.FillPageValues(g, PageRange::kPast, host(1));
    FillLengths(g, PageRange::kPast, host(2));
  }
  past_aux_->Upload();
  has_past_arrays_ = true;
}

KernelName PagedKVCacheObj::PagedKernel(const Layer& layer) const {
  const LayerConfig& config = layer.config;
  const KernelName name = plan_.is_decode() ? config.decode() : config.prefill();
  if (config.window > 0 || !plan_.has_windows() || KernelsOf(layer).IsOwn(name)) return name;
  return plan_.is_decode() ? KernelName::kDecodeSliding : KernelName::kPrefillSliding;
}

bool PagedKVCacheObj::AttendsInParts(const Layer& layer) const {
  return layer.config.window == 0 && PagedKernel(layer) == KernelName::kPrefillSliding;
}

void PagedKVCacheObj::PagedAttention(const Layer& layer, const PageArrays& pages, double sm_scale,
                                     const ffi::Tensor& q, const ffi::Tensor& o,
                                     const ffi::Tensor& lse) {
  if (UsesTreeKernel(layer, pages.range)) {
    TreeAttention(layer, pages, sm_scale, q, o, lse);
    return AttendToSegments(layer, sm_scale, q, o, lse);
  }
  const bool is_causal = pages.range == PageRange::kWithStep;
  const KernelSet& kernels = KernelsOf(layer);
  const LayerConfig& config = layer.config;
  const ffi::Tensor& first_positions = aux_->view(ArrayIndex(layer.group, kFirstPositions));
  const ffi::Tensor& positions = common(kQueryPositions);
  const KernelName name = PagedKernel(layer);
  const ffi::Function& kernel = kernels.Get(name);
  ffi::Tensor length_info = pages.last_page_lengths;
  if (kernels.IsStock(name) && NumLengthRows(layer.group) > 1) {
    length_info = pages.arrays.Matrix(pages.lengths_index, 3, plan_.num_sequences());
  }
  if (kernels.IsFlashInfer(name)) {
    const FlashInferPages table{layer.pages, pages.indptr, pages.values, pages.last_page_lengths};
    flashinfer_->Paged(CallOf(layer, sm_scale, q, o, lse), pages.range, common(kQueryIndptr),
                       table);
    return;
  }
  // Kernels of layers with a window take it as their last argument.
  auto decode = [&](auto... window) {
    kernel(q, layer.pages, pages.indptr, pages.values, length_info, first_positions, positions, o,
           lse, rotary_mode(), config.rope_scale, config.rope_theta, sm_scale, window...);
  };
  auto prefill = [&](auto... window) {
    kernel(q, common(kQueryIndptr), layer.pages, pages.indptr, pages.values, length_info,
           first_positions, positions, o, lse, static_cast<int64_t>(is_causal), rotary_mode(),
           config.rope_scale, config.rope_theta, sm_scale, window...);
  };
  if (config.window == 0) {
    plan_.is_decode() ? decode() : prefill();
    AttendToSegments(layer, sm_scale, q, o, lse);
  } else if (plan_.is_decode()) {
    // For decode the last of the pages' positions is the row's own; in the past it is not there.
    decode(is_causal ? config.window : config.window - 1);
  } else {
    prefill(config.window);
  }
}

LayerCall PagedKVCacheObj::CallOf(const Layer& layer, double sm_scale, const ffi::Tensor& q,
                                  const ffi::Tensor& o, const ffi::Tensor& lse) const {
  return {KernelsOf(layer), layer.config, layer.group, plan_, sm_scale, q, o, lse};
}

StockWindowCall PagedKVCacheObj::StockWindow(const Layer& layer, double sm_scale,
                                             const ffi::Tensor& q, const ffi::Tensor& o,
                                             const ffi::Tensor& lse) const {
  return {CallOf(layer, sm_scale, q, o, lse), rotary_mode(), layer.pages, common(kQueryPositions)};
}

KernelName PagedKVCacheObj::RaggedKernel(const Layer& layer) const {
  const KernelName plain = plan_.needs_tree_mask() ? KernelName::kTree : KernelName::kPrefillRagged;
  if (layer.config.window == 0) return plain;
  const KernelName sliding =
      plan_.needs_tree_mask() ? KernelName::kTreeSliding : KernelName::kPrefillRaggedSliding;
  // The plain kernel does for steps that the window does not cut, and sets may have no other.
  const bool is_cut = plan_.max_append() > layer.config.window;
  return is_cut || KernelsOf(layer).Has(sliding) ? sliding : plain;
}

void PagedKVCacheObj::RaggedAttention(const Layer& layer, double sm_scale, const ffi::Tensor& q,
                                      const ffi::Tensor& k, const ffi::Tensor& v,
                                      const ffi::Tensor& o, const ffi::Tensor& lse) {
  const KernelSet& kernels = KernelsOf(layer);
  const LayerConfig& config = layer.config;
  const KernelName name = RaggedKernel(layer);
  const ffi::Function& kernel = kernels.Get(name);
  const int64_t mode = config.is_mla() ? 0 : rotary_mode();  // models rotate latent rows themselves
  // Kernels of layers with a window take it as their last argument.
  auto call = [&](auto... window) {
    if (plan_.needs_tree_mask()) {
      kernel(q, common(kQueryIndptr), k, v, common(kQueryIndptr), common(kQueryPositions),
             common(kTreeOrderIndptr), common(kTreeOrder), o, lse, mode, config.rope_scale,
             config.rope_theta, sm_scale, window...);
    } else {
      kernel(q, common(kQueryIndptr), k, v, common(kQueryIndptr), common(kQueryPositions),
             common(kPastLengths), o, lse, /*causal=*/int64_t{1}, mode, config.rope_scale,
             config.rope_theta, sm_scale, window...);
    }
  };
  if (kernels.IsFlashInfer(name)) {
    flashinfer_->Ragged(CallOf(layer, sm_scale, q, o, lse), common(kQueryIndptr), k, v);
  } else if (name == KernelName::kTreeSliding || name == KernelName::kPrefillRaggedSliding) {
    call(config.window);
  } else {
    call();
  }
}

}  // namespace pagedkv
