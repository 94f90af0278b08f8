// SPDX-License-Identifier: Apache-2.0
/*!
 * \file compact_copy.cc
 * \brief Walks the outer dimensions and copies runs of contiguous elements.
 */
#include "device/compact_copy.h"

#include <cstdint>
#include <cstring>

namespace pagedkv {

namespace {

struct Walk {
  const int64_t* shape;
  const int64_t* strides;  // elements
  int run_dim;             // the dimensions from this one on are contiguous
  int64_t item_bytes, run_bytes;
  char* to;

  void Copy(const char* from, int dim) {
    if (dim == run_dim) {
      std::memcpy(to, from, run_bytes);
      to += run_bytes;
      return;
    }
    for (int64_t i = 0; i < shape[dim]; ++i) Copy(from + i * strides[dim] * item_bytes, dim + 1);
  }
};

}  // namespace

void CopyCompact(const tvm::ffi::Tensor& source, const tvm::ffi::Tensor& destination) {
  if (source.numel() == 0) return;
  tvm::ffi::ShapeView shape = source.shape(), strides = source.strides();
  const DLTensor& from = *source.GetDLTensorPtr();
  const DLTensor& to = *destination.GetDLTensorPtr();
  Walk walk{shape.data(), strides.data(), static_cast<int>(shape.size()), 0, 0, nullptr};
  walk.item_bytes = walk.run_bytes = (from.dtype.bits * from.dtype.lanes + 7) / 8;
  for (int64_t expected = 1; walk.run_dim > 0; --walk.run_dim) {
    const int64_t size = shape[walk.run_dim - 1];
    if (size != 1 && strides[walk.run_dim - 1] != expected) break;
    expected *= size;
    walk.run_bytes *= size;
  }
  walk.to = static_cast<char*>(to.data) + to.byte_offset;
  walk.Copy(static_cast<const char*>(from.data) + from.byte_offset, 0);
}

}  // namespace pagedkv
