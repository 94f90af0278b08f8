// SPDX-License-Identifier: Apache-2.0
/*!
 * \file listed_attention.cc
 * \brief Attention of the rows of a step to positions that they list.
 */
#include "attention/listed_attention.h"

#include <limits>
#include <utility>

#include "base/error.h"

namespace pagedkv {

void ListedAttention::Check(const StoredLayer& layer, const ffi::Tensor& positions) const {
  if (!layer.kernels->Has(KernelName::kAttendListed)) {
    Raise(kValueError, "layer ", layer.config.id,
          " was made without attention to lists: its LayerSpec needs lists=True");
  }
  CheckStep();
  const ForwardPlan& plan = step_->plan();
  if (!positions.defined()) Raise(kTypeError, "positions must be a tensor, got None");
  if (positions.ndim() != 2) {
    Raise(kValueError, "positions must have shape [rows, width], got ",
          ShapeText(positions.shape()));
  }
  step_->tensors().CheckInput("positions", positions, {plan.num_rows(), positions.size(1)}, kInt32);
  if (positions.numel() > std::numeric_limits<int32_t>::max()) {
    Raise(kValueError, "the lists of a step may have at most 2**31 - 1 positions, got ",
          positions.numel());
  }
  if (step_->storage().device().device_type == kDLCPU) CheckPositions(positions);
}

void ListedAttention::CheckStep() const {
  const ForwardPlan& plan = step_->plan();
  if (plan.has_windows()) {
    Raise(kValueError, "attention to lists is not possible for sequences with a window");
  }
  if (plan.has_spans()) {
    Raise(kValueError, "attention to lists is not possible in a step with spans");
  }
  if (plan.needs_tree_mask()) {
    Raise(kValueError, "attention to lists is not possible in a step whose token trees branch");
  }
}

void ListedAttention::CheckPositions(const ffi::Tensor& positions) const {
  const ForwardPlan& plan = step_->plan();
  const auto* data = reinterpret_cast<const int32_t*>(
      static_cast<const char*>(positions.data_ptr()) + positions.byte_offset());
  const int64_t width = positions.size(1);
  const ffi::ShapeView strides = positions.strides();
  int64_t row = 0;
  for (int64_t i = 0; i < plan.num_sequences(); ++i) {
    const auto first_own = static_cast<int32_t>(plan.PastLength(i));
    for (int64_t n = 0; n < plan.NumAppend(i); ++n, ++row) {
      const int32_t* list = data + row * strides[0];
      const int32_t own = first_own + static_cast<int32_t>(n);
      bool is_possible = true;
      for (int64_t j = 0; j < width; ++j) {
        const int32_t position = list[j * strides[1]];
        is_possible &= position >= -1 && position <= own;
      }
      if (is_possible) continue;
      for (int64_t j = 0; j < width; ++j) {
        const int32_t position = list[j * strides[1]];
        if (position >= -1 && position <= own) continue;
        Raise(kValueError, "positions[", row, ", ", j, "] is ", position, ", but this row is at ",
              own, ": it may list 0 to ", own, ", and -1 for none");
      }
    }
  }
}

void ListedAttention::Attend(const StoredLayer& layer, const AttentionCall& call,
                             ffi::Tensor positions) const {
  step_->tensors().MakeCompact({&positions}, Alignment::kElement);
  const StepArrays& arrays = step_->arrays();
  const PageTable table = arrays.page_table(layer.group);
  const ffi::Function& kernel = layer.kernels->Get(KernelName::kAttendListed);
  WithLastArguments(call, /*window=*/std::nullopt, [&](auto... last) {
    kernel(call.q, arrays.query_indptr(), layer.pages, table.indptr, table.page_ids, table.lengths,
           positions, call.o, call.lse, call.sm_scale, last...);
  });
}

void ListedAttention::ChooseTopK(const StoredLayer& layer, double scale, ffi::Tensor q,
                                 ffi::Tensor weights, const ffi::Tensor& positions) const {
  const LayerConfig& config = layer.config;
  if (!layer.kernels->Has(KernelName::kIndexTopK)) {
    Raise(kValueError, "layer ", config.id, " is no index lane");
  }
  CheckStep();
  TensorChecks& tensors = step_->tensors();
  const int64_t num_rows = step_->plan().num_rows(), num_heads = config.num_qo_heads;
  tensors.CheckInput("q", q, {num_rows, num_heads, config.qk_head_dim},
                     step_->storage().config().dtype);
  tensors.CheckInput("weights", weights, {num_rows, num_heads}, kFloat32);
  if (!positions.defined()) Raise(kTypeError, "positions must be a tensor, got None");
  if (positions.ndim() != 2) {
    Raise(kValueError, "positions must have shape [rows, k], got ", ShapeText(positions.shape()));
  }
  tensors.CheckOutput("positions", positions, {num_rows, positions.size(1)}, kInt32);
  if (!step_->HasAppended(layer)) {
    Raise(kValueError, "layer ", config.id, " has not appended this step's index keys; call ",
          "append_index before it");
  }
  tensors.MakeCompact({&q, &weights}, Alignment::kElement);
  const StepArrays& arrays = step_->arrays();
  const PageTable table = arrays.page_table(layer.group);
  layer.kernels->Get(KernelName::kIndexTopK)(q, arrays.query_indptr(), weights, layer.pages,
                                             table.indptr, table.page_ids, table.lengths, positions,
                                             scale);
}

}  // namespace pagedkv
