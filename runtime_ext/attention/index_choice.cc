// SPDX-License-Identifier: Apache-2.0
/*!
 * \file index_choice.cc
 * \brief What the rows of a step choose by the keys of an index lane.
 */
#include "attention/index_choice.h"

#include <limits>

#include "attention/listed_attention.h"
#include "base/error.h"

namespace pagedkv {

void IndexChoice::CheckQueries(const StoredLayer& layer, const ffi::Tensor& q) const {
  const LayerConfig& config = layer.config;
  RequireListStep(step_->plan());
  step_->tensors().CheckInput("q", q,
                              {step_->plan().num_rows(), config.num_qo_heads, config.qk_head_dim},
                              step_->storage().config().dtype);
}

void IndexChoice::RequireKeys(const StoredLayer& layer) const {
  if (step_->HasAppended(layer)) return;
  Raise(kValueError, "layer ", layer.config.id, " has not appended this step's index keys; call ",
        "append_index before it");
}

void IndexChoice::TopK(const StoredLayer& layer, double scale, ffi::Tensor q, ffi::Tensor weights,
                       const ffi::Tensor& positions) const {
  if (!layer.kernels->Has(KernelName::kIndexTopK)) {
    Raise(kValueError, "layer ", layer.config.id, " is no index lane");
  }
  CheckQueries(layer, q);
  TensorChecks& tensors = step_->tensors();
  const int64_t num_rows = step_->plan().num_rows();
  tensors.CheckInput("weights", weights, {num_rows, layer.config.num_qo_heads}, kFloat32);
  if (!positions.defined()) Raise(kTypeError, "positions must be a tensor, got None");
  if (positions.ndim() != 2) {
    Raise(kValueError, "positions must have shape [rows, k], got ", ShapeText(positions.shape()));
  }
  tensors.CheckOutput("positions", positions, {num_rows, positions.size(1)}, kInt32);
  RequireKeys(layer);
  tensors.MakeCompact({&q, &weights}, Alignment::kElement);
  const StepArrays& arrays = step_->arrays();
  const PageTable table = arrays.page_table(layer.group);
  layer.kernels->Get(KernelName::kIndexTopK)(q, arrays.query_indptr(), weights, layer.pages,
                                             table.indptr, table.page_ids, table.lengths, positions,
                                             scale);
}

void IndexChoice::TopBlocks(const StoredLayer& layer, const BlockChoice& choice, ffi::Tensor q,
                            const ffi::Tensor& blocks) const {
  if (!layer.kernels->Has(KernelName::kIndexTopBlocks)) {
    Raise(kValueError, "layer ", layer.config.id, " is no index lane");
  }
  RequireBlockSize(choice.block_size, step_->storage().config().page_size);
  CheckQueries(layer, q);
  if (!blocks.defined()) Raise(kTypeError, "blocks must be a tensor, got None");
  if (blocks.ndim() != 3) {
    Raise(kValueError, "blocks must have shape [rows, heads, k], got ", ShapeText(blocks.shape()));
  }
  const int64_t k = blocks.size(2);
  step_->tensors().CheckOutput("blocks", blocks,
                               {step_->plan().num_rows(), layer.config.num_qo_heads, k}, kInt32);
  const auto is_number = [k](int64_t number) { return number >= 0 && number <= k; };
  if (!is_number(choice.init_blocks) || !is_number(choice.local_blocks) ||
      choice.init_blocks + choice.local_blocks > k) {
    Raise(kValueError, "init_blocks (", choice.init_blocks, ") and local_blocks (",
          choice.local_blocks, ") must be 0 or more and at most k (", k, ") together");
  }
  RequireKeys(layer);
  step_->tensors().MakeCompact({&q}, Alignment::kElement);
  const StepArrays& arrays = step_->arrays();
  const PageTable table = arrays.page_table(layer.group);
  layer.kernels->Get(KernelName::kIndexTopBlocks)(
      q, arrays.query_indptr(), layer.pages, table.indptr, table.page_ids, table.lengths, blocks,
      choice.block_size, choice.init_blocks, choice.local_blocks);
}

}  // namespace pagedkv
