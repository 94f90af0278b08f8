// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_copier.cc
 * \brief Copies shared pages before a sequence writes to them.
 */
#include "storage/page_copier.h"

#include <algorithm>

namespace pagedkv {

namespace {

constexpr int64_t kNumRows = 3;  // of the argument of copy_pages: source, destination, num_slots

/*! \brief The most pages that one launch copies: one for each sequence of a step. */
int64_t MaxCopies(const CacheConfig& config) {
  return std::min(config.max_num_sequences, config.prefill_chunk_size);
}

}  // namespace

PageCopier::PageCopier(const LayerStorage& storage) : storage_(storage) {
  for (const StoredLayer& layer : storage.layers()) {
    if (!layer.kernels->Has(KernelName::kCopyPages)) return;
  }
  const CacheConfig& config = storage.config();
  array_sizes_.assign(storage.num_groups(), kNumRows * MaxCopies(config));
  arrays_ = std::make_unique<AuxData>(config.has_merged_aux, config.device, array_sizes_,
                                      storage.counter());
}

void PageCopier::Copy(const std::vector<PageCopy>& copies) {
  const PageCopy* next = copies.data();
  const PageCopy* end = next + copies.size();
  while (arrays_ != nullptr && next != end) {
    const PageCopy* until = next + std::min<int64_t>(end - next, MaxCopies(storage_.config()));
    CopyTogether(next, until);
    next = until;
  }
  for (; next != end; ++next) CopyOne(*next);
}

void PageCopier::CopyOne(const PageCopy& copy) const {
  for (int64_t index : storage_.groups()[copy.group].layers) {
    const StoredLayer& layer = storage_.layers()[index];
    layer.kernels->Get(KernelName::kCopySinglePage)(layer.pages, static_cast<int64_t>(copy.source),
                                                    static_cast<int64_t>(copy.destination),
                                                    static_cast<int64_t>(copy.length));
  }
}

void PageCopier::CopyTogether(const PageCopy* begin, const PageCopy* end) {
  const int32_t num_groups = storage_.num_groups();
  array_sizes_.assign(num_groups, 0);
  for (const PageCopy* copy = begin; copy != end; ++copy) array_sizes_[copy->group] += kNumRows;
  arrays_->Layout(array_sizes_);
  for (int32_t g = 0; g < num_groups; ++g) {
    const int64_t count = array_sizes_[g] / kNumRows;
    int32_t* out = arrays_->host(g);
    for (const PageCopy* copy = begin; copy != end; ++copy) {
      if (copy->group != g) continue;
      out[0] = copy->source;
      out[count] = copy->destination;
      out[2 * count] = copy->length;
      ++out;
    }
  }
  arrays_->Upload();
  for (int32_t g = 0; g < num_groups; ++g) {
    const int64_t count = array_sizes_[g] / kNumRows;
    if (count == 0) continue;
    const ffi::Tensor copies = arrays_->Matrix(g, kNumRows, count);
    for (int64_t index : storage_.groups()[g].layers) {
      const StoredLayer& layer = storage_.layers()[index];
      layer.kernels->Get(KernelName::kCopyPages)(layer.pages, copies);
    }
  }
}

}  // namespace pagedkv
