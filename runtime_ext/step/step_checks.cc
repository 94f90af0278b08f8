// SPDX-License-Identifier: Apache-2.0
/*!
 * \file step_checks.cc
 * \brief What a call within a step needs: the step, a layer, tensors that fit.
 */
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/dtype.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "device/compact_copy.h"
#include "ffi/paged_kv_cache.h"

namespace pagedkv {

namespace {

constexpr size_t kStockAlignment = 64;
// Kernels for GPUs take rows 16 bytes at a time.
constexpr size_t kDeviceAlignment = 16;

}  // namespace

void PagedKVCacheObj::RequireForward(const char* what) const {
  if (phase_ == Phase::kAttending) {
    Raise(kValueError, what, " is not possible while a kernel of the step runs");
  }
  if (phase_ != Phase::kForward) {
    Raise(kValueError, what, " is possible within a step only; call begin_forward first");
  }
}

const PagedKVCacheObj::Layer& PagedKVCacheObj::LayerAt(int64_t layer) const {
  config_.stage.RequireOwn(layer);
  const int64_t index = config_.layer_index[layer - config_.stage.begin()];
  if (index < 0) {
    Raise(kValueError, "layer ", layer, " is a linear attention layer: it keeps no K and V here");
  }
  return layers_[index];
}

bool PagedKVCacheObj::HasStockKernel(const Layer& layer,
                                     std::initializer_list<KernelName> names) const {
  const KernelSet& kernels = KernelsOf(layer);
  return std::any_of(names.begin(), names.end(),
                     [&](KernelName name) { return kernels.IsStock(name); });
}

void PagedKVCacheObj::CheckScale(double sm_scale) const {
  if (!std::isfinite(sm_scale)) Raise(kValueError, "sm_scale must be finite, got ", sm_scale);
}

void PagedKVCacheObj::CheckTensor(const char* name, const ffi::Tensor& tensor,
                                  std::initializer_list<int64_t> shape, DLDataType dtype) const {
  CheckInput(name, tensor, shape, dtype);
  if (!tensor.IsContiguous()) Raise(kValueError, name, " must be contiguous");
}

void PagedKVCacheObj::CheckInput(const char* name, const ffi::Tensor& tensor,
                                 std::initializer_list<int64_t> shape, DLDataType dtype) const {
  if (!tensor.defined()) Raise(kTypeError, name, " must be a tensor, got None");
  ffi::ShapeView actual = tensor.shape();
  if (!std::equal(actual.begin(), actual.end(), shape.begin(), shape.end())) {
    Raise(kValueError, name, " must have shape ", ffi::Shape(shape), ", got ", ffi::Shape(actual));
  }
  if (tensor.dtype() != dtype) {
    Raise(kValueError, name, " must be ", ffi::DLDataTypeToString(dtype), ", got ",
          ffi::DLDataTypeToString(tensor.dtype()));
  }
  DLDevice device = tensor.device();
  if (device.device_type != config_.device.device_type ||
      device.device_id != config_.device.device_id) {
    Raise(kValueError, name, " must be on the cache's device (type ", config_.device.device_type,
          ", id ", config_.device.device_id, "), got type ", device.device_type, ", id ",
          device.device_id);
  }
  if (device.device_type == kDLCPU) return;
  if (!tensor.IsContiguous()) Raise(kValueError, name, " must be contiguous");
  const size_t row_bytes = actual.back() * ((dtype.bits + 7) / 8);
  if (row_bytes % kDeviceAlignment == 0 && !tensor.IsAligned(kDeviceAlignment)) {
    Raise(kValueError, name, " must start at a multiple of ", kDeviceAlignment,
          " bytes: kernels for this device take as many at a time");
  }
}

void PagedKVCacheObj::MakeCompact(std::initializer_list<ffi::Tensor*> inputs, bool is_stock) {
  if (config_.device.device_type != kDLCPU) {
    if (is_stock) {
      for (const ffi::Tensor* input : inputs) CheckAlignment("every tensor", *input);
    }
    return;
  }
  for (ffi::Tensor* input : inputs) {
    const size_t alignment = is_stock ? kStockAlignment : (input->dtype().bits + 7) / 8;
    if (input->IsContiguous() && input->IsAligned(alignment)) continue;
    ffi::Tensor copy =
        AllocateTensor(input->shape(), input->dtype(), config_.device, allocated_bytes_);
    CopyCompact(*input, copy);
    *input = std::move(copy);
    ++num_copied_inputs_;
  }
}

void PagedKVCacheObj::CheckAlignment(const char* name, const ffi::Tensor& tensor) const {
  if (!tensor.IsAligned(kStockAlignment)) {
    Raise(kValueError, name, " must start at a multiple of ", kStockAlignment,
          " bytes: the stock kernels of this cache rely on it");
  }
}

}  // namespace pagedkv
