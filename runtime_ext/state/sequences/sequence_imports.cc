// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sequence_imports.cc
 * \brief Imports: sequences take their pages first and get the content later.
 */
#include "state/sequences/sequence_imports.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/error.h"

namespace pagedkv {

void SequenceImports::Check(const ImportedSequence& sequence, int32_t group) const {
  const PageGeometry& geometry = table_->geometry();
  const int64_t page_size = geometry.page_size();
  const int64_t first = sequence.first_pages[group];
  const int64_t last = geometry.FirstPageToSee(group, sequence.length);
  const int64_t min_first = geometry.FirstPageToKeep(group, sequence.length);
  if (first < min_first || first > last) {
    Raise(kValueError, "sequence ", sequence.id, " of length ", sequence.length,
          " must keep its pages in layer group ", group, " from position ", min_first * page_size,
          " to ", last * page_size, " on, as its window of ", geometry.window(group),
          " has it; got those from position ", first * page_size);
  }
  const auto num_pages = static_cast<int64_t>(sequence.page_numbers[group].size());
  if (num_pages != geometry.PagesFor(sequence.length) - first) {
    Raise(kValueError, "sequence ", sequence.id, " of length ", sequence.length, " needs ",
          geometry.PagesFor(sequence.length) - first, " pages in layer group ", group, ", got ",
          num_pages);
  }
}

int64_t SequenceImports::CountPages(const std::vector<ImportedSequence>& imported,
                                    int32_t group) const {
  int64_t num_numbers = 0;
  for (const ImportedSequence& sequence : imported) {
    Check(sequence, group);
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
  if (num_pages > table_->pool(group).num_available()) {
    table_->RaiseFull(group, num_pages, "the import");
  }
  return num_pages;
}

void SequenceImports::AddSequences(const std::vector<int64_t>& ids) const {
  std::vector<int64_t> sorted = ids;
  std::sort(sorted.begin(), sorted.end());
  auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) Raise(kValueError, "sequence ", *twice, " is twice in the import");
  std::vector<int64_t> inserted;
  inserted.reserve(ids.size());
  try {
    for (int64_t id : ids) {
      auto it = table_->sequences().find(id);
      const bool is_there = it != table_->sequences().end();
      if (is_there && it->second.window.IsSet()) {
        Raise(kValueError, "sequence ", id, " has a sliding window, so it cannot be imported");
      }
      if (is_there && it->second.length == 0 && it->second.import == nullptr) continue;
      table_->Add(id);
      inserted.push_back(id);
    }
  } catch (...) {
    for (int64_t id : inserted) table_->Remove(id);
    throw;
  }
}

void SequenceImports::Begin(std::vector<ImportedSequence> imported, size_t num_layers) const {
  const int32_t num_groups = table_->num_groups();
  auto import = std::make_shared<SequenceImport>();
  import->num_arrived.resize(num_layers, 0);
  for (int32_t g = 0; g < num_groups; ++g) {
    import->pages.emplace_back(CountPages(imported, g), -1);
  }
  std::vector<std::vector<std::vector<int32_t>>> pages;  // [sequence][group]
  for (const ImportedSequence& sequence : imported) {
    import->ids.push_back(sequence.id);
    pages.emplace_back();
    for (const auto& numbers : sequence.page_numbers) pages.back().emplace_back(numbers.size());
  }
  AddSequences(import->ids);  // the last step that may throw

  for (size_t i = 0; i < imported.size(); ++i) {
    Sequence& sequence = table_->At(imported[i].id);
    for (int32_t g = 0; g < num_groups; ++g) {
      for (size_t k = 0; k < pages[i][g].size(); ++k) {
        int32_t& page = import->pages[g][imported[i].page_numbers[g][k]];
        if (page == -1) {
          page = table_->pool(g).Allocate();
        } else {
          table_->pool(g).AddOwner(page);
        }
        pages[i][g][k] = page;
      }
    }
    sequence.pages = std::move(pages[i]);
    sequence.first_pages = std::move(imported[i].first_pages);
    sequence.import = import;
    sequence.send.reset();  // what was to be sent would have been computed here
    table_->Grow(&sequence, imported[i].length);
  }
}

SequenceImport& SequenceImports::At(int64_t id) const {
  const Sequence& sequence = table_->Peek(id);
  if (sequence.import == nullptr) {
    Raise(kValueError, "no import of sequence ", id, " is under way; call prepare_import first");
  }
  return *sequence.import;
}

void SequenceImports::Finish(int64_t id) const {
  At(id);
  const std::shared_ptr<SequenceImport> import = table_->Peek(id).import;
  for (int64_t each : import->ids) table_->Find(each)->import = nullptr;
}

int64_t SequenceImports::num_importing() const {
  const auto& sequences = table_->sequences();
  return std::count_if(sequences.begin(), sequences.end(),
                       [](const auto& entry) { return entry.second.import != nullptr; });
}

}  // namespace pagedkv
