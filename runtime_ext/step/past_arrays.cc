// SPDX-License-Identifier: Apache-2.0
/*!
 * \file past_arrays.cc
 * \brief Page tables without the rows of the step.
 */
#include "step/past_arrays.h"

#include <algorithm>

namespace pagedkv {

namespace {

constexpr size_t kTreeOrder = 0;

}  // namespace

PastArrays::PastArrays(const CacheConfig& config, const SequenceTable& table,
                       const ForwardPlan& plan, const ByteCounter& counter)
    : config_(config), table_(table), plan_(plan), plan_arrays_(plan), counter_(counter) {}

PageTable PastArrays::page_table(int32_t group) {
  FillOnce();
  return {PageRange::kPast,
          arrays_->view(Index(group, kPageIndptr)),
          arrays_->view(Index(group, kPageIds)),
          arrays_->view(Index(group, kLengths)),
          arrays_->view(kTreeOrder),
          arrays_.get(),
          Index(group, kLengths)};
}

const ffi::Tensor& PastArrays::tree_order() {
  FillOnce();
  return arrays_->view(kTreeOrder);
}

void PastArrays::FillOnce() {
  if (is_filled_) return;
  const int32_t num_groups = table_.num_groups();
  if (arrays_ == nullptr) {  // room for every step, as StepArrays::InitialSizes has it
    const int64_t num_rows = config_.prefill_chunk_size;
    const int64_t num_sequences = std::min(config_.max_num_sequences, num_rows);
    sizes_.assign(1, num_rows);
    for (int32_t g = 0; g < num_groups; ++g) {
      const int64_t num_pages = table_.pool(g).num_pages();
      sizes_.insert(sizes_.end(), {num_sequences + 1, num_pages, 4 * num_sequences});
    }
    arrays_ = std::make_unique<AuxData>(config_.has_merged_aux, config_.device, sizes_, counter_,
                                        std::vector<std::vector<int64_t>>{{2}});
  }
  sizes_.assign(1, plan_.needs_tree_mask() ? plan_.num_tree_nodes() : 0);
  for (int32_t g = 0; g < num_groups; ++g) {
    sizes_.push_back(plan_.num_sequences() + 1);
    sizes_.push_back(plan_arrays_.NumPages(g, PageRange::kPast));
    sizes_.push_back(plan_arrays_.NumLengthRows(g) * plan_.num_sequences());
  }
  arrays_->Layout(sizes_);
  if (plan_.needs_tree_mask())
    plan_arrays_.FillTreeOrder(PageRange::kPast, arrays_->host(kTreeOrder));
  for (int32_t g = 0; g < num_groups; ++g) {
    auto host = [&](Array array) { return arrays_->host(Index(g, array)); };
    plan_arrays_.FillPageIndptr(g, PageRange::kPast, host(kPageIndptr));
    plan_arrays_.FillPageIds(g, PageRange::kPast, host(kPageIds));
    plan_arrays_.FillLengths(g, PageRange::kPast, host(kLengths));
  }
  arrays_->Upload();
  is_filled_ = true;
}

}  // namespace pagedkv
