// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sequence_imports.cc
 * \brief Imports: sequences take their pages first and get the content later.
 */
#include "state/table/sequence_imports.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/error.h"

namespace pagedkv {

int64_t SequenceImports::NumPages(const ImportedSequence& sequence, int32_t pool) const {
  const PageGeometry& geometry = table_->geometry();
  const int32_t s = pool - geometry.num_groups();
  if (s < 0) return geometry.PagesFor(sequence.length) - sequence.first_pages[pool];
  const int64_t interval = geometry.state_group(s).interval;
  return (sequence.state_lengths[s] + interval - 1) / interval - sequence.first_pages[pool];
}

void SequenceImports::CheckStates(const ImportedSequence& sequence, int32_t s) const {
  const PageGeometry& geometry = table_->geometry();
  const int64_t interval = geometry.state_group(s).interval, page_size = geometry.page_size();
  const int64_t length = sequence.state_lengths[s];
  const int64_t first = sequence.first_pages[geometry.StatePool(s)];
  const int64_t num_full = length / interval;
  if (length < 0 || length > sequence.length || first < 0 ||
      first > std::max<int64_t>(num_full - 1, 0)) {
    Raise(kValueError, "sequence ", sequence.id, " of length ", sequence.length,
          " must keep a state that recurrent layers had behind some of its positions, and the one ",
          "behind a multiple of ", interval, " before; got that of the first ", length,
          " and states from that of position ", (first + 1) * interval, " on");
  }
  const int64_t begin = sequence.first_pages[geometry.state_group(s).ingredients] * page_size;
  if (begin < 0 || begin > num_full * interval) {
    Raise(kValueError, "sequence ", sequence.id, " of length ", sequence.length,
          " must keep the ingredients of recurrent layers from position ", num_full * interval,
          " or an earlier one on; got those from position ", begin);
  }
}

void SequenceImports::CheckPositions(const ImportedSequence& sequence, int32_t group) const {
  const PageGeometry& geometry = table_->geometry();
  const int64_t page_size = geometry.page_size();
  const int64_t first = sequence.first_pages[group];
  const int64_t last = geometry.FirstPageToSee(group, sequence.length);
  if (first < 0 || first > last) {
    Raise(kValueError, "sequence ", sequence.id, " of length ", sequence.length,
          " must keep its pages in layer group ", group, " from position ", last * page_size,
          " or an earlier one on, as its window of ", geometry.window(group),
          " has it; got those from position ", first * page_size);
  }
}

void SequenceImports::Check(const ImportedSequence& sequence, int32_t pool) const {
  const PageGeometry& geometry = table_->geometry();
  const int32_t num_groups = geometry.num_groups();
  if (pool >= num_groups) {
    CheckStates(sequence, pool - num_groups);  // and their ingredients
  } else if (geometry.StateGroupOf(pool) < 0) {
    CheckPositions(sequence, pool);
  }
  const auto num_pages = static_cast<int64_t>(sequence.page_numbers[pool].size());
  const int64_t num_needed = NumPages(sequence, pool);
  if (num_pages == num_needed) return;
  Raise(kValueError, "sequence ", sequence.id, " of length ", sequence.length, " needs ",
        num_needed, " pages in ", pool < num_groups ? "layer group " : "state group ",
        pool < num_groups ? pool : pool - num_groups, ", got ", num_pages);
}

int64_t SequenceImports::FirstNeeded(const ImportedSequence& sequence, int32_t pool) const {
  const PageGeometry& geometry = table_->geometry();
  const bool has_states = pool >= geometry.num_groups();
  const int32_t s = has_states ? pool - geometry.num_groups() : geometry.StateGroupOf(pool);
  if (s < 0) return geometry.FirstPageToKeep(pool, sequence.length);
  const int64_t first_state =
      geometry.FirstStateToKeep(sequence.length, sequence.state_lengths[s], s);
  if (!has_states) return geometry.PageOf(first_state);
  return std::max<int64_t>(first_state / geometry.state_group(s).interval - 1, 0);
}

std::vector<bool> SequenceImports::PagesToTake(const std::vector<ImportedSequence>& imported,
                                               int32_t pool) const {
  int64_t num_numbers = 0;
  for (const ImportedSequence& sequence : imported) {
    Check(sequence, pool);
    num_numbers += static_cast<int64_t>(sequence.page_numbers[pool].size());
  }
  // The index of each page in its sequences. All numbers must be used, which bounds them.
  std::vector<int64_t> index_of(num_numbers, -1);
  std::vector<bool> is_taken(num_numbers, false);  // those that are needed, at first
  int64_t num_pages = 0, num_taken = 0;
  for (const ImportedSequence& sequence : imported) {
    int64_t index = sequence.first_pages[pool];
    const int64_t first_needed = FirstNeeded(sequence, pool);
    for (int64_t number : sequence.page_numbers[pool]) {
      if (number < 0 || number >= num_numbers ||
          (index_of[number] != -1 && index_of[number] != index)) {
        Raise(kValueError, "page ", index, " of sequence ", sequence.id, " in layer group ", pool,
              " has a wrong number: ", number);
      }
      num_pages = std::max(num_pages, number + 1);
      index_of[number] = index++;
      if (index <= first_needed || is_taken[number]) continue;
      is_taken[number] = true;
      ++num_taken;
    }
  }
  auto unused = std::find(index_of.begin(), index_of.begin() + num_pages, -1);
  if (unused != index_of.begin() + num_pages) {
    Raise(kValueError, "no sequence has page ", unused - index_of.begin(), " of layer group ",
          pool);
  }
  const int64_t num_available = table_->pool(pool).num_available();
  if (num_taken > num_available) table_->RaiseFull(pool, num_taken, "the import");
  is_taken.resize(num_pages);
  std::vector<int64_t> others;  // the last ones first: pops reach back as far as there is room
  for (int64_t number = 0; number < num_pages; ++number) {
    if (!is_taken[number]) others.push_back(number);
  }
  std::sort(others.begin(), others.end(),
            [&](int64_t a, int64_t b) { return index_of[a] > index_of[b]; });
  others.resize(std::min<size_t>(others.size(), num_available - num_taken));
  for (int64_t number : others) is_taken[number] = true;
  return is_taken;
}

int64_t SequenceImports::NumLeftOut(const ImportedSequence& sequence, int32_t pool,
                                    const std::vector<bool>& is_taken) {
  const std::vector<int64_t>& numbers = sequence.page_numbers[pool];
  auto count = static_cast<int64_t>(numbers.size());
  while (count > 0 && is_taken[numbers[count - 1]]) --count;
  return count;
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

void SequenceImports::Begin(std::vector<ImportedSequence> imported, size_t num_page_groups) const {
  const auto num_groups = static_cast<size_t>(table_->num_groups());
  const int32_t num_pools = table_->geometry().num_pools();
  auto import = std::make_shared<SequenceImport>();
  import->num_arrived.resize(num_page_groups, 0);
  std::vector<std::vector<bool>> is_taken;  // [pool][page number]
  for (int32_t p = 0; p < num_pools; ++p) {
    is_taken.push_back(PagesToTake(imported, p));
    import->pages.emplace_back(is_taken[p].size(), -1);
  }
  std::vector<std::vector<std::vector<int32_t>>> pages;  // [sequence][pool]
  for (ImportedSequence& sequence : imported) {
    import->ids.push_back(sequence.id);
    pages.emplace_back();
    for (int32_t p = 0; p < num_pools; ++p) {
      std::vector<int64_t>& numbers = sequence.page_numbers[p];
      const int64_t num_left_out = NumLeftOut(sequence, p, is_taken[p]);
      numbers.erase(numbers.begin(), numbers.begin() + num_left_out);
      sequence.first_pages[p] += num_left_out;
      pages.back().emplace_back(numbers.size());
    }
  }
  AddSequences(import->ids);  // the last step that may throw

  for (size_t i = 0; i < imported.size(); ++i) {
    Sequence& sequence = table_->At(imported[i].id);
    for (int32_t p = 0; p < num_pools; ++p) {
      for (size_t k = 0; k < pages[i][p].size(); ++k) {
        int32_t& page = import->pages[p][imported[i].page_numbers[p][k]];
        if (page == -1) {
          page = table_->pool(p).Allocate();
        } else {
          table_->pool(p).AddOwner(page);
        }
        pages[i][p][k] = page;
      }
    }
    for (size_t s = 0; s < sequence.states.size(); ++s) {
      SequenceStates& states = sequence.states[s];
      states.length = imported[i].state_lengths[s];
      states.first_page = imported[i].first_pages[num_groups + s];
      states.pages = std::move(pages[i][num_groups + s]);
    }
    pages[i].resize(num_groups);
    imported[i].first_pages.resize(num_groups);
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
  for (int64_t each : import->ids) {
    Sequence* sequence = table_->Find(each);
    sequence->import = nullptr;
    table_->Slide(sequence);
  }
}

int64_t SequenceImports::num_importing() const {
  const auto& sequences = table_->sequences();
  return std::count_if(sequences.begin(), sequences.end(),
                       [](const auto& entry) { return entry.second.import != nullptr; });
}

}  // namespace pagedkv
