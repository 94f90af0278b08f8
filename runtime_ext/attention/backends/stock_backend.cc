// SPDX-License-Identifier: Apache-2.0
/*!
 * \file stock_backend.cc
 * \brief Attention with kernels of the stock cache.
 */
#include "attention/backends/stock_backend.h"

namespace pagedkv {

namespace {

constexpr int64_t kNumMatrixRows = 3;  // last page length, window begin, number of sinks

}  // namespace

StockBackend::StockBackend(Step* step, const StoredLayer& layer, const SharedBackendState& shared)
    : PagedBackend(step, layer, shared),
      is_decode_own_(layer.kernels->IsOwn(layer.config.decode())),
      is_prefill_own_(layer.kernels->IsOwn(layer.config.prefill())) {}

Alignment StockBackend::page_alignment() const {
  return HasForeignWindows() ? Alignment::kStock : PagedBackend::page_alignment();
}

void StockBackend::Append(const ffi::Tensor& qkv) {
  // The pass over the step's rows reads K and V from the workspace.
  AttendsInParts() ? SplitAndAppend(qkv) : PagedBackend::Append(qkv);
}

void StockBackend::Attend(const AttentionCall& call, const ffi::Tensor& k, const ffi::Tensor& v) {
  if (!AttendsInParts()) return PagedBackend::Attend(call, k, v);
  AttendToRows(call, k, v);
  const ByteCounter& counter = step_->storage().counter();
  const ffi::Tensor o = AllocateTensor(call.o.shape(), config().dtype, config().device, counter);
  const ffi::Tensor lse =
      AllocateTensor({call.q.size(0), call.q.size(1)}, kFloat32, config().device, counter);
  AttendToPages({call.sm_scale, call.q, o, lse}, PastPages());
  layer_.kernels->Get(KernelName::kMerge)(call.o, call.lse, o, lse);
}

void StockBackend::Decode(const AttentionCall& call, const PageTable& table) {
  if (!HasForeignWindows()) return PagedBackend::Decode(call, table);
  CallDecode(KernelName::kDecodeSliding, call, table,
             table.LengthMatrix(kNumMatrixRows, plan().num_sequences()));
}

void StockBackend::Prefill(const AttentionCall& call, const PageTable& table) {
  if (!HasForeignWindows()) return PagedBackend::Prefill(call, table);
  CallPrefill(KernelName::kPrefillSliding, call, table,
              table.LengthMatrix(kNumMatrixRows, plan().num_sequences()));
}

}  // namespace pagedkv
