// SPDX-License-Identifier: Apache-2.0
/*!
 * \file prefix_cache_host_memory.cc
 * \brief The part of the prefix cache that saves pages to host memory and loads them.
 */
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "state/prefix_cache/prefix_cache.h"

namespace pagedkv {

PrefixCache::~PrefixCache() {
  for (size_t g = 0; g < observers_.size(); ++g) (*pools_)[g].SetObserver(nullptr);
}

void PrefixCache::SetHostMemory(HostMemory* host_memory, PageSaver* saver, TierPolicy policy,
                                std::string space) {
  if (host_memory_ != nullptr)
    Raise(kValueError, "the cache has a prefix cache below its pages already");
  std::vector<Observer> observers(pools_->size());
  tree_.EnableKeys(std::move(space));
  host_memory_ = host_memory;
  saver_ = saver;
  policy_ = policy;
  lookup_.SetHostMemory(host_memory);
  hints_.SetHostMemory(host_memory);
  observers_ = std::move(observers);
  for (int32_t g = 0; g < geometry_->num_pools(); ++g) {
    observers_[g].index = this;
    observers_[g].group = g;
    if (policy.writes == TierWrites::kBack) (*pools_)[g].SetObserver(&observers_[g]);
  }
}

void PrefixCache::SaveReclaimed(int32_t group, int32_t page) noexcept {
  PrefixTree::TextPage text;
  if (!tree_.FindTextOf(group, page, &text)) return;
  if (text.node->TokensOf(text.index - text.node->begin).size < geometry_->page_size()) return;
  try {
    saver_->Save({{group, page, tree_.TextOf(text)}});
  } catch (const std::bad_alloc&) {  // the page is lost
  }
}

int64_t PrefixCache::Prefetch(const std::string& salt, TokenSpan tokens) const {
  if (host_memory_ == nullptr || !host_memory_->has_store()) return 0;
  return host_memory_->Begin(lookup_.MakeLookup(salt, tokens));
}

std::vector<PagePlace> PrefixCache::Locate(const std::string& salt, TokenSpan tokens,
                                           const std::function<bool(int64_t)>& wait) const {
  StoreLookup question;
  std::vector<PagePlace> places = lookup_.Locate(salt, tokens, &question);
  if (host_memory_ == nullptr || !host_memory_->has_store() || question.values.empty())
    return places;
  const std::vector<StoreLookup::Value> values = question.values;
  const auto found = std::make_shared<std::vector<bool>>();
  question.choose = [found](const std::vector<bool>& is_there) {
    *found = is_there;
    return std::vector<size_t>();
  };
  const int64_t ticket = host_memory_->Begin(std::move(question));
  if (ticket == 0 || !wait(ticket)) return places;
  for (size_t v = 0; v < found->size(); ++v) {  // none when the lookup was cancelled
    if (!(*found)[v]) continue;
    places[values[v].page * geometry_->num_groups() + values[v].group] = PagePlace::kStore;
  }
  return places;
}

void PrefixCache::CountLoads(int64_t length, const std::vector<PageLoad>& loads) {
  // Positions of which a group came from below; from the store, if one group did.
  const int64_t page_size = geometry_->page_size();
  std::vector<char> tiers;
  try {
    tiers.resize(static_cast<size_t>(geometry_->PagesFor(length)), 0);
  } catch (...) {
    Unpin(loads);
    throw;
  }
  for (const PageLoad& load : loads) {
    char& tier = tiers[load.index];
    tier = std::max(tier, static_cast<char>(host_memory_->IsFromStore(load.slot) ? 2 : 1));
  }
  for (size_t i = 0; i < tiers.size(); ++i) {
    const int64_t count = std::min(page_size, length - static_cast<int64_t>(i) * page_size);
    counts_.host_tokens += tiers[i] == 1 ? count : 0;
    counts_.store_tokens += tiers[i] == 2 ? count : 0;
  }
}

void PrefixCache::Unpin(const std::vector<PageLoad>& loads) noexcept {
  for (const PageLoad& load : loads) host_memory_->Unpin(load.slot);
}

void PrefixCache::FinishLoads(Sequence* sequence, const std::vector<PageLoad>& loads) noexcept {
  Unpin(loads);
  const TokenRecord& record = *sequence->tokens;
  for (const PageLoad& load : loads) {
    if (load.index < record.cursor.num_pages) {
      StorePage(tree_.At(record.cursor, load.index), load.group, load.page);
    }
  }
  AddPages(sequence);
  if (policy_.writes == TierWrites::kSelective && sequence->tokens != nullptr) {
    CountHits(*sequence->tokens);
  }
  if (policy_.writes == TierWrites::kThrough && sequence->tokens != nullptr) {
    TouchKept(sequence->tokens.get(), 0);
  }
}

void PrefixCache::CountHits(const TokenRecord& record) noexcept {
  try {
    std::vector<PrefixTree::TextPage> texts;
    for (int64_t i = record.cursor.num_pages - 1; i >= 0; --i) {
      const PrefixTree::TextPage text = tree_.At(record.cursor, i);
      if (tree_.CountHit(text) == policy_.min_hits) texts.push_back(text);
    }
    SavePages(texts);
  } catch (const std::bad_alloc&) {  // others will not find them there
  }
}

void PrefixCache::SavePages(const std::vector<PrefixTree::TextPage>& texts) noexcept {
  std::vector<PageSave> saves;
  try {
    for (const PrefixTree::TextPage& text : texts) {
      const StoredPage* stored = text.node->StoredOf(text.index - text.node->begin);
      for (int32_t g = 0; g < geometry_->num_pools(); ++g) {
        if (tree_.IsKnown(g, stored[g])) saves.push_back({g, stored[g].page, tree_.TextOf(text)});
      }
    }
  } catch (const std::bad_alloc&) {  // the tier gets some of them
  }
  if (!saves.empty()) saver_->Save(saves);
}

int64_t PrefixCache::Demote(const std::string& salt, TokenSpan tokens, bool from_host) {
  std::vector<PrefixTree::TextPage> pages;
  const int64_t num_pages = hints_.Demote(salt, tokens, from_host, &pages);
  if (host_memory_ == nullptr) return num_pages;
  auto is_partial = [&](const PrefixTree::TextPage& text) {
    return text.node->TokensOf(text.index - text.node->begin).size < geometry_->page_size();
  };
  pages.erase(std::remove_if(pages.begin(), pages.end(), is_partial), pages.end());
  SavePages(pages);
  return num_pages;
}

void PrefixCache::CancelLoads(Sequence* sequence, const std::vector<PageLoad>& loads) noexcept {
  Unpin(loads);
  Drop(sequence);
  counts_ = counts_before_;
  ++counts_.failed_loads;
}

bool PrefixCache::Touch(const TokenRecord& record, int64_t index) noexcept {
  const PrefixTree::TextPage text = tree_.At(record.cursor, index);
  const PageKey& key = text.node->keyed[text.index - text.node->begin].key;
  bool is_there = false;
  for (int32_t g = 0; g < geometry_->num_pools(); ++g) {
    is_there = host_memory_->Touch(g, key) || is_there;
  }
  return is_there;
}

void PrefixCache::TouchKept(TokenRecord* record, int64_t num_new) noexcept {
  // The last page keeps those before it. A tier that is too small loses some at the end, and those
  // behind them are of less use than the beginning, so the last page before the gap is touched
  // last. Where the gap is wide, the next steps go on looking for it.
  constexpr int64_t kMaxVisits = 8;
  int64_t num_visits = kMaxVisits + num_new;
  int64_t& num_kept = record->num_kept;
  num_kept = std::min(num_kept, record->cursor.num_pages);
  while (num_kept > 0 && num_visits-- > 0 && !Touch(*record, num_kept - 1)) --num_kept;
  while (num_kept < record->cursor.num_pages && num_visits-- > 0 && Touch(*record, num_kept)) {
    ++num_kept;
  }
}

}  // namespace pagedkv
