// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sequence_import.cc
 * \brief Imports: sequences take their pages first and get the content later.
 */
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "state/sequence_table.h"

namespace pagedkv {

void SequenceTable::CheckImported(const ImportedSequence& sequence, int32_t group) const {
  const int64_t first = sequence.first_pages[group];
  const int64_t last = FirstVisible(group, sequence.length) / page_size_;
  const int64_t min_first = FirstPageToKeep(group, sequence.length);
  if (first < min_first || first > last) {
    Raise(kValueError, "sequence ", sequence.id, " of length ", sequence.length,
          " must keep its pages in layer group ", group, " from position ", min_first * page_size_,
          " to ", last * page_size_, " on, as its window of ", windows_[group],
          " has it; got those from position ", first * page_size_);
  }
  const auto num_pages = static_cast<int64_t>(sequence.page_numbers[group].size());
  if (num_pages != PagesFor(sequence.length) - first) {
    Raise(kValueError, "sequence ", sequence.id, " of length ", sequence.length, " needs ",
          PagesFor(sequence.length) - first, " pages in layer group ", group, ", got ", num_pages);
  }
}

int64_t SequenceTable::CountImported(const std::vector<ImportedSequence>& imported,
                                     int32_t group) const {
  int64_t num_numbers = 0;
  for (const ImportedSequence& sequence : imported) {
    CheckImported(sequence, group);
    num_numbers += static_cast<int64_t>(sequence.page_numbers[group].size());
  }
  // The index of each page in its sequences. All numbers must be used, which bounds them.
  std::vector<int64_t> index_of(num_numbers, -1);
  int64_t num_pages = 0;
  for (const ImportedSequence& sequence : imported) {
    int64_t index = sequence.first_pages[group];
    for (int64_t number : sequence.page_numbers[group]) {
      if (number < 0 || number >= num_numbers ||
          (index_of[number] != -1 && index_of[number] != index)) {
        Raise(kValueError, "page ", index, " of sequence ", sequence.id, " in layer group ", group,
              " has a wrong number: ", number);
      }
      num_pages = std::max(num_pages, number + 1);
      index_of[number] = index++;
    }
  }
  auto unused = std::find(index_of.begin(), index_of.begin() + num_pages, -1);
  if (unused != index_of.begin() + num_pages) {
    Raise(kValueError, "no sequence has page ", unused - index_of.begin(), " of layer group ",
          group);
  }
  if (num_pages > pools_[group].num_available()) RaiseFull(group, num_pages, "the import");
  return num_pages;
}

void SequenceTable::InsertImported(const std::vector<int64_t>& ids) {
  std::vector<int64_t> sorted = ids;
  std::sort(sorted.begin(), sorted.end());
  auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) Raise(kValueError, "sequence ", *twice, " is twice in the import");
  std::vector<int64_t> inserted;
  inserted.reserve(ids.size());
  try {
    for (int64_t id : ids) {
      auto it = sequences_.find(id);
      const bool is_there = it != sequences_.end();
      if (is_there && it->second.window.IsSet()) {
        Raise(kValueError, "sequence ", id, " has a sliding window, so it cannot be imported");
      }
      if (is_there && it->second.length == 0 && it->second.import == nullptr) continue;
      Insert(id);
      inserted.push_back(id);
    }
  } catch (...) {
    for (int64_t id : inserted) sequences_.erase(id);
    throw;
  }
}

void SequenceTable::BeginImport(std::vector<ImportedSequence> imported, size_t num_layers) {
  auto import = std::make_shared<SequenceImport>();
  import->num_arrived.resize(num_layers, 0);
  for (int32_t g = 0; g < num_groups(); ++g) {
    import->pages.emplace_back(CountImported(imported, g), -1);
  }
  std::vector<std::vector<std::vector<int32_t>>> pages;  // [sequence][group]
  for (const ImportedSequence& sequence : imported) {
    import->ids.push_back(sequence.id);
    pages.emplace_back();
    for (const auto& numbers : sequence.page_numbers) pages.back().emplace_back(numbers.size());
  }
  InsertImported(import->ids);  // the last step that may throw

  for (size_t i = 0; i < imported.size(); ++i) {
    Sequence& sequence = At(imported[i].id);
    for (int32_t g = 0; g < num_groups(); ++g) {
      for (size_t k = 0; k < pages[i][g].size(); ++k) {
        int32_t& page = import->pages[g][imported[i].page_numbers[g][k]];
        if (page == -1) {
          page = pools_[g].Allocate();
        } else {
          pools_[g].AddOwner(page);
        }
        pages[i][g][k] = page;
      }
    }
    sequence.pages = std::move(pages[i]);
    sequence.first_pages = std::move(imported[i].first_pages);
    sequence.import = import;
    sequence.send.reset();  // what was to be sent would have been computed here
    Grow(&sequence, imported[i].length);
  }
}

SequenceImport& SequenceTable::ImportOf(int64_t id) const {
  const Sequence& sequence = Peek(id);
  if (sequence.import == nullptr) {
    Raise(kValueError, "no import of sequence ", id, " is under way; call prepare_import first");
  }
  return *sequence.import;
}

void SequenceTable::FinishImport(int64_t id) {
  ImportOf(id);
  std::shared_ptr<SequenceImport> import = Peek(id).import;
  for (int64_t each : import->ids) sequences_.at(each).import = nullptr;
}

int64_t SequenceTable::num_importing() const {
  return std::count_if(sequences_.begin(), sequences_.end(),
                       [](const auto& entry) { return entry.second.import != nullptr; });
}

}  // namespace pagedkv
