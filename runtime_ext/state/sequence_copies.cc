// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sequence_copies.cc
 * \brief Copies of shared pages, and of pages with keepers, before a write.
 */
#include <algorithm>

#include "base/error.h"
#include "state/sequence_table.h"

namespace pagedkv {

std::vector<PageCopy> SequenceTable::AcquireCopies(Sequence* sequence, int64_t begin, int64_t end) {
  std::vector<PageCopy> copies;
  try {
    AcquireCopies(sequence, begin, end, CopiesOf::kSharedPages, &copies);
    AcquireCopies(sequence, begin, end, CopiesOf::kKeptPages, &copies);
  } catch (...) {
    ReleaseCopies(copies, /*were_made=*/false);
    throw;
  }
  return copies;
}

void SequenceTable::AcquireCopies(Sequence* sequence, int64_t begin, int64_t end, CopiesOf which,
                                  std::vector<PageCopy>* copies) {
  std::vector<PageCopy> more;
  for (int32_t g = 0; g < num_groups(); ++g) {
    const size_t first = more.size();
    auto num_needed = [&] { return static_cast<int64_t>(more.size() - first); };
    const int64_t last = PageIndex(*sequence, g, end - 1);
    for (int64_t index = PageIndex(*sequence, g, begin); index <= last; ++index) {
      const int32_t page = sequence->pages[g][index];
      const bool is_shared = pools_[g].RefCount(page) > 1;
      if (is_shared != (which == CopiesOf::kSharedPages)) continue;
      if (!ShouldCopy(g, page, num_needed())) continue;
      const int64_t text_length = sequence->window.TextLength(sequence->length);
      auto used = std::min<int64_t>(page_size_, text_length - PageBegin(*sequence, g, index));
      more.push_back({sequence, g, index, page, -1, static_cast<int32_t>(used)});
    }
    if (num_needed() > pools_[g].num_available()) RaiseFull(g, num_needed());
  }
  copies->reserve(copies->size() + more.size());  // the last step that may throw
  for (PageCopy& copy : more) {
    copy.destination = pools_[copy.group].Allocate();
    copies->push_back(copy);
  }
}

void SequenceTable::ReleaseCopies(const std::vector<PageCopy>& copies, bool were_made) noexcept {
  for (auto it = copies.rbegin(); it != copies.rend(); ++it) {
    PagePool& pool = pools_[it->group];
    were_made ? pool.Release(it->destination) : pool.Unallocate(it->destination);
  }
}

void SequenceTable::CommitCopies(const std::vector<PageCopy>& copies) noexcept {
  for (const PageCopy& copy : copies) {
    copy.sequence->pages[copy.group][copy.index] = copy.destination;
    pools_[copy.group].Release(copy.source);
  }
}

void SequenceTable::Overwrite(const Sequence& sequence, int64_t begin, int64_t end) noexcept {
  for (int32_t g = 0; g < num_groups() && begin < end; ++g) {
    const int64_t last = PageIndex(sequence, g, end - 1);
    for (int64_t index = PageIndex(sequence, g, begin); index <= last; ++index) {
      pools_[g].Overwrite(sequence.pages[g][index]);
    }
  }
}

}  // namespace pagedkv
