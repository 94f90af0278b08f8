// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sequence_table.cc
 * \brief Sequences and their pages.
 */
#include "sequence_table.h"

#include <algorithm>
#include <sstream>
#include <string>
#include <utility>

#include "error.h"

namespace pagedkv {

SequenceTable::SequenceTable(int64_t max_num_sequences, int32_t page_size,
                             const std::vector<int32_t>& num_pages, std::vector<int64_t> windows)
    : max_num_sequences_(max_num_sequences), page_size_(page_size), windows_(std::move(windows)) {
  windows_.resize(num_pages.size(), 0);
  pools_.reserve(num_pages.size());
  for (int32_t n : num_pages) pools_.emplace_back(n);
}

const Sequence& SequenceTable::Peek(int64_t id) const {
  auto it = sequences_.find(id);
  if (it == sequences_.end()) Raise(kKeyError, "no sequence ", id, " in the cache");
  return it->second;
}

const Sequence& SequenceTable::At(int64_t id) const {
  const Sequence& sequence = Peek(id);
  if (sequence.import != nullptr) {
    Raise(kValueError, "sequence ", id, " is being imported: finish_import makes it usable, ",
          "remove_sequence gives it up");
  }
  return sequence;
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
  sequence.first_pages.resize(pools_.size(), 0);
  return &sequences_.emplace(id, std::move(sequence)).first->second;
}

void SequenceTable::Add(int64_t id) { Insert(id); }

void SequenceTable::Remove(int64_t id) {
  std::shared_ptr<SequenceImport> import = Peek(id).import;
  if (import == nullptr) return RemoveOne(id);
  for (int64_t each : import->ids) RemoveOne(each);
}

void SequenceTable::RemoveOne(int64_t id) {
  Sequence& sequence = sequences_.at(id);
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
  if (position > source.committed_length()) {
    Raise(kValueError, "cannot fork sequence ", parent, " at position ", position,
          ": positions from ", source.committed_length(),
          " on are token tree nodes that are not committed");
  }
  RequireWindow(source, position, "fork");
  std::vector<std::vector<int32_t>> pages(pools_.size());
  std::vector<int64_t> first_pages(pools_.size(), 0);
  for (int32_t g = 0; g < num_groups() && position > 0; ++g) {
    first_pages[g] = source.first_pages[g];
    auto begin = source.pages[g].begin();
    pages[g].assign(begin, begin + (PagesFor(position) - first_pages[g]));
  }

  Sequence* target = Insert(child);  // the last step that may throw
  for (int32_t g = 0; g < num_groups(); ++g) {
    for (int32_t page : pages[g]) pools_[g].AddOwner(page);
  }
  target->pages = std::move(pages);
  target->first_pages = std::move(first_pages);
  Grow(target, position);
}

void SequenceTable::Pop(int64_t id, int64_t count) {
  Sequence& sequence = At(id);
  if (count < 0 || count > sequence.length) {
    Raise(kValueError, "cannot pop ", count, " positions of sequence ", id, ", which has ",
          sequence.length);
  }
  const int64_t length = sequence.length - count;
  RequireWindow(sequence, std::min(length, sequence.committed_length()), "pop");
  sequence.tree.Truncate(std::max<int64_t>(length - sequence.committed_length(), 0));
  Truncate(&sequence, length);
}

void SequenceTable::CommitNodes(Sequence* sequence, int64_t count) noexcept {
  const int64_t length = sequence->committed_length() + count;
  sequence->tree.Truncate(0);
  Truncate(sequence, length);
  Slide(sequence);
}

void SequenceTable::Truncate(Sequence* sequence, int64_t length) noexcept {
  Grow(sequence, length - sequence->length);
  for (int32_t g = 0; g < num_groups(); ++g) {
    if (length == 0) sequence->first_pages[g] = 0;
    int64_t keep = PagesFor(length) - sequence->first_pages[g];
    ReleasePages(sequence, g, static_cast<size_t>(keep));
  }
}

int64_t SequenceTable::FirstVisible(int32_t group, int64_t length) const {
  return windows_[group] == 0 ? 0 : std::max<int64_t>(length - windows_[group] + 1, 0);
}

int64_t SequenceTable::FirstPageToKeep(int32_t group, int64_t length) const {
  return std::max<int64_t>(FirstVisible(group, length) - kPoppable, 0) / page_size_;
}

void SequenceTable::RequireWindow(const Sequence& sequence, int64_t length,
                                  const char* what) const {
  if (length == 0) return;
  for (int32_t g = 0; g < num_groups(); ++g) {
    int64_t first = FirstPosition(sequence, g);
    if (FirstVisible(g, length) >= first) continue;
    Raise(kValueError, "cannot ", what, " sequence ", sequence.id, " (length ", sequence.length,
          ") at position ", length, ": layers with a window of ", windows_[g],
          " would see position ", FirstVisible(g, length), " next, but they keep positions from ",
          first, " on only");
  }
}

void SequenceTable::RequireKept(const Sequence& sequence, int64_t position) const {
  for (int32_t g = 0; g < num_groups(); ++g) {
    int64_t first = FirstPosition(sequence, g);
    if (position >= first) continue;
    Raise(kIndexError, "position ", position, " of sequence ", sequence.id,
          " is gone: layers with a window of ", windows_[g], " keep positions from ", first,
          " on only");
  }
}

void SequenceTable::Slide(Sequence* sequence) noexcept {
  for (int32_t g = 0; g < num_groups(); ++g) {
    int64_t first = FirstPageToKeep(g, sequence->committed_length());
    auto num_gone = static_cast<ptrdiff_t>(first - sequence->first_pages[g]);
    if (num_gone <= 0) continue;
    std::vector<int32_t>& pages = sequence->pages[g];
    for (ptrdiff_t i = num_gone - 1; i >= 0; --i) pools_[g].Release(pages[i]);
    pages.erase(pages.begin(), pages.begin() + num_gone);
    sequence->first_pages[g] = first;
  }
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
      int64_t index = i - sequence->first_pages[g];
      int32_t page = sequence->pages[g][index];
      if (pools_[g].RefCount(page) == 1) continue;
      auto used = std::min<int64_t>(page_size_, sequence->length - i * page_size_);
      copies.push_back({sequence, g, index, page, -1, static_cast<int32_t>(used)});
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

void SequenceTable::RaiseFull(int32_t group, int64_t num_needed, const char* what) const {
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
  std::string where = num_groups() > 1 ? " in layer group " + std::to_string(group) : "";
  Raise(kCacheFullError, what, " needs ", num_needed, " pages, but ", pools_[group].num_free(),
        " of ", pools_[group].num_pages(), " are free", where, who.str());
}

void SequenceTable::CheckPages(const Sequence& sequence, int32_t group, bool has_slid) const {
  const int64_t first = sequence.first_pages[group];
  auto num_pages = static_cast<int64_t>(sequence.pages[group].size());
  if (first + num_pages != PagesFor(sequence.length)) {
    Raise(kRuntimeError, "sequence ", sequence.id, " of length ", sequence.length, " has ",
          num_pages, " pages after ", first, " gone ones in group ", group);
  }
  const int64_t length = sequence.committed_length();
  const int64_t visible = FirstVisible(group, length);
  if (first < 0 || first * page_size_ > visible ||
      (has_slid && first < FirstPageToKeep(group, length))) {
    Raise(kRuntimeError, "sequence ", sequence.id, " of committed length ", length,
          " keeps pages from ", first, " on in group ", group, ", but its next row sees position ",
          visible, " with a window of ", windows_[group]);
  }
  for (int32_t page : sequence.pages[group]) {
    if (page < 0 || page >= pools_[group].num_pages()) {
      Raise(kRuntimeError, "sequence ", sequence.id, " has page ", page, ", which is no page");
    }
  }
}

void SequenceTable::CheckIntegrity(bool has_slid) const {
  int64_t total_length = 0;
  for (const auto& [id, sequence] : sequences_) {
    total_length += sequence.length;
    sequence.tree.CheckIntegrity(id);
    if (sequence.committed_length() < 0) {
      Raise(kRuntimeError, "sequence ", id, " of length ", sequence.length, " has ",
            sequence.tree.size(), " tree nodes");
    }
  }
  if (total_length != total_length_) {
    Raise(kRuntimeError, "the lengths sum to ", total_length, ", not to ", total_length_);
  }
  for (int32_t g = 0; g < num_groups(); ++g) {
    std::vector<int32_t> num_owners(pools_[g].num_pages(), 0);
    for (const auto& [id, sequence] : sequences_) {
      if (sequence.id != id) Raise(kRuntimeError, "sequence ", id, " believes to be ", sequence.id);
      CheckPages(sequence, g, has_slid);
      for (int32_t page : sequence.pages[g]) ++num_owners[page];
    }
    pools_[g].CheckIntegrity(num_owners);
  }
}

}  // namespace pagedkv
