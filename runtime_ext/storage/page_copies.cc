// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_copies.cc
 * \brief Copies of pages that have other owners, before they are written.
 *
 * One by one, or with the kernel `copy_pages` all of a layer at once: sequences that were forked
 * together are written together, and one by one they take a launch for each page and layer.
 */
#include <algorithm>
#include <memory>
#include <vector>

#include "ffi/paged_kv_cache.h"

namespace pagedkv {

namespace {

constexpr int64_t kNumbersOfCopy = 3;  // source, destination, length

/*! \brief A page of each sequence of a step. */
int64_t MostCopiesAtOnce(const CacheConfig& config) {
  return std::min(config.max_num_sequences, config.prefill_chunk_size);
}

}  // namespace

void PagedKVCacheObj::MakeCopyArrays() {
  auto can_copy_many = [this](const Layer& layer) {
    return KernelsOf(layer).Has(KernelName::kCopyPages);
  };
  if (!std::all_of(layers_.begin(), layers_.end(), can_copy_many)) return;
  copy_array_sizes_.assign(groups_.size(), kNumbersOfCopy * MostCopiesAtOnce(config_));
  copy_aux_ = std::make_unique<AuxData>(config_.has_merged_aux, config_.device, copy_array_sizes_,
                                        allocated_bytes_);
}

void PagedKVCacheObj::CopyPages(const std::vector<PageCopy>& copies) {
  const PageCopy* next = copies.data();
  const PageCopy* end = next + copies.size();
  while (copy_aux_ != nullptr && next != end) {
    const PageCopy* until = next + std::min<int64_t>(end - next, MostCopiesAtOnce(config_));
    CopyPagesTogether(next, until);
    next = until;
  }
  for (; next != end; ++next) {
    for (int64_t layer : groups_[next->group].layers) {
      KernelsOf(layers_[layer])
          .Get(KernelName::kCopySinglePage)(
              layers_[layer].pages, static_cast<int64_t>(next->source),
              static_cast<int64_t>(next->destination), static_cast<int64_t>(next->length));
    }
  }
}

void PagedKVCacheObj::CopyPagesTogether(const PageCopy* begin, const PageCopy* end) {
  const size_t num_groups = groups_.size();
  std::vector<int64_t>& sizes = copy_array_sizes_;
  sizes.assign(num_groups, 0);
  for (const PageCopy* copy = begin; copy != end; ++copy) sizes[copy->group] += kNumbersOfCopy;
  copy_aux_->Layout(sizes);
  for (size_t g = 0; g < num_groups; ++g) {
    const int64_t count = sizes[g] / kNumbersOfCopy;
    int32_t* out = copy_aux_->host(g);
    for (const PageCopy* copy = begin; copy != end; ++copy) {
      if (copy->group != static_cast<int32_t>(g)) continue;
      out[0] = copy->source;
      out[count] = copy->destination;
      out[2 * count] = copy->length;
      ++out;
    }
  }
  copy_aux_->Upload();
  for (size_t g = 0; g < num_groups; ++g) {
    const int64_t count = sizes[g] / kNumbersOfCopy;
    if (count == 0) continue;
    const ffi::Tensor numbers = copy_aux_->Matrix(g, kNumbersOfCopy, count);
    for (int64_t layer : groups_[g].layers) {
      KernelsOf(layers_[layer]).Get(KernelName::kCopyPages)(layers_[layer].pages, numbers);
    }
  }
}

}  // namespace pagedkv
