// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_history.cc
 * \brief The pages of one sequence that a window has moved past.
 */
#include "state/pages/page_history.h"

#include <algorithm>
#include <new>

#include "base/error.h"

namespace pagedkv {

namespace {

constexpr size_t kInitialCapacity = 32;  // so that steps seldom allocate

}  // namespace

void PageHistory::SetKeeper(Keeper keeper, PagePool* pool) noexcept {
  for (size_t i = begin_; i < entries_.size() && keeper != keeper_; ++i) {
    if (!IsKnown(entries_[i], *pool)) continue;
    pool->AddKeeper(entries_[i].page, keeper);
    pool->DropKeeper(entries_[i].page, keeper_);
  }
  keeper_ = keeper;
}

void PageHistory::Append(int32_t page, PagePool* pool) noexcept {
  // Pages are mostly reclaimed in the order in which they were added, so stale ones are in front.
  while (size() > 0 && !IsKnown(entries_[begin_], *pool)) DropFirst(pool);
  if (size() == pool->num_pages()) DropFirst(pool);
  if (begin_ > 8 && 2 * begin_ > entries_.size()) {  // amortised constant time
    entries_.erase(entries_.begin(), entries_.begin() + static_cast<ptrdiff_t>(begin_));
    begin_ = 0;
  }
  try {
    if (entries_.capacity() == 0) entries_.reserve(kInitialCapacity);
    entries_.push_back({page, pool->Generation(page)});
  } catch (const std::bad_alloc&) {
    return Clear(pool);  // a later pop or fork reports the pages as reclaimed
  }
  pool->AddKeeper(page, keeper_);
}

void PageHistory::DropFirst(PagePool* pool) noexcept {
  const Entry& entry = entries_[begin_++];
  if (IsKnown(entry, *pool)) pool->DropKeeper(entry.page, keeper_);
}

void PageHistory::DropLast(int64_t count, PagePool* pool) noexcept {
  for (count = std::min(count, size()); count > 0; --count) {
    const Entry entry = entries_.back();
    entries_.pop_back();
    if (IsKnown(entry, *pool)) pool->DropKeeper(entry.page, keeper_);
  }
  if (size() > 0) return;
  entries_.clear();
  begin_ = 0;
}

void PageHistory::CopyWithoutLast(const PageHistory& other, int64_t count,
                                  PagePool* pool) noexcept {
  keeper_ = other.keeper_;
  const int64_t num_copied = other.size() - count;
  if (num_copied <= 0) return;
  const auto begin = other.entries_.begin() + static_cast<ptrdiff_t>(other.begin_);
  try {
    entries_.assign(begin, begin + num_copied);
  } catch (const std::bad_alloc&) {
    return;
  }
  begin_ = 0;
  for (const Entry& entry : entries_) {
    if (IsKnown(entry, *pool)) pool->AddKeeper(entry.page, keeper_);
  }
}

void PageHistory::CountKeepers(const PagePool& pool, std::vector<int32_t>* num_keepers,
                               std::vector<int32_t>* num_returns) const {
  for (size_t i = begin_; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    if (entry.page < 0 || entry.page >= pool.num_pages() ||
        entry.generation > pool.Generation(entry.page)) {
      Raise(kRuntimeError, "a history notes page ", entry.page, " of generation ", entry.generation,
            ", which never was");
    }
    (*num_keepers)[entry.page] += IsKnown(entry, pool);
    (*num_returns)[entry.page] += IsKnown(entry, pool) && keeper_ == Keeper::kReturn;
  }
}

}  // namespace pagedkv
