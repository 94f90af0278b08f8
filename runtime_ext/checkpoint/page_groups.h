// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_groups.h
 * \brief The page groups of a checkpoint: what a sequence keeps of one layer.
 *
 * The id of a page group is the index of its layer among those that the cache keeps. Behind these
 * are the page groups of states, one for each recurrent layer.
 */
#ifndef TVM_PAGEDKV_CHECKPOINT_PAGE_GROUPS_H_
#define TVM_PAGEDKV_CHECKPOINT_PAGE_GROUPS_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <vector>

#include "checkpoint/checkpoint_metadata.h"
#include "state/sequences/sequence.h"
#include "storage/layer_storage.h"

namespace pagedkv {

struct PageGroup {
  const StoredLayer* layer;
  int32_t pool;  // of the SequenceTable
  bool has_states;

  /*! \brief The pages that a window has left behind, or the states before those that are kept. */
  const PageHistory& HistoryOf(const Sequence& sequence) const {
    return has_states ? sequence.states[layer->state_group].history : sequence.histories[pool];
  }
  /*! \brief The pages of a sequence, in order of position. */
  const std::vector<int32_t>& PagesOf(const Sequence& sequence) const {
    return has_states ? sequence.states[layer->state_group].pages : sequence.pages[pool];
  }
};

class PageGroups {
 public:
  /*! \param storage Must outlive this. */
  explicit PageGroups(const LayerStorage& storage);

  const CheckpointLayout& layout() const { return layout_; }
  const std::vector<PageGroup>& groups() const { return groups_; }
  /*! \throws Error (IndexError). \param what What the message calls the id. */
  const PageGroup& At(int64_t id, const char* what) const;
  /*!
   * \brief Checks a tensor for num_pages pages, on the cache's device or on the host.
   * \throws Error (TypeError, ValueError) that names the tensor.
   */
  void CheckTensor(const char* name, const ffi::Tensor& tensor, int64_t id,
                   int64_t num_pages) const;

 private:
  const LayerStorage& storage_;
  CheckpointLayout layout_;
  std::vector<PageGroup> groups_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_CHECKPOINT_PAGE_GROUPS_H_
