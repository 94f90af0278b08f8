// SPDX-License-Identifier: Apache-2.0
/*!
 * \file workspaces.cc
 * \brief Scratch of a step.
 */
#include "step/workspaces.h"

#include <algorithm>

namespace pagedkv {

Workspaces::Workspaces(const LayerStorage& storage) : storage_(storage) {
  const CacheConfig& config = storage.config();
  int64_t q_width = 0, kv_width = 0, num_qo_heads = 0;
  for (const LayerGroup& group : storage.groups()) {
    const LayerConfig& layer = group.shape;
    groups_.push_back({StepView(config.dtype, {layer.num_qo_heads, layer.qk_head_dim}),
                       StepView(config.dtype, {layer.num_kv_heads, layer.qk_head_dim}),
                       StepView(config.dtype, {layer.num_kv_heads, layer.v_head_dim}),
                       StepView(kFloat32, {layer.num_qo_heads})});
    if (!layer.is_mha()) continue;
    q_width = std::max(q_width, layer.num_qo_heads * layer.qk_head_dim);
    kv_width =
        std::max(kv_width, layer.num_kv_heads * std::max(layer.qk_head_dim, layer.v_head_dim));
    num_qo_heads = std::max(num_qo_heads, layer.num_qo_heads);
  }
  const int64_t bytes_before = *storage.counter();
  auto allocate = [&](int64_t row_bytes) {
    if (row_bytes == 0) return ffi::Tensor();
    return AllocateTensor({config.prefill_chunk_size * row_bytes}, kByte, config.device,
                          storage.counter());
  };
  q_ = allocate(q_width * ItemSize(config.dtype));
  k_ = allocate(kv_width * ItemSize(config.dtype));
  v_ = allocate(kv_width * ItemSize(config.dtype));
  lse_ = allocate(num_qo_heads * ItemSize(kFloat32));
  num_bytes_ = *storage.counter() - bytes_before;
}

void Workspaces::SetNumRows(int64_t num_rows) {
  for (int32_t g = 0; g < storage_.num_groups(); ++g) {
    if (!storage_.groups()[g].shape.is_mha()) continue;
    groups_[g].q.Set(q_, 0, num_rows);
    groups_[g].k.Set(k_, 0, num_rows);
    groups_[g].v.Set(v_, 0, num_rows);
    groups_[g].lse.Set(lse_, 0, num_rows);
  }
}

}  // namespace pagedkv
