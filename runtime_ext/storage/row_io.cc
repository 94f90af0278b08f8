// SPDX-License-Identifier: Apache-2.0
/*!
 * \file row_io.cc
 * \brief Byte copies of plain rows; kernels for quantized ones.
 */
#include "storage/row_io.h"

#include <algorithm>

#include "device/device_stream.h"

namespace pagedkv {

namespace {

/*! \brief The slots as an int32 tensor on the device of the pages. */
ffi::Tensor SlotTensor(const StoredLayer& layer, const std::vector<int32_t>& slots) {
  const DLDevice device = layer.pages.device();
  const auto count = static_cast<int64_t>(slots.size());
  ffi::Tensor host = AllocateTensor({count}, kInt32, {kDLCPU, 0}, UncountedBytes());
  std::copy(slots.begin(), slots.end(), static_cast<int32_t*>(host.data_ptr()));
  if (IsHost(device)) return host;
  ffi::Tensor copy = AllocateTensor({count}, kInt32, device, UncountedBytes());
  void* stream = CurrentStream(device);
  CopyBytes(host, 0, copy, 0, count * static_cast<int64_t>(sizeof(int32_t)), stream);
  Synchronize(device, stream);  // the host's array goes
  return copy;
}

ffi::Tensor Slice(const ffi::Tensor& tensor, int64_t index) {
  if (!tensor.defined()) return tensor;
  ffi::ShapeView shape = tensor.shape(), strides = tensor.strides();
  return tensor.as_strided(ffi::ShapeView(shape.data() + 1, shape.size() - 1),
                           ffi::ShapeView(strides.data() + 1, strides.size() - 1),
                           index * strides[0]);
}

/*! \brief Calls visit(tensor, offset in it, offset in the pages, bytes) for every plain row, but
 * not for those of negative slots. */
template <typename Visitor>
void VisitPlainRows(const StoredLayer& layer, const std::vector<int32_t>& slots,
                    const LayerRows& rows, Visitor visit) {
  const SlotLayout& layout = layer.layout;
  const int64_t num_heads = layer.config.num_kv_heads;
  for (size_t n = 0; n < slots.size(); ++n) {
    if (slots[n] < 0) continue;
    const int64_t first_row = static_cast<int64_t>(n) * num_heads;
    for (const SlotLayout::Section& section : layout.sections) {
      for (int64_t i = section.first_row; i < section.end_row(); ++i) {
        visit(i < num_heads ? rows.k : rows.v, (first_row + i % num_heads) * section.row_bytes,
              layout.RowOffset(section, slots[n], i), section.row_bytes);
      }
    }
  }
}

}  // namespace

LayerRows LayerRows::At(int64_t index) const { return {Slice(k, index), Slice(v, index)}; }

void ReadRows(const StoredLayer& layer, const std::vector<int32_t>& slots, const LayerRows& rows,
              int64_t index) {
  if (slots.empty()) return;
  if (layer.config.codec) {
    const ffi::Tensor at = SlotTensor(layer, slots);
    if (layer.config.is_mla()) {
      layer.kernels->Get(KernelName::kDebugGetKVMLA)(layer.pages, at, rows.k, index);
    } else {
      layer.kernels->Get(KernelName::kDebugGetKV)(layer.pages, at, rows.k, rows.v, index);
    }
    return;
  }
  void* stream = CurrentStream(layer.pages.device());
  VisitPlainRows(layer, slots, rows.At(index),
                 [&](const ffi::Tensor& tensor, int64_t row, int64_t paged, int64_t num_bytes) {
                   CopyBytes(layer.pages, paged, tensor, row, num_bytes, stream);
                 });
}

void AppendRows(const StoredLayer& layer, const ffi::Tensor& k, const ffi::Tensor& v,
                const ffi::Tensor& slots) {
  const ffi::Function& append = layer.kernels->Get(KernelName::kTransposeAppend);
  const ffi::Tensor& scales = layer.config.kv_scales;
  scales.defined() ? append(layer.pages, k, v, slots, scales) : append(layer.pages, k, v, slots);
}

void WriteRows(const StoredLayer& layer, const std::vector<int32_t>& slots, const LayerRows& rows) {
  if (slots.empty()) return;
  if (layer.config.codec) {
    const ffi::Tensor at = SlotTensor(layer, slots);
    if (layer.config.is_mla()) {
      layer.kernels->Get(KernelName::kTransposeAppendMLA)(layer.pages, rows.k, at);
    } else {
      AppendRows(layer, rows.k, rows.v, at);
    }
    return;
  }
  void* stream = CurrentStream(layer.pages.device());
  VisitPlainRows(layer, slots, rows,
                 [&](const ffi::Tensor& tensor, int64_t row, int64_t paged, int64_t num_bytes) {
                   CopyBytes(tensor, row, layer.pages, paged, num_bytes, stream);
                 });
}

}  // namespace pagedkv
