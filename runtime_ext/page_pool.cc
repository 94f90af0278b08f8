// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_pool.cc
 * \brief Pages with reference counts.
 */
#include "page_pool.h"

#include <algorithm>
#include <random>

#include "error.h"

namespace pagedkv {

PagePool::PagePool(int32_t num_pages) : ref_counts_(num_pages, 0), free_(num_pages) {
  for (int32_t i = 0; i < num_pages; ++i) free_[i] = num_pages - 1 - i;
}

int32_t PagePool::Allocate() {
  int32_t page = free_.back();
  free_.pop_back();
  ref_counts_[page] = 1;
  return page;
}

void PagePool::AddOwner(int32_t page) {
  if (++ref_counts_[page] == 2) ++num_shared_;
}

void PagePool::Release(int32_t page) {
  int32_t left = --ref_counts_[page];
  if (left == 1) --num_shared_;
  if (left == 0) free_.push_back(page);  // within the capacity that the constructor reserved
}

void PagePool::ShuffleFree(uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::shuffle(free_.begin(), free_.end(), engine);
}

void PagePool::CheckIntegrity(const std::vector<int32_t>& num_owners) const {
  std::vector<bool> is_free(ref_counts_.size(), false);
  for (int32_t page : free_) {
    if (page < 0 || page >= num_pages()) Raise(kRuntimeError, "free page ", page, " is no page");
    if (is_free[page]) Raise(kRuntimeError, "page ", page, " is free twice");
    is_free[page] = true;
  }
  int32_t num_shared = 0;
  for (int32_t page = 0; page < num_pages(); ++page) {
    if (ref_counts_[page] != num_owners[page]) {
      Raise(kRuntimeError, "page ", page, " counts ", ref_counts_[page], " owners but has ",
            num_owners[page]);
    }
    if (is_free[page] != (num_owners[page] == 0)) {
      Raise(kRuntimeError, "page ", page, " has ", num_owners[page], " owners and is ",
            is_free[page] ? "free" : "not free");
    }
    num_shared += num_owners[page] > 1;
  }
  if (num_shared != num_shared_) {
    Raise(kRuntimeError, "the pool counts ", num_shared_, " shared pages but has ", num_shared);
  }
}

}  // namespace pagedkv
