// SPDX-License-Identifier: Apache-2.0
/*!
 * \file node_mover.h
 * \brief Moves the accepted nodes of token trees to the slots behind the committed positions.
 */
#ifndef TVM_PAGEDKV_STORAGE_NODE_MOVER_H_
#define TVM_PAGEDKV_STORAGE_NODE_MOVER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "device/aux_data.h"
#include "state/plans/commit_plan.h"
#include "storage/layer_storage.h"

namespace pagedkv {

class NodeMover {
 public:
  explicit NodeMover(const LayerStorage& storage) : storage_(storage) {}

  /*!
   * \brief Moves the nodes in all layers; the plan must have its pages (CommitPlan::Acquire).
   *
   * A move overwrites other nodes. On the host they are saved first, so when a kernel throws the
   * slots are as before. On a device that would cost as much as the move, and a launch that fails
   * after others of its kind succeeded means that the device failed: then the nodes are lost,
   * unless it was the first launch.
   * \param are_nodes_lost Set to true when it throws and slots have been overwritten.
   */
  void Move(const CommitPlan& plan, bool* are_nodes_lost);

  /*! \brief Frees the arrays where they are on the host; elsewhere kernels may still read them. */
  void ReleaseArrays();
  /*! \brief Null when there are none. */
  const AuxData* arrays() const { return arrays_.get(); }

 private:
  void FillArrays(const CommitPlan& plan);
  void MoveLayer(const StoredLayer& layer, const CommitPlan& plan, void* stream) const;

  const LayerStorage& storage_;
  std::unique_ptr<AuxData> arrays_;
  std::vector<int64_t> array_sizes_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STORAGE_NODE_MOVER_H_
