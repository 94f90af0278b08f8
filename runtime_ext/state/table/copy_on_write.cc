// SPDX-License-Identifier: Apache-2.0
/*!
 * \file copy_on_write.cc
 * \brief Copies of shared pages, and of pages with keepers, before a write.
 */
#include "state/table/copy_on_write.h"

#include <algorithm>
#include <cstddef>

namespace pagedkv {

void CopyOnWrite::Acquire(Sequence* sequence, int64_t begin, int64_t end) {
  try {
    Acquire(sequence, begin, end, Kind::kShared);
    Acquire(sequence, begin, end, Kind::kKept);
  } catch (...) {
    Release(/*were_made=*/false);
    throw;
  }
}

void CopyOnWrite::Acquire(Sequence* sequence, int64_t begin, int64_t end, Kind kind) {
  const PageGeometry& geometry = table_->geometry();
  std::vector<PageCopy> more;
  for (int32_t g = 0; g < table_->num_groups(); ++g) {
    const PagePool& pool = table_->pool(g);
    const size_t first = more.size();
    auto num_needed = [&] { return static_cast<int64_t>(more.size() - first); };
    const int64_t last = geometry.PageIndex(*sequence, g, end - 1);
    for (int64_t index = geometry.PageIndex(*sequence, g, begin); index <= last; ++index) {
      const int32_t page = sequence->pages[g][index];
      const bool is_shared = pool.RefCount(page) > 1;
      if (is_shared != (kind == Kind::kShared)) continue;
      if (!ShouldCopy(pool, page, num_needed())) continue;
      const int64_t text_length = sequence->window.TextLength(sequence->length);
      auto used = std::min<int64_t>(geometry.page_size(),
                                    text_length - geometry.PageBegin(*sequence, g, index));
      more.push_back({sequence, g, index, page, -1, static_cast<int32_t>(used)});
    }
    if (num_needed() > pool.num_available()) table_->RaiseFull(g, num_needed());
  }
  copies_.reserve(copies_.size() + more.size());  // the last step that may throw
  for (PageCopy& copy : more) {
    copy.destination = table_->pool(copy.group).Allocate();
    copies_.push_back(copy);
  }
}

void CopyOnWrite::Release(bool were_made) noexcept {
  for (; !copies_.empty(); copies_.pop_back()) {
    const PageCopy& copy = copies_.back();
    PagePool& pool = table_->pool(copy.group);
    were_made ? pool.Release(copy.destination) : pool.Unallocate(copy.destination);
  }
}

void CopyOnWrite::Commit() noexcept {
  for (const PageCopy& copy : copies_) {
    copy.sequence->pages[copy.group][copy.index] = copy.destination;
    table_->pool(copy.group).Release(copy.source);
  }
  copies_.clear();
}

void CopyOnWrite::Overwrite(const Sequence& sequence, int64_t begin, int64_t end) const noexcept {
  const PageGeometry& geometry = table_->geometry();
  for (int32_t g = 0; g < table_->num_groups() && begin < end; ++g) {
    const int64_t last = geometry.PageIndex(sequence, g, end - 1);
    for (int64_t index = geometry.PageIndex(sequence, g, begin); index <= last; ++index) {
      table_->pool(g).Overwrite(sequence.pages[g][index]);
    }
  }
}

}  // namespace pagedkv
