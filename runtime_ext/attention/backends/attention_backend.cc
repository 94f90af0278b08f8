// SPDX-License-Identifier: Apache-2.0
/*!
 * \file attention_backend.cc
 * \brief Chooses the backend of a layer.
 */
#include "attention/backends/attention_backend.h"

#include "attention/backends/flashinfer_backend.h"
#include "attention/backends/paged_backend.h"
#include "attention/backends/stock_backend.h"
#include "attention/backends/stock_window_backend.h"
#include "config/layer_kernels.h"

namespace pagedkv {

SharedBackendState::SharedBackendState(const Step& step) {
  const CacheConfig& config = step.storage().config();
  if (FlashInfer::IsNeededBy(config)) flashinfer = std::make_unique<FlashInfer>(step);
  if (StockWindowTables::IsNeededBy(config)) {
    stock_windows = std::make_unique<StockWindowTables>(step);
  }
}

std::unique_ptr<AttentionBackend> MakeAttentionBackend(Step* step, const StoredLayer& layer,
                                                       const SharedBackendState& shared) {
  const LayerConfig& config = layer.config;
  const KernelSet& kernels = *layer.kernels;
  if (HasStockWindow(config, kernels)) {
    return std::make_unique<StockWindowBackend>(step, layer, shared);
  }
  if (kernels.IsFlashInfer(config.prefill()) || kernels.IsFlashInfer(config.decode())) {
    return std::make_unique<FlashInferBackend>(step, layer, shared);
  }
  if (!kernels.IsOwn(config.prefill()) || !kernels.IsOwn(config.decode())) {
    return std::make_unique<StockBackend>(step, layer, shared);
  }
  return std::make_unique<PagedBackend>(step, layer, shared);
}

}  // namespace pagedkv
