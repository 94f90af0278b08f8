// SPDX-License-Identifier: Apache-2.0
/*!
 * \file tensor_checks.cc
 * \brief Checks the tensors that a caller passes.
 */
#include "device/tensor_checks.h"

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/dtype.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "device/compact_copy.h"

namespace pagedkv {

namespace {

constexpr size_t kStockAlignment = 64;   // bytes
constexpr size_t kDeviceAlignment = 16;  // bytes: GPU kernels load rows in vectors of 16

}  // namespace

std::string ShapeText(ffi::ShapeView shape) {
  std::string text = "[";
  for (int64_t extent : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(extent);
  }
  return text + "]";
}

TensorChecks::TensorChecks(DLDevice device, ByteCounter counter)
    : device_(device), counter_(std::move(counter)) {}

void TensorChecks::CheckOutput(const char* name, const ffi::Tensor& tensor,
                               std::initializer_list<int64_t> shape, DLDataType dtype) const {
  CheckInput(name, tensor, shape, dtype);
  if (!tensor.IsContiguous()) Raise(kValueError, name, " must be contiguous");
}

void TensorChecks::CheckInput(const char* name, const ffi::Tensor& tensor,
                              std::initializer_list<int64_t> shape, DLDataType dtype) const {
  if (!tensor.defined()) Raise(kTypeError, name, " must be a tensor, got None");
  ffi::ShapeView actual = tensor.shape();
  if (!std::equal(actual.begin(), actual.end(), shape.begin(), shape.end())) {
    Raise(kValueError, name, " must have shape ", ShapeText({shape.begin(), shape.size()}),
          ", got ", ShapeText(actual));
  }
  if (tensor.dtype() != dtype) {
    Raise(kValueError, name, " must be ", ffi::DLDataTypeToString(dtype), ", got ",
          ffi::DLDataTypeToString(tensor.dtype()));
  }
  const DLDevice device = tensor.device();
  if (!IsSame(device, device_)) {
    Raise(kValueError, name, " must be on the cache's device (type ", device_.device_type, ", id ",
          device_.device_id, "), got type ", device.device_type, ", id ", device.device_id);
  }
  if (device.device_type == kDLCPU) return;
  if (!tensor.IsContiguous()) Raise(kValueError, name, " must be contiguous");
  const size_t row_bytes = actual.back() * ItemSize(dtype);
  if (row_bytes % kDeviceAlignment == 0 && !tensor.IsAligned(kDeviceAlignment)) {
    Raise(kValueError, name, " must start at a multiple of ", kDeviceAlignment,
          " bytes: kernels for this device take as many at a time");
  }
}

void TensorChecks::CheckAlignment(const char* name, const ffi::Tensor& tensor,
                                  Alignment alignment) const {
  if (alignment == Alignment::kStock && !tensor.IsAligned(kStockAlignment)) {
    Raise(kValueError, name, " must start at a multiple of ", kStockAlignment,
          " bytes: the stock kernels of this cache rely on it");
  }
}

void TensorChecks::MakeCompact(std::initializer_list<ffi::Tensor*> inputs, Alignment alignment) {
  if (device_.device_type != kDLCPU) {
    for (const ffi::Tensor* input : inputs) CheckAlignment("every tensor", *input, alignment);
    return;
  }
  for (ffi::Tensor* input : inputs) {
    const size_t num_bytes =
        alignment == Alignment::kStock ? kStockAlignment : ItemSize(input->dtype());
    if (input->IsContiguous() && input->IsAligned(num_bytes)) continue;
    ffi::Tensor copy = AllocateTensor(input->shape(), input->dtype(), device_, counter_);
    CopyCompact(*input, copy);
    *input = std::move(copy);
    ++num_copied_;
  }
}

}  // namespace pagedkv
