// SPDX-License-Identifier: Apache-2.0
/*!
 * \file workspaces.h
 * \brief Scratch of a step: Q, K and V that were split from qkv and rotated, and the lse.
 *
 * Layers run one after the other, so all groups share the memory. MLA layers need none: their
 * kernels take and give the model's tensors.
 */
#ifndef TVM_PAGEDKV_STEP_WORKSPACES_H_
#define TVM_PAGEDKV_STEP_WORKSPACES_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <vector>

#include "device/device_memory.h"
#include "storage/layer_storage.h"

namespace pagedkv {

/*! \brief The workspaces as layers of one group see them; T is the number of rows of the step. */
struct GroupWorkspace {
  StepView q;    // [T, num_qo_heads, head_dim]
  StepView k;    // [T, num_kv_heads, head_dim]
  StepView v;    // [T, num_kv_heads, head_dim]
  StepView lse;  // [T, num_qo_heads] float32
};

class Workspaces {
 public:
  explicit Workspaces(const LayerStorage& storage);

  /*! \brief Gives the views of all groups this many rows. */
  void SetNumRows(int64_t num_rows);
  const GroupWorkspace& group(int32_t group) const { return groups_[group]; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  const LayerStorage& storage_;
  std::vector<GroupWorkspace> groups_;
  ffi::Tensor q_, k_, v_, lse_;  // bytes
  int64_t num_bytes_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STEP_WORKSPACES_H_
