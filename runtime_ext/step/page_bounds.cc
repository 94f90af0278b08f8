// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_bounds.cc
 * \brief Bounds of the rows of K in each page.
 */
#include "step/page_bounds.h"

#include <algorithm>
#include <array>

#include "device/device_memory.h"

namespace pagedkv {

namespace {

const int32_t* DataOf(const ffi::Tensor& tensor) {
  return reinterpret_cast<const int32_t*>(static_cast<const char*>(tensor.data_ptr()) +
                                          tensor.byte_offset());
}

/*! \brief Numbers as an argument of a kernel. */
ffi::Tensor TensorOf(const std::vector<int32_t>& numbers, DLDevice device) {
  const std::array<int64_t, 1> shape{static_cast<int64_t>(numbers.size())};
  ffi::Tensor tensor =
      AllocateTensor(ffi::ShapeView(shape.data(), shape.size()), kInt32, device, UncountedBytes());
  std::copy(numbers.begin(), numbers.end(), static_cast<int32_t*>(tensor.data_ptr()));
  return tensor;
}

}  // namespace

PageBounds::PageBounds(const LayerStorage& storage, const SequenceTable& table)
    : storage_(storage), table_(table), layers_(storage.layers().size()) {
  const DLDataType dtype = storage.config().dtype;
  for (const StoredLayer& layer : storage.layers()) {
    const LayerConfig& config = layer.config;
    // Layers with and without a window may share kernels.
    if (!layer.kernels->Has(KernelName::kPageBounds) || config.window > 0) continue;
    const int64_t num_pages = table.pool(layer.group).num_pages();
    const std::array<int64_t, 3> shape{num_pages, config.num_kv_heads, 2 * config.qk_head_dim};
    layers_[layer.index] = {AllocateTensor(ffi::ShapeView(shape.data(), shape.size()), dtype,
                                           storage.device(), storage.counter()),
                            std::vector<Covered>(num_pages)};
  }
}

void PageBounds::NoteAppend(const StoredLayer& layer, const ffi::Tensor& slots) {
  Layer& known = layers_[layer.index];
  if (!known.bounds.defined()) return;
  const auto page_size = static_cast<int32_t>(storage_.config().page_size);
  const int32_t* data = DataOf(slots);
  for (int64_t i = 0; i < slots.size(0); ++i) {
    if (data[i] >= 0) known.covered[data[i] / page_size] = {};
  }
}

void PageBounds::Forget() {
  for (Layer& layer : layers_) std::fill(layer.covered.begin(), layer.covered.end(), Covered{});
}

const ffi::Tensor& PageBounds::Update(const StoredLayer& layer, const PageTable& pages) {
  Layer& known = layers_[layer.index];
  try {
    Compute(layer, pages, &known);
  } catch (...) {  // pages are noted before the kernel has run
    std::fill(known.covered.begin(), known.covered.end(), Covered{});
    throw;
  }
  return known.bounds;
}

void PageBounds::Compute(const StoredLayer& layer, const PageTable& pages, Layer* known) const {
  const PagePool& pool = table_.pool(layer.group);
  const auto page_size = static_cast<int32_t>(storage_.config().page_size);
  const int32_t *indptr = DataOf(pages.indptr), *ids = DataOf(pages.page_ids);
  const int32_t* last_lengths = DataOf(pages.lengths);
  std::vector<int32_t> missing, lengths;
  for (int64_t i = 0; i + 1 < pages.indptr.size(0); ++i) {
    for (int32_t entry = indptr[i]; entry < indptr[i + 1]; ++entry) {
      const int32_t page = ids[entry];
      const int32_t num_slots = entry + 1 < indptr[i + 1] ? page_size : last_lengths[i];
      const Covered now{pool.Generation(page), num_slots};
      Covered& covered = known->covered[page];
      if (covered.generation == now.generation && covered.num_slots == now.num_slots) continue;
      covered = now;
      missing.push_back(page);
      lengths.push_back(num_slots);
    }
  }
  if (missing.empty()) return;
  const DLDevice device = storage_.device();
  layer.kernels->Get(KernelName::kPageBounds)(layer.pages, TensorOf(missing, device),
                                              TensorOf(lengths, device), known->bounds);
}

}  // namespace pagedkv
