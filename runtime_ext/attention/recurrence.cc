// SPDX-License-Identifier: Apache-2.0
/*!
 * \file recurrence.cc
 * \brief The calls of a model for a recurrent layer and a short convolution within a step.
 */
#include "attention/recurrence.h"

#include <cmath>

#include "base/error.h"

namespace pagedkv {

void Recurrence::RequireFirstCall(const StoredLayer& layer, const char* what) const {
  if (last_scan_[layer.index] != step_->number()) return;
  Raise(kValueError, what, " of layer ", layer.config.id,
        " was called in this step already: it updates the states in place");
}

void Recurrence::Update(int64_t layer_id, double scale, ffi::Tensor q, ffi::Tensor k, ffi::Tensor v,
                        ffi::Tensor log_decay, ffi::Tensor o, ffi::Optional<ffi::Tensor> beta) {
  const Step::LayerCall scope(step_, "recurrent");
  if (!std::isfinite(scale)) Raise(kValueError, "scale must be finite, got ", scale);
  const StoredLayer& layer = storage_.Recurrent(layer_id);
  const RecurrentShape& shape = *layer.config.recurrent;
  TensorChecks& tensors = step_->tensors();
  const int64_t num_rows = step_->plan().num_rows();
  const DLDataType dtype = storage_.config().dtype;
  tensors.CheckInput("q", q, {num_rows, shape.num_key_heads, shape.key_dim}, dtype);
  tensors.CheckInput("k", k, {num_rows, shape.num_key_heads, shape.key_dim}, dtype);
  tensors.CheckInput("v", v, {num_rows, shape.num_heads, shape.value_dim}, dtype);
  if (shape.decays_by_channel) {
    tensors.CheckInput("log_decay", log_decay, {num_rows, shape.num_heads, shape.key_dim},
                       kFloat32);
  } else {
    tensors.CheckInput("log_decay", log_decay, {num_rows, shape.num_heads}, kFloat32);
  }
  if (beta.has_value() != shape.has_beta) {
    Raise(kTypeError, "beta must be ", shape.has_beta ? "a tensor" : "left out",
          " for the rule of layer ", layer_id);
  }
  if (beta) tensors.CheckInput("beta", *beta, {num_rows, shape.num_heads}, kFloat32);
  tensors.CheckOutput("o", o, {num_rows, shape.num_heads, shape.value_dim}, dtype);
  RequireFirstCall(layer, "recurrent");
  tensors.MakeCompact({&q, &k, &v, &log_decay}, Alignment::kElement);
  const StepArrays& arrays = step_->arrays();
  const ffi::Function& append = layer.kernels->Get(KernelName::kRecurrentAppend);
  const ffi::Tensor& slots = arrays.slots(layer.group);
  if (beta) {
    ffi::Tensor compact = *beta;
    tensors.MakeCompact({&compact}, Alignment::kElement);
    append(k, v, log_decay, compact, slots, layer.pages);
  } else {
    append(k, v, log_decay, slots, layer.pages);
  }
  // A scan that fails may have changed states: it is not repeated, and does not count as written.
  last_scan_[layer.index] = step_->number();
  auto states = [&](StateArray array) -> const ffi::Tensor& {
    return arrays.states(layer.state_group, array);
  };
  layer.kernels->Get(KernelName::kRecurrentScan)(
      q, layer.pages, layer.states, states(StateArray::kSegmentIndptr),
      states(StateArray::kRowIndptr), states(StateArray::kSlots), states(StateArray::kRows),
      states(StateArray::kReadPages), states(StateArray::kWritePages), o, scale);
  step_->NoteAppend(layer);
}

void Recurrence::Convolve(int64_t layer_id, ffi::Tensor x, ffi::Tensor weight, ffi::Tensor o,
                          ffi::Optional<ffi::Tensor> bias) {
  const Step::LayerCall scope(step_, "conv");
  const StoredLayer& layer = storage_.Conv(layer_id);
  const LayerConfig& config = layer.config;
  TensorChecks& tensors = step_->tensors();
  const int64_t num_rows = step_->plan().num_rows(), channels = config.qk_head_dim;
  const DLDataType dtype = storage_.config().dtype;
  tensors.CheckInput("x", x, {num_rows, channels}, dtype);
  tensors.CheckInput("weight", weight, {channels, config.window}, dtype);
  if (bias.has_value() != config.has_bias) {
    Raise(kTypeError, "bias must be ", config.has_bias ? "a tensor" : "left out",
          " for the convolution of layer ", layer_id);
  }
  if (bias) tensors.CheckInput("bias", *bias, {channels}, dtype);
  tensors.CheckOutput("o", o, {num_rows, channels}, dtype);
  tensors.MakeCompact({&x, &weight}, Alignment::kElement);
  const StepArrays& arrays = step_->arrays();
  layer.kernels->Get(KernelName::kRowAppend)(layer.pages, x, arrays.slots(layer.group));
  step_->NoteAppend(layer);
  const ffi::Function& convolve = layer.kernels->Get(KernelName::kCausalConv);
  const ffi::Tensor taps = arrays.taps(layer.group);
  if (bias) {
    ffi::Tensor compact = *bias;
    tensors.MakeCompact({&compact}, Alignment::kElement);
    convolve(x, layer.pages, taps, weight, compact, o);
  } else {
    convolve(x, layer.pages, taps, weight, o);
  }
}

}  // namespace pagedkv
