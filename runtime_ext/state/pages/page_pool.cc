// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_pool.cc
 * \brief Pages with reference counts.
 */
#include "state/pages/page_pool.h"

#include <algorithm>
#include <random>

#include "base/error.h"

namespace pagedkv {

PagePool::PagePool(int32_t num_pages)
    : ref_counts_(num_pages, 0), contents_(num_pages), free_(num_pages), cached_(num_pages) {
  for (int32_t i = 0; i < num_pages; ++i) free_[i] = num_pages - 1 - i;
}

int32_t PagePool::Reclaim() {
  const int32_t page = cached_.first();
  if (observer_ != nullptr) observer_->BeforeReclaim(page);
  Uncache(page);
  ref_counts_[page] = 1;
  Content& content = contents_[page];
  ++content.generation;
  content.reclaimed_keepers = content.num_keepers;
  content.reclaimed_returns = content.num_returns;
  content.reclaimed_priority = content.priority;
  SetPriority(page, 0);
  content.num_keepers = content.num_returns = 0;
  ++num_reclaimed_;
  return page;
}

void PagePool::Unallocate(int32_t page) {
  ref_counts_[page] = 0;
  Content& content = contents_[page];
  if (content.reclaimed_keepers == kNotReclaimed) return free_.push_back(page);
  --content.generation;
  content.num_keepers = content.reclaimed_keepers;
  content.num_returns = content.reclaimed_returns;
  SetPriority(page, content.reclaimed_priority);
  content.reclaimed_keepers = kNotReclaimed;
  --num_reclaimed_;
  cached_.InsertOldest(page, RankOf(page));
  num_cached_for_return_ += IsForReturn(page);
}

void PagePool::AddOwner(int32_t page) {
  const int32_t count = ++ref_counts_[page];
  if (count == 2) ++num_shared_;
  if (count > 1) return;
  Uncache(page);
  num_held_and_kept_ += contents_[page].num_keepers > 0;
}

bool PagePool::DropOwner(int32_t page) {
  const int32_t left = --ref_counts_[page];
  if (left == 1) --num_shared_;
  if (left > 0) return false;
  num_held_and_kept_ -= contents_[page].num_keepers > 0;
  return true;
}

void PagePool::Release(int32_t page) {
  if (!DropOwner(page)) return;
  if (contents_[page].num_keepers > 0) {
    cached_.Insert(page, RankOf(page));
    num_cached_for_return_ += IsForReturn(page);
  } else {
    Free(page);
  }
}

void PagePool::ReleaseFrom(size_t keep, std::vector<int32_t>* pages) {
  // From the end, so that the pages come back in their order.
  for (; pages->size() > keep; pages->pop_back()) Release(pages->back());
}

void PagePool::SetPriority(int32_t page, uint8_t priority) {
  Content& content = contents_[page];
  num_retained_ += (priority > 0) - (content.priority > 0);
  content.priority = priority;
  if (cached_.Contains(page)) cached_.SetRank(page, RankOf(page));
}

void PagePool::ReclaimEarly(int32_t page) {
  if (!cached_.Contains(page) || RankOf(page) > 0) return;
  cached_.Remove(page);
  cached_.InsertOldest(page);
}

void PagePool::Free(int32_t page) {
  SetPriority(page, 0);
  ++contents_[page].generation;
  contents_[page].reclaimed_keepers = kNotReclaimed;
  free_.push_back(page);  // within the capacity that the constructor reserved
}

void PagePool::AddKeeper(int32_t page, Keeper keeper) {
  const int32_t count = ++contents_[page].num_keepers;
  const bool is_held = ref_counts_[page] > 0;
  num_held_and_kept_ += count == 1 && is_held;
  if (keeper != Keeper::kReturn || ++contents_[page].num_returns > 1 || is_held) return;
  ++num_cached_for_return_;
  cached_.SetRank(page, RankOf(page));
}

void PagePool::DropKeeper(int32_t page, Keeper keeper) {
  const int32_t left = --contents_[page].num_keepers;
  const bool was_last_return = keeper == Keeper::kReturn && --contents_[page].num_returns == 0;
  if (ref_counts_[page] > 0) {
    num_held_and_kept_ -= left == 0;
    return;
  }
  num_cached_for_return_ -= was_last_return;
  if (left > 0 && !was_last_return) return;
  cached_.Remove(page);
  left > 0 ? cached_.Insert(page, RankOf(page)) : Free(page);
}

void PagePool::Overwrite(int32_t page) {
  Content& content = contents_[page];
  if (content.num_keepers == 0) return;
  content.num_keepers = content.num_returns = 0;
  SetPriority(page, 0);
  ++content.generation;
  ++num_reclaimed_;
  --num_held_and_kept_;
}

void PagePool::ShuffleFree(uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::shuffle(free_.begin(), free_.end(), engine);
}

void PagePool::CheckLists(const std::vector<int32_t>& num_owners) const {
  std::vector<bool> is_free(ref_counts_.size(), false), is_cached(ref_counts_.size(), false);
  for (int32_t page : free_) {
    if (page < 0 || page >= num_pages())
      Raise(kRuntimeError, "free page ", page, " is out of range");
    if (is_free[page]) Raise(kRuntimeError, "page ", page, " is free twice");
    is_free[page] = true;
  }
  const std::vector<int32_t> cached = cached_.List();
  if (static_cast<int32_t>(cached.size()) != num_cached()) {
    Raise(kRuntimeError, "the pool counts ", num_cached(), " cached pages but has ", cached.size());
  }
  uint8_t rank = 0;
  for (int32_t page : cached) {
    if (RankOf(page) < rank) Raise(kRuntimeError, "the cached page ", page, " is out of order");
    rank = RankOf(page);
    is_cached[page] = true;
    if (NumKeepers(page) == 0)
      Raise(kRuntimeError, "the cached page ", page, " cannot be found by anything");
  }
  for (int32_t page = 0; page < num_pages(); ++page) {
    if (is_free[page] + is_cached[page] + (num_owners[page] > 0) != 1) {
      Raise(kRuntimeError, "page ", page, " has ", num_owners[page], " owners and is ",
            is_free[page] ? "free" : "not free", " and ",
            is_cached[page] ? "cached" : "not cached");
    }
  }
}

void PagePool::CheckIntegrity(const std::vector<int32_t>& num_owners,
                              const std::vector<int32_t>& num_keepers,
                              const std::vector<int32_t>& num_returns) const {
  int32_t num_shared = 0, num_held_and_kept = 0, num_cached_for_return = 0;
  for (int32_t page = 0; page < num_pages(); ++page) {
    if (ref_counts_[page] != num_owners[page]) {
      Raise(kRuntimeError, "page ", page, " counts ", ref_counts_[page], " owners but has ",
            num_owners[page]);
    }
    if (NumKeepers(page) != num_keepers[page]) {
      Raise(kRuntimeError, "page ", page, " counts ", NumKeepers(page), " keepers but has ",
            num_keepers[page]);
    }
    if (contents_[page].num_returns != num_returns[page]) {
      Raise(kRuntimeError, "page ", page, " counts ", contents_[page].num_returns,
            " keepers that return to it but has ", num_returns[page]);
    }
    num_cached_for_return += cached_.Contains(page) && num_returns[page] > 0;
    num_shared += num_owners[page] > 1;
    num_held_and_kept += num_owners[page] > 0 && num_keepers[page] > 0;
  }
  CheckLists(num_owners);
  if (num_cached_for_return != num_cached_for_return_) {
    Raise(kRuntimeError, "the pool counts ", num_cached_for_return_,
          " cached pages that sequences may return to, but has ", num_cached_for_return);
  }
  if (num_shared != num_shared_ || num_held_and_kept != num_held_and_kept_) {
    Raise(kRuntimeError, "the pool counts ", num_shared_, " shared pages and ", num_held_and_kept_,
          " held ones with keepers, but has ", num_shared, " and ", num_held_and_kept);
  }
  for (int32_t page : free_) {
    if (num_keepers[page] > 0) Raise(kRuntimeError, "page ", page, " is free but has keepers");
  }
}

}  // namespace pagedkv
