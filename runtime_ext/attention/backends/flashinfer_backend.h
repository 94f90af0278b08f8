// SPDX-License-Identifier: Apache-2.0
/*!
 * \file flashinfer_backend.h
 * \brief Attention with FlashInfer's functions for `decode`, `prefill` or both.
 */
#ifndef TVM_PAGEDKV_ATTENTION_BACKENDS_FLASHINFER_BACKEND_H_
#define TVM_PAGEDKV_ATTENTION_BACKENDS_FLASHINFER_BACKEND_H_

#include "attention/backends/stock_backend.h"

namespace pagedkv {

/*! \brief FlashInfer knows no windows of sequences: such steps are the stock kernels'. */
class FlashInferBackend : public StockBackend {
 public:
  FlashInferBackend(Step* step, const StoredLayer& layer, const SharedBackendState& shared)
      : StockBackend(step, layer, shared),
        flashinfer_(shared.flashinfer.get()),
        has_decode_(layer.kernels->IsFlashInfer(layer.config.decode())),
        has_prefill_(layer.kernels->IsFlashInfer(layer.config.prefill())) {}

 protected:
  void Decode(const AttentionCall& call, const PageTable& table) override {
    if (!has_decode_ || plan().has_windows()) return StockBackend::Decode(call, table);
    flashinfer_->AttendToPages(call, layer_, table);
  }
  void Prefill(const AttentionCall& call, const PageTable& table) override {
    if (!has_prefill_ || plan().has_windows()) return StockBackend::Prefill(call, table);
    flashinfer_->AttendToPages(call, layer_, table);
  }

 private:
  FlashInfer* flashinfer_;
  bool has_decode_, has_prefill_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_ATTENTION_BACKENDS_FLASHINFER_BACKEND_H_
