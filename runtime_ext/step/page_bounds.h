// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_bounds.h
 * \brief Bounds of the rows of K in each page, by which decode steps choose pages.
 *
 * The bounds of a page are computed when a step first chooses among pages with it. They hold while
 * the page keeps its content, which its generation tells, and until somebody writes rows to it:
 * NoteAppend and Forget say so. A page whose number of slots in use has changed is computed again.
 */
#ifndef TVM_PAGEDKV_STEP_PAGE_BOUNDS_H_
#define TVM_PAGEDKV_STEP_PAGE_BOUNDS_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <vector>

#include "state/table/sequence_table.h"
#include "step/page_table.h"
#include "storage/layer_storage.h"

namespace pagedkv {

class PageBounds {
 public:
  /*! \brief Allocates the bounds of layers with the kernels. Both arguments must outlive this. */
  PageBounds(const LayerStorage& storage, const SequenceTable& table);

  bool Has(const StoredLayer& layer) const { return layers_[layer.index].bounds.defined(); }
  /*! \brief Notes that rows were written. \param slots int32 [T], on the host. */
  void NoteAppend(const StoredLayer& layer, const ffi::Tensor& slots);
  /*! \brief Forgets the bounds of all pages, whose rows somebody may have written. */
  void Forget();
  /*!
   * \brief Computes what is missing of the bounds of the pages of a step's sequences.
   * \param pages The page table, on the host.
   * \return [num_pages, num_kv_heads, 2 * head_dim], of the cache's dtype: maxima, then minima.
   */
  const ffi::Tensor& Update(const StoredLayer& layer, const PageTable& pages);

 private:
  /*! \brief What the bounds of a page are of: its content, and the slots in use. */
  struct Covered {
    uint64_t generation = 0;
    int32_t num_slots = 0;  // 0: the page has no bounds
  };
  struct Layer {
    ffi::Tensor bounds;            // undefined where a layer has none
    std::vector<Covered> covered;  // [page]
  };

  /*! \brief Does what Update does; where it fails, some pages are noted that lack bounds. */
  void Compute(const StoredLayer& layer, const PageTable& pages, Layer* known) const;

  const LayerStorage& storage_;
  const SequenceTable& table_;
  std::vector<Layer> layers_;  // as LayerStorage::layers
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STEP_PAGE_BOUNDS_H_
