// SPDX-License-Identifier: Apache-2.0
/*!
 * \file forward_plan_advance.cc
 * \brief A decode step that continues the last one: each sequence appends one more row.
 *
 * What the last step left behind makes this short. Every sequence owns its last page alone: shared
 * ones were copied. Nothing that decides about segments has changed, because new pages are never
 * shared. So a sequence either goes on in its last page or begins a new one.
 */
#include <algorithm>
#include <limits>

#include "state/plans/forward_plan.h"

namespace pagedkv {

bool ForwardPlan::IsSameBatch(IntSpan sequence_ids, IntSpan append_lengths) const {
  const size_t size = items_.size();
  if (sequence_ids.size != size || append_lengths.size != size) return false;
  int64_t differences = 0;
  for (size_t i = 0; i < size; ++i) {  // without a way out, so that the loop has vectors
    differences |= (sequence_ids.data[i] ^ advances_.ids[i]) | (append_lengths.data[i] ^ 1);
  }
  return differences == 0;
}

int64_t ForwardPlan::NumSharingChanges() const {
  int64_t total = 0;
  for (int32_t g = 0; g < table_->num_groups(); ++g) {
    total += table_->pool(g).num_sharing_changes();
  }
  return total;
}

bool ForwardPlan::HasChanged() const {
  return table_->num_changes() != advances_.num_changes ||
         NumSharingChanges() != advances_.num_sharing_changes;
}

/*! \brief Notes what later steps are compared with. */
void ForwardPlan::NoteBatch(IntSpan sequence_ids) {
  if (!is_decode()) return;
  advances_.ids.assign(sequence_ids.data, sequence_ids.data + sequence_ids.size);
  advances_.crossings.reserve(sequence_ids.size);
  advances_.max_length = 0;
  for (const Item& item : items_) {
    advances_.max_length = std::max(advances_.max_length, item.past_length + 1);
  }
}

/*! \brief At the end of a step: lets the next one advance if this one is as the next one needs it.
 */
void ForwardPlan::PermitAdvance() noexcept {
  const bool has_windows = has_windows_ || table_->geometry().has_windows();
  advances_.are_possible = is_decode() && !has_trees() && !has_windows;
  if (is_advanced()) return;  // compared with the same state as before
  advances_.num_changes = table_->num_changes();
  advances_.num_sharing_changes = NumSharingChanges();
}

bool ForwardPlan::Advance(IntSpan sequence_ids, IntSpan append_lengths) {
  Advances& last = advances_;
  if (!last.are_possible) return false;
  last.are_possible = false;  // until this step has ended
  if (HasChanged() || !IsSameBatch(sequence_ids, append_lengths)) return false;
  if (last.max_length == std::numeric_limits<int32_t>::max()) return false;
  const PageGeometry& geometry = table_->geometry();
  last.crossings.clear();
  for (size_t i = 0; i < items_.size(); ++i) {
    const int64_t length = ++items_[i].past_length;
    if (geometry.SlotOf(length) == 0) last.crossings.push_back(i);
  }
  const auto num_pages = static_cast<int64_t>(last.crossings.size());
  if (num_pages > last.num_page_ids) return false;
  for (int32_t g = 0; g < table_->num_groups(); ++g) {
    if (num_pages > table_->pool(g).num_available()) return false;
  }
  ++last.max_length;
  last.num_page_ids -= num_pages;
  return last.is_current = true;
}

void ForwardPlan::AcquireForAdvance() {
  // Reserve first: what follows cannot fail.
  for (int32_t g = 0; g < table_->num_groups(); ++g) {
    groups_[g].acquired.reserve(advances_.crossings.size());
    for (size_t i : advances_.crossings) {
      std::vector<int32_t>& list = items_[i].sequence->pages[g];
      if (list.size() == list.capacity()) list.reserve(std::max(list.size() + 1, 2 * list.size()));
    }
  }
  table_->growing().reserve(items_.size());
  for (int32_t g = 0; g < table_->num_groups(); ++g) {
    std::vector<int32_t>& acquired = groups_[g].acquired;
    acquired.clear();
    for (size_t n = advances_.crossings.size(); n > 0; --n) {
      acquired.push_back(table_->pool(g).Allocate());
    }
  }
}

void ForwardPlan::ReleaseAdvance() noexcept {
  for (int32_t g = table_->num_groups() - 1; g >= 0; --g) {
    std::vector<int32_t>& acquired = groups_[g].acquired;
    for (; !acquired.empty(); acquired.pop_back()) table_->pool(g).Unallocate(acquired.back());
  }
}

void ForwardPlan::CommitAdvance() noexcept {
  for (int32_t g = 0; g < table_->num_groups(); ++g) {
    const int32_t* page = groups_[g].acquired.data();
    for (size_t i : advances_.crossings) items_[i].sequence->pages[g].push_back(*page++);
  }
  if (!table_->is_growing()) {
    std::vector<Sequence*>& growing = table_->growing();
    growing.clear();
    for (const Item& item : items_) growing.push_back(item.sequence);
  }
  table_->GrowEach();
}

void ForwardPlan::AbortAdvance() noexcept {
  table_->Settle();
  for (int32_t g = table_->num_groups() - 1; g >= 0; --g) {
    for (size_t i : advances_.crossings) items_[i].sequence->pages[g].pop_back();
    std::vector<int32_t>& acquired = groups_[g].acquired;
    for (; !acquired.empty(); acquired.pop_back()) table_->pool(g).Release(acquired.back());
  }
  AbortItems();
}

}  // namespace pagedkv
