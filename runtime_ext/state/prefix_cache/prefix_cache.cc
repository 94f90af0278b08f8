// SPDX-License-Identifier: Apache-2.0
/*!
 * \file prefix_cache.cc
 * \brief Sequences record their tokens, and reuse the pages of earlier texts.
 */
#include "state/prefix_cache/prefix_cache.h"

#include <algorithm>
#include <map>
#include <memory>
#include <new>
#include <utility>

#include "base/error.h"

namespace pagedkv {

std::unique_ptr<TokenRecord> PrefixCache::ReserveRecord(int64_t num_tokens) const {
  auto record = std::make_unique<TokenRecord>();
  record->tail.reserve(std::max<int64_t>(geometry_->page_size(), num_tokens));
  return record;
}

int64_t PrefixCache::FindAndPin(const std::string& salt, TokenSpan tokens,
                                std::vector<PageLoad>* loads) {
  constexpr int kMaxTries = 4;
  for (int i = 0; i < kMaxTries; ++i) {
    const int64_t length = lookup_.Find(salt, tokens);
    if (lookup_.PinLoads(length, loads)) return length;
    ++counts_.failed_loads;
  }
  const int64_t length = lookup_.FindInPools(salt, tokens);
  lookup_.PinLoads(length, loads);  // nothing to pin: it finds what it has just found
  return length;
}

void PrefixCache::TakePages(Sequence* sequence, int64_t length,
                            std::vector<PageLoad>* loads) noexcept {
  for (int32_t g = 0; g < geometry_->num_groups(); ++g) {
    const int64_t first = lookup_.first_page(g);
    sequence->first_pages[g] = first;
    for (int64_t i = first; i < geometry_->PagesFor(length); ++i) {
      const int32_t page = lookup_.IsInPool(i, g) ? lookup_.StoredAt(i, g).page : -1;
      if (page >= 0) (*pools_)[g].AddOwner(page);
      sequence->pages[g].push_back(page);  // within its capacity
    }
  }
  for (int32_t s = 0; s < geometry_->num_state_groups(); ++s) {
    const PrefixLookup::HitStates& hit = lookup_.hit_states(s);
    SequenceStates& states = sequence->states[s];
    states.length = hit.length;
    states.first_page = hit.first_page;
    const int32_t pool = geometry_->StatePool(s);
    const int64_t end = hit.length / geometry_->state_group(s).interval;
    for (int64_t page = hit.first_page; page < end; ++page) {
      const int64_t index = geometry_->TextPageOfState(s, page);
      const int32_t id = lookup_.IsInPool(index, pool) ? lookup_.StoredAt(index, pool).page : -1;
      if (id >= 0) (*pools_)[pool].AddOwner(id);
      states.pages.push_back(id);  // within its capacity
    }
  }
  // Only now: what these reclaim must be none of the pages above.
  for (PageLoad& load : *loads) {
    load.page = (*pools_)[load.group].Allocate();
    const int32_t s = load.group - geometry_->num_groups();
    if (s < 0) {
      sequence->pages[load.group][load.index - sequence->first_pages[load.group]] = load.page;
    } else {
      SequenceStates& states = sequence->states[s];
      states.pages[geometry_->StateBehind(s, load.index) - states.first_page] = load.page;
    }
  }
}

void PrefixCache::TakeHistories(Sequence* sequence) noexcept {
  for (int32_t g = 0; g < geometry_->num_groups(); ++g) {
    const int64_t end = sequence->first_pages[g];
    int64_t first = end;
    while (first > 0 && lookup_.IsInPool(first - 1, g)) --first;
    for (; first < end; ++first) {
      sequence->histories[g].Append(lookup_.StoredAt(first, g).page, &(*pools_)[g]);
    }
  }
  for (int32_t s = 0; s < geometry_->num_state_groups(); ++s) {
    const int32_t pool = geometry_->StatePool(s);
    const int64_t end = sequence->states[s].first_page;
    int64_t first = end;
    while (first > 0 && lookup_.IsInPool(geometry_->TextPageOfState(s, first - 1), pool)) --first;
    for (; first < end; ++first) {
      const int64_t index = geometry_->TextPageOfState(s, first);
      sequence->states[s].history.Append(lookup_.StoredAt(index, pool).page, &(*pools_)[pool]);
    }
  }
}

int64_t PrefixCache::Begin(Sequence* sequence, const std::string& salt, TokenSpan tokens,
                           std::vector<PageLoad>* loads) {
  counts_before_ = counts_;
  std::unique_ptr<TokenRecord> record = ReserveRecord(tokens.size);
  const PrefixTree::Cursor root = tree_.Enter(salt);
  int64_t length;
  try {
    for (std::vector<int32_t>& pages : sequence->pages) {
      pages.reserve(geometry_->PagesFor(tokens.size));
    }
    for (SequenceStates& states : sequence->states) states.pages.reserve(kMaxStatesOfHit);
    length = FindAndPin(salt, tokens, loads);
    if (host_memory_ != nullptr) CountLoads(length, *loads);
  } catch (...) {
    tree_.Leave(root);
    throw;
  }
  TakePages(sequence, length, loads);
  TakeHistories(sequence);
  // Pages behind the end of the tree's path are added when they have their content.
  const int64_t num_pages = std::min(length / geometry_->page_size(), lookup_.num_whole());
  record->cursor = tree_.EnterAt(lookup_.path().node, num_pages);
  record->num_kept = num_pages;
  record->tail.assign(tokens.data + num_pages * geometry_->page_size(), tokens.data + length);
  sequence->tokens = std::move(record);
  tree_.Leave(root);
  ++counts_.lookups;
  counts_.hits += length > 0;
  counts_.tokens += tokens.size;
  counts_.reused_tokens += length;
  return length;
}

void PrefixCache::Record(Sequence* sequence, TokenSpan tokens) {
  RequireNoWindow(*sequence, "have its tokens recorded");
  const int64_t num_recorded = NumRecorded(*sequence);
  const int64_t num_missing = sequence->recordable_length() - num_recorded;
  if (tokens.size > num_missing) {
    RequireWritten(*sequence, num_recorded + tokens.size, "have its tokens recorded");
    if (sequence->first_span <= sequence->publishable_length()) {
      Raise(kValueError, "sequence ", sequence->id, " cannot have tokens from position ",
            sequence->first_span, " on recorded: there begins a span, whose rows depend on what ",
            "follows them");
    }
    Raise(kValueError, "sequence ", sequence->id, " has ", sequence->publishable_length(),
          " committed positions, and the tokens of ", num_recorded,
          " are recorded, so it takes at most ", num_missing, " more, got ", tokens.size);
  }
  if (tokens.size == 0) return;
  if (sequence->tokens == nullptr) {
    std::unique_ptr<TokenRecord> record = ReserveRecord(tokens.size);
    record->cursor = tree_.Enter("");
    sequence->tokens = std::move(record);
  }
  std::vector<int32_t>& tail = sequence->tokens->tail;
  tail.insert(tail.end(), tokens.data, tokens.data + tokens.size);
}

void PrefixCache::StorePages(const Sequence& sequence, const PrefixTree::TextPage& text) noexcept {
  for (int32_t g = 0; g < geometry_->num_groups(); ++g) {
    const int64_t offset = text.index - sequence.first_pages[g];
    int32_t page = -1;
    if (offset >= 0) {
      page = sequence.pages[g][offset];
    } else if (sequence.receive == nullptr) {  // a receive moves the first page on by itself
      page = histories_->PageBehind(sequence, g, text.index);
    }
    if (page >= 0) StorePage(text, g, page);
  }
  for (int32_t s = 0; s < geometry_->num_state_groups(); ++s) {
    const int64_t state = geometry_->StateBehind(s, text.index);
    const int32_t page = state < 0 ? -1 : states_->FindPage(sequence, s, state);
    if (page >= 0) StorePage(text, geometry_->StatePool(s), page);
  }
}

void PrefixCache::AddRecordedPages(Sequence* sequence) noexcept {
  const int64_t page_size = geometry_->page_size();
  TokenRecord& record = *sequence->tokens;
  const auto num_tokens = static_cast<int64_t>(record.tail.size());
  if (num_tokens < page_size) return;
  const int64_t begin = record.cursor.num_pages;
  int64_t used = 0;
  try {
    for (; num_tokens - used >= page_size; used += page_size) {
      StorePages(*sequence, tree_.Advance(&record.cursor, {record.tail.data() + used, page_size}));
    }
  } catch (const std::bad_alloc&) {
    return Drop(sequence);  // others will not find the rest of this text
  }
  record.tail.erase(record.tail.begin(), record.tail.begin() + used);
  if (host_memory_ == nullptr || policy_.writes != TierWrites::kThrough) return;
  try {
    std::vector<PrefixTree::TextPage> texts;
    for (int64_t i = begin; i < record.cursor.num_pages; ++i) {
      texts.push_back(tree_.At(record.cursor, i));
    }
    SavePages(texts);
  } catch (const std::bad_alloc&) {  // others will not find them there
  }
  TouchKept(&record, record.cursor.num_pages - begin);
}

void PrefixCache::TruncateRecord(TokenRecord* record, int64_t length) noexcept {
  const int64_t page_size = geometry_->page_size();
  const int64_t num_pages = length / page_size, num_tail = length % page_size;
  if (length >= NumRecorded(*record)) return;
  if (num_pages >= record->cursor.num_pages) {
    record->tail.resize(length - record->cursor.num_pages * page_size);
    return;
  }
  const TokenSpan tokens = tree_.TokensBefore(record->cursor, num_pages);
  record->tail.assign(tokens.data, tokens.data + num_tail);  // within its capacity
  tree_.MoveBack(&record->cursor, num_pages);
}

std::unique_ptr<TokenRecord> PrefixCache::ReserveFork(const Sequence& source) const {
  if (source.tokens == nullptr) return nullptr;
  return ReserveRecord(static_cast<int64_t>(source.tokens->tail.size()));
}

void PrefixCache::Fork(const Sequence& source, std::unique_ptr<TokenRecord> record,
                       Sequence* target) noexcept {
  if (record == nullptr) return;
  const PrefixTree::Cursor& cursor = source.tokens->cursor;
  record->cursor = tree_.EnterAt(cursor.node, cursor.num_pages);
  record->tail = source.tokens->tail;  // within its capacity
  record->num_kept = source.tokens->num_kept;
  TruncateRecord(record.get(), target->length);
  target->tokens = std::move(record);
}

void PrefixCache::Finish(Sequence* sequence) noexcept {
  AddPages(sequence);
  if (sequence->tokens == nullptr) return;
  TokenRecord& record = *sequence->tokens;
  if (!record.tail.empty()) {
    const TokenSpan tail{record.tail.data(), static_cast<int64_t>(record.tail.size())};
    try {
      const PrefixTree::TextPage text = tree_.AddPartial(&record.cursor, tail);
      if (text.node != nullptr) {
        StorePages(*sequence, text);
        tree_.Leave(tree_.EnterAt(text.node, text.index + 1));  // erases it if it got no pages
      }
    } catch (const std::bad_alloc&) {  // others will not find the last page
    }
  }
  Drop(sequence);
}

void PrefixCache::Drop(Sequence* sequence) noexcept {
  if (sequence->tokens == nullptr) return;
  tree_.Leave(sequence->tokens->cursor);
  sequence->tokens.reset();
}

void PrefixCache::CheckIntegrity(const std::unordered_map<int64_t, Sequence>& sequences,
                                 std::vector<std::vector<int32_t>>* num_keepers) const {
  std::map<const PrefixNode*, int64_t> num_cursors;
  for (const auto& [id, sequence] : sequences) {
    if (sequence.tokens == nullptr) continue;
    ++num_cursors[sequence.tokens->cursor.node];
    if (NumRecorded(sequence) > sequence.recordable_length() || sequence.window.IsSet()) {
      Raise(kRuntimeError, "sequence ", id, " has the tokens of ", NumRecorded(sequence),
            " positions, but only ", sequence.recordable_length(), " that may be published");
    }
  }
  hints_.CountCursors(&num_cursors);
  tree_.CheckIntegrity(std::move(num_cursors), num_keepers);
  hints_.CheckIntegrity();
}

}  // namespace pagedkv
