// SPDX-License-Identifier: Apache-2.0
/*!
 * \file tree_attention.cc
 * \brief Attention in a step whose token trees branch.
 *
 * The pages hold the nodes of this and of earlier steps, and the tree kernels see the ancestors of
 * a row among them. cross_attention, which covers what was there before the step, takes the same
 * pages and an order in which nobody sees the nodes of this step. Where all that was there is seen
 * by every row, it takes the pages of the past and the plain kernel.
 */
#include "base/error.h"
#include "ffi/paged_kv_cache.h"

namespace pagedkv {

void PagedKVCacheObj::RequireTreeKernels() const {
  for (const Layer& layer : layers_) {
    const KernelSet& kernels = KernelsOf(layer);
    const KernelName name = layer.config.tree();
    if (!kernels.Has(name)) {
      Raise(kValueError, "layer ", layer.config.id, " has no kernel '", ToString(name),
            "', which a step with token trees that branch needs");
    }
    if (kernels.IsStock(name) && config_.rope_mode == RopeMode::kInline) {
      Raise(kValueError, "layer ", layer.config.id, " has the stock cache's kernel '",
            ToString(name),
            "', which does not rotate tree nodes by their depth, as rope_mode 2 (inline) needs");
    }
  }
}

bool PagedKVCacheObj::HidesStep(const Layer& layer) const {
  // A window depends on the depth of the rows even where there are no earlier nodes.
  return plan_.needs_tree_mask() && (plan_.has_earlier_nodes() || layer.config.window > 0);
}

void PagedKVCacheObj::RequireHiddenStep(const Layer& layer) const {
  if (KernelsOf(layer).IsStock(layer.config.tree())) {
    Raise(kValueError,
          "cross_attention over token tree nodes of earlier steps is not possible "
          "with the stock cache's kernel '",
          ToString(layer.config.tree()), "'; use attention");
  }
  if (layer.last_append != num_forwards_) {
    Raise(kValueError,
          "cross_attention in a step with token trees reads the pages with this step's rows; call ",
          layer.config.is_mla() ? "append_mla_kv" : "self_attention", " before it");
  }
}

void PagedKVCacheObj::TreeAttention(const Layer& layer, const PageArrays& pages, double sm_scale,
                                    const ffi::Tensor& q, const ffi::Tensor& o,
                                    const ffi::Tensor& lse) {
  const LayerConfig& config = layer.config;
  const ffi::Function& kernel = KernelsOf(layer).Get(config.tree());
  if (config.is_mla()) {
    kernel(q, common(kQueryIndptr), layer.pages, pages.indptr, pages.values,
           pages.last_page_lengths, o, lse, sm_scale, common(kTreeOrderIndptr), pages.tree_order);
    return;
  }
  // The kernel of layers with a window takes it as its last argument.
  auto call = [&](auto... window) {
    kernel(q, common(kQueryIndptr), layer.pages, pages.indptr, pages.values,
           pages.last_page_lengths, aux_->view(ArrayIndex(layer.group, kFirstPositions)),
           common(kQueryPositions), o, lse, rotary_mode(), config.rope_scale, config.rope_theta,
           sm_scale, common(kTreeOrderIndptr), pages.tree_order, window...);
  };
  config.window > 0 ? call(config.window) : call();
}

}  // namespace pagedkv
