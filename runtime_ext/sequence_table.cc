// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sequence_table.cc
 * \brief Sequences and their pages.
 */
#include "sequence_table.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "error.h"

namespace pagedkv {

SequenceTable::SequenceTable(int64_t max_num_sequences, int32_t page_size,
                             const std::vector<int32_t>& num_pages)
    : max_num_sequences_(max_num_sequences), page_size_(page_size) {
  pools_.reserve(num_pages.size());
  for (int32_t n : num_pages) pools_.emplace_back(n);
}

const Sequence& SequenceTable::At(int64_t id) const {
  auto it = sequences_.find(id);
  if (it == sequences_.end()) Raise(kKeyError, "no sequence ", id, " in the cache");
  return it->second;
}

Sequence& SequenceTable::At(int64_t id) {
  return const_cast<Sequence&>(static_cast<const SequenceTable*>(this)->At(id));
}

Sequence* SequenceTable::Insert(int64_t id) {
  if (sequences_.count(id)) Raise(kValueError, "sequence ", id, " is in the cache already");
  if (num_sequences() >= max_num_sequences_) {
    Raise(kValueError, "sequence ", id, " does not fit: the cache holds its max_num_sequences (",
          max_num_sequences_, ") already");
  }
  Sequence sequence;
  sequence.id = id;
  sequence.pages.resize(pools_.size());
  return &sequences_.emplace(id, std::move(sequence)).first->second;
}

void SequenceTable::Add(int64_t id) { Insert(id); }

void SequenceTable::Remove(int64_t id) {
  Sequence& sequence = At(id);
  for (int32_t g = 0; g < num_groups(); ++g) ReleasePages(&sequence, g, 0);
  total_length_ -= sequence.length;
  sequences_.erase(id);
}

void SequenceTable::Fork(int64_t parent, int64_t child, int64_t position) {
  const Sequence& source = At(parent);
  if (position < -1 || position > source.length) {
    Raise(kValueError, "fork position ", position, " of sequence ", parent, " is not in [0, ",
          source.length, "], nor -1 for its end");
  }
  if (position == -1) position = source.length;
  auto num_pages = static_cast<size_t>(PagesFor(position));
  std::vector<std::vector<int32_t>> pages;
  pages.reserve(pools_.size());
  for (const auto& list : source.pages) pages.emplace_back(list.begin(), list.begin() + num_pages);

  Sequence* target = Insert(child);  // the last step that may throw
  for (int32_t g = 0; g < num_groups(); ++g) {
    for (int32_t page : pages[g]) pools_[g].AddOwner(page);
  }
  target->pages = std::move(pages);
  Grow(target, position);
}

void SequenceTable::Pop(int64_t id, int64_t count) {
  Sequence& sequence = At(id);
  if (count < 0 || count > sequence.length) {
    Raise(kValueError, "cannot pop ", count, " positions of sequence ", id, ", which has ",
          sequence.length);
  }
  Grow(&sequence, -count);
  auto keep = static_cast<size_t>(PagesFor(sequence.length));
  for (int32_t g = 0; g < num_groups(); ++g) ReleasePages(&sequence, g, keep);
}

void SequenceTable::Clear() {
  for (auto& [id, sequence] : sequences_) {
    for (int32_t g = 0; g < num_groups(); ++g) ReleasePages(&sequence, g, 0);
  }
  sequences_.clear();
  total_length_ = 0;
}

void SequenceTable::ReleasePages(Sequence* sequence, int32_t group, size_t keep) noexcept {
  // From the end, so that the pages come back in their order.
  std::vector<int32_t>& pages = sequence->pages[group];
  while (pages.size() > keep) {
    pools_[group].Release(pages.back());
    pages.pop_back();
  }
}

std::vector<PageCopy> SequenceTable::AcquireCopies(Sequence* sequence, int64_t begin, int64_t end) {
  std::vector<PageCopy> copies;
  for (int32_t g = 0; g < num_groups(); ++g) {
    size_t first = copies.size();
    for (int64_t i = begin / page_size_; i < PagesFor(end); ++i) {
      int32_t page = sequence->pages[g][i];
      if (pools_[g].RefCount(page) == 1) continue;
      auto used = std::min<int64_t>(page_size_, sequence->length - i * page_size_);
      copies.push_back({sequence, g, i, page, -1, static_cast<int32_t>(used)});
    }
    auto needed = static_cast<int64_t>(copies.size() - first);
    if (needed > pools_[g].num_free()) RaiseFull(g, needed);
  }
  for (PageCopy& copy : copies) copy.destination = pools_[copy.group].Allocate();
  return copies;
}

void SequenceTable::ReleaseCopies(const std::vector<PageCopy>& copies) noexcept {
  for (auto it = copies.rbegin(); it != copies.rend(); ++it) {
    pools_[it->group].Release(it->destination);
  }
}

void SequenceTable::CommitCopies(const std::vector<PageCopy>& copies) noexcept {
  for (const PageCopy& copy : copies) {
    copy.sequence->pages[copy.group][copy.index] = copy.destination;
    pools_[copy.group].Release(copy.source);
  }
}

void SequenceTable::RaiseFull(int32_t group, int64_t num_needed) const {
  constexpr size_t kNumNamed = 3;
  std::vector<std::pair<size_t, int64_t>> holders;
  for (const auto& [id, sequence] : sequences_) {
    if (!sequence.pages[group].empty()) holders.emplace_back(sequence.pages[group].size(), id);
  }
  std::sort(holders.rbegin(), holders.rend());
  std::ostringstream who;
  for (size_t i = 0; i < std::min(kNumNamed, holders.size()); ++i) {
    who << (i == 0 ? "; most are held by sequence " : ", ") << holders[i].second << " ("
        << holders[i].first << ")";
  }
  Raise(kCacheFullError, "the step needs ", num_needed, " pages, but ", pools_[group].num_free(),
        " of ", pools_[group].num_pages(), " are free", who.str());
}

void SequenceTable::CheckIntegrity() const {
  int64_t total_length = 0;
  for (const auto& [id, sequence] : sequences_) total_length += sequence.length;
  if (total_length != total_length_) {
    Raise(kRuntimeError, "the lengths sum to ", total_length, ", not to ", total_length_);
  }
  for (int32_t g = 0; g < num_groups(); ++g) {
    std::vector<int32_t> num_owners(pools_[g].num_pages(), 0);
    for (const auto& [id, sequence] : sequences_) {
      if (sequence.id != id) Raise(kRuntimeError, "sequence ", id, " believes to be ", sequence.id);
      if (static_cast<int64_t>(sequence.pages[g].size()) != PagesFor(sequence.length)) {
        Raise(kRuntimeError, "sequence ", id, " of length ", sequence.length, " has ",
              sequence.pages[g].size(), " pages in group ", g);
      }
      for (int32_t page : sequence.pages[g]) {
        if (page < 0 || page >= pools_[g].num_pages()) {
          Raise(kRuntimeError, "sequence ", id, " has page ", page, ", which is no page");
        }
        ++num_owners[page];
      }
    }
    pools_[g].CheckIntegrity(num_owners);
  }
}

}  // namespace pagedkv
