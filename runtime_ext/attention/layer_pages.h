// SPDX-License-Identifier: Apache-2.0
/*!
 * \file layer_pages.h
 * \brief The page tables that a layer attends to, and whether a token tree masks them.
 *
 * In a step whose trees branch, the pages hold the nodes of this and of earlier steps, and the tree
 * kernels let a row see its ancestors among them. For cross_attention, which covers what was there
 * before the step, the same pages come with a tree order in which no row sees the nodes of this
 * step. Where every row sees all of the past, the page table ends before the step, and the plain
 * kernel does.
 */
#ifndef TVM_PAGEDKV_ATTENTION_LAYER_PAGES_H_
#define TVM_PAGEDKV_ATTENTION_LAYER_PAGES_H_

#include "attention/attention_call.h"
#include "step/step.h"

namespace pagedkv {

class LayerPages {
 public:
  LayerPages(Step* step, const StoredLayer& layer) : step_(step), layer_(layer) {}

  /*! \brief The past and the rows of this step. */
  PageTable WithStep() const { return step_->arrays().page_table(layer_.group); }
  /*!
   * \brief The past alone.
   * \throws Error (ValueError) where a tree mask is needed, and the layer has not appended yet or
   *   its kernel cannot hide the nodes of this step.
   */
  PageTable Past() const;
  bool NeedsTreeMask(PageRange range) const {
    return range == PageRange::kWithStep ? step_->plan().needs_tree_mask() : HidesStep();
  }

  /*!
   * \brief Attends to the shared segments of the step and merges the result into o and lse.
   *
   * The page tables of a step begin behind the shared pages, so this follows the kernel that has
   * attended to those. Segments of one level share no row: one call attends to all of them.
   */
  void AttendToSegments(const AttentionCall& call) const;

 private:
  bool HidesStep() const;
  void RequireHiddenStep() const;

  Step* step_;
  const StoredLayer& layer_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_ATTENTION_LAYER_PAGES_H_
