// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sink_logits.cc
 * \brief Learned sinks of a layer.
 */
#include "attention/sink_logits.h"

#include <algorithm>
#include <limits>

#include "base/error.h"

namespace pagedkv {

SinkLogits::SinkLogits(Step* step, const StoredLayer& layer) : step_(step), layer_(layer) {
  if (!layer.config.has_sink_logits) return;
  const LayerStorage& storage = step->storage();
  const int64_t num_heads = layer.config.num_qo_heads;
  none_ = AllocateTensor({num_heads}, kFloat32, storage.device(), storage.counter());
  const ffi::Tensor host = AllocateTensor({num_heads}, kFloat32, {kDLCPU, 0}, UncountedBytes());
  std::fill_n(static_cast<float*>(host.data_ptr()), num_heads,
              -std::numeric_limits<float>::infinity());
  void* stream = CurrentStream(storage.device());
  CopyBytes(host, 0, none_, 0, num_heads * static_cast<int64_t>(sizeof(float)), stream);
  Synchronize(storage.device(), stream);  // before the host's values go
}

void SinkLogits::Check(const ffi::Optional<ffi::Tensor>& logits) const {
  if (!logits) return;
  const LayerConfig& config = layer_.config;
  if (config.is_mla() && !config.has_sink_logits) {
    Raise(kValueError, "layer ", config.id,
          " was made without learned sinks: the LayerSpec of an MLA layer needs sink_logits=True");
  }
  step_->tensors().CheckInput("sink_logits", *logits, {config.num_qo_heads}, kFloat32);
  if (!config.has_sink_logits) layer_.kernels->Get(KernelName::kApplySinks);
}

ffi::Tensor SinkLogits::Argument(const ffi::Optional<ffi::Tensor>& logits) const {
  return logits && layer_.config.has_sink_logits ? Compact(*logits) : none_;
}

void SinkLogits::Apply(const ffi::Optional<ffi::Tensor>& logits, const AttentionCall& call) const {
  if (!logits || layer_.config.has_sink_logits) return;
  layer_.kernels->Get(KernelName::kApplySinks)(call.o, call.lse, Compact(*logits));
}

ffi::Tensor SinkLogits::Compact(const ffi::Tensor& logits) const {
  ffi::Tensor compact = logits;
  step_->tensors().MakeCompact({&compact}, Alignment::kElement);
  return compact;
}

}  // namespace pagedkv
