// SPDX-License-Identifier: Apache-2.0
/*!
 * \file eviction_hints.cc
 * \brief Hints about texts that will be needed again.
 */
#include "state/prefix_cache/eviction_hints.h"

#include <algorithm>
#include <iterator>
#include <set>

#include "base/error.h"

namespace pagedkv {

namespace {

/*! \brief In host memory, pages of pinned texts go after those of all priorities. */
constexpr uint8_t kPinPriority = EvictionHints::kMaxPriority + 1;

}  // namespace

template <typename Visit>
void EvictionHints::ForEachPage(const PlacedHint& hint, Visit visit) const {
  PrefixNode* node = hint.cursor.node;
  for (int64_t index = hint.num_pages - 1; index >= 0; --index) {
    while (index < node->begin) node = node->parent;
    visit(node, index);
  }
}

uint8_t EvictionHints::PriorityOf(const PrefixNode& node, int64_t index, int32_t pool) {
  uint8_t priority = 0;
  for (const EvictionHint* hint : node.hints) {
    const bool covers = pool < 0 ? index < hint->num_pages : hint->Covers(pool, index);
    if (covers) priority = std::max(priority, hint->priority);
  }
  return priority;
}

bool EvictionHints::IsPinned(const PrefixNode& node, int64_t index, int32_t pool,
                             const EvictionHint* except) const {
  const int32_t s = pool - geometry_->num_groups();
  if (s >= 0 && geometry_->StateBehind(s, index) < 0) return false;
  return std::any_of(node.hints.begin(), node.hints.end(), [&](const EvictionHint* hint) {
    return hint != except && hint->is_pin && hint->Covers(pool, index);
  });
}

int64_t EvictionHints::Retain(const std::string& salt, TokenSpan tokens, int64_t priority,
                              int64_t expiry_us) {
  if (priority < 1 || priority > kMaxPriority) {
    Raise(kValueError, "priority must be between 1 and ", kMaxPriority, ", got ", priority);
  }
  auto hint = std::make_unique<PlacedHint>();
  hint->priority = static_cast<uint8_t>(priority);
  hint->expiry_us = expiry_us;
  return Add(salt, tokens, std::move(hint));
}

int64_t EvictionHints::Pin(const std::string& salt, TokenSpan tokens, int64_t expiry_us) {
  auto hint = std::make_unique<PlacedHint>();
  hint->priority = kPinPriority;
  hint->is_pin = true;
  hint->expiry_us = expiry_us;
  return Add(salt, tokens, std::move(hint));
}

void EvictionHints::FindFirstPages(EvictionHint* hint) const {
  const int64_t length = hint->num_pages * geometry_->page_size();
  for (int32_t g = 0; g < geometry_->num_groups(); ++g) {
    hint->first_pages.push_back(geometry_->FirstPageToKeep(g, length));
  }
  for (int32_t s = 0; s < geometry_->num_state_groups(); ++s) {
    const int64_t first = geometry_->FirstStateToKeep(length, length, s);
    const int64_t page = first / geometry_->state_group(s).interval - 1;
    hint->first_pages.push_back(geometry_->TextPageOfState(s, std::max<int64_t>(page, 0)));
  }
}

void EvictionHints::CountPinned(const PlacedHint& hint, int64_t sign,
                                std::vector<int64_t>* counts) const {
  if (!hint.is_pin) return;
  ForEachPage(hint, [&](PrefixNode* node, int64_t index) {
    for (int32_t p = 0; p < geometry_->num_pools(); ++p) {
      const int32_t s = p - geometry_->num_groups();
      if (!hint.Covers(p, index) || (s >= 0 && geometry_->StateBehind(s, index) < 0)) continue;
      if (!IsPinned(*node, index, p, &hint)) (*counts)[p] += sign;
    }
  });
}

int64_t EvictionHints::Add(const std::string& salt, TokenSpan tokens,
                           std::unique_ptr<PlacedHint> hint) {
  const int64_t page_size = geometry_->page_size();
  // A cache without layers has no pages, and what its tree knows counts as computed.
  hint->num_pages = geometry_->num_pools() == 0 ? 0 : tokens.size / page_size;
  FindFirstPages(hint.get());
  if (hint->is_pin) {
    const std::vector<bool> none(static_cast<size_t>(hint->num_pages), false);
    hint->pinned.assign(pools_->size(), none);
  }

  hint->cursor = tree_->Enter(salt);
  Hints::iterator added = hints_.end();
  try {
    for (int64_t i = 0; i < hint->num_pages; ++i) {
      tree_->Advance(&hint->cursor, {tokens.data + i * page_size, page_size});
    }
    if (hint->is_pin) RequireRoomForPins(*hint);
    added = hints_.emplace(last_id_ + 1, nullptr).first;
    for (PrefixNode* node = hint->cursor.node; node != nullptr; node = node->parent) {
      if (node->hints.size() == node->hints.capacity()) {
        node->hints.reserve(2 * node->hints.size() + 1);
      }
    }
    if (host_memory_ != nullptr) {
      std::vector<PageKey> keys;
      ForEachPage(*hint, [&](PrefixNode* node, int64_t index) {
        keys.push_back(tree_->TextOf({node, index}).key);
      });
      host_memory_->ReservePriorities(keys);
    }
  } catch (...) {
    if (added != hints_.end()) hints_.erase(added);
    tree_->Leave(hint->cursor);
    throw;
  }
  // What follows cannot fail.
  PlacedHint* own = hint.get();
  CountPinned(*own, 1, &num_pinned_texts_);
  for (PrefixNode* node = own->cursor.node; node != nullptr; node = node->parent) {
    if (node->begin < own->num_pages && node->parent != nullptr) node->hints.push_back(own);
  }
  added->second = std::move(hint);
  next_expiry_ = std::min(next_expiry_, own->expiry_us);
  Apply(*own);
  return ++last_id_;
}

void EvictionHints::RequireRoomForPins(const PlacedHint& hint) const {
  std::vector<int64_t> num_new(pools_->size(), 0);
  CountPinned(hint, 1, &num_new);
  for (int32_t p = 0; p < geometry_->num_pools(); ++p) {
    const int64_t limit = (*pools_)[p].num_pages() / 2;
    if (num_new[p] == 0 || num_pinned_texts_[p] + num_new[p] <= limit) continue;
    const int32_t s = p - geometry_->num_groups();
    Raise(kCacheFullError, "the pin needs ", num_new[p], " pages of ",
          s < 0 ? "layer group " : "state group ", s < 0 ? p : s, ", but pins hold ",
          num_pinned_texts_[p], " and may hold ", limit,
          ", half of the pool; release others, "
          "retain the text instead, or make the cache with more pages");
  }
}

int32_t EvictionHints::PageOf(const PrefixNode& node, int64_t index, int32_t pool) const {
  const StoredPage& stored = node.StoredOf(index - node.begin)[pool];
  return tree_->IsKnown(static_cast<size_t>(pool), stored) ? stored.page : -1;
}

void EvictionHints::NoteStored(const PrefixTree::TextPage& text, int32_t pool) noexcept {
  const PrefixNode& node = *text.node;
  const int32_t page = PageOf(node, text.index, pool);
  if (page < 0) return;
  PagePool& pages = (*pools_)[pool];
  if (node.hints.empty() && pages.Priority(page) == 0) return;
  pages.SetPriority(page, PriorityOf(node, text.index, pool));
  for (EvictionHint* hint : node.hints) {
    if (!hint->is_pin || !hint->Covers(pool, text.index) || hint->pinned[pool][text.index])
      continue;
    // A page that is pinned stays what it is, so this comes once for each page of text.
    hint->pinned[pool][text.index] = true;
    pins_->Pin(pool, page);
    ++num_pins_;
  }
}

void EvictionHints::Apply(const PlacedHint& hint) noexcept {
  ForEachPage(hint, [&](PrefixNode* node, int64_t index) {
    for (int32_t p = 0; p < geometry_->num_pools(); ++p) {
      if (hint.first_pages[p] <= index) NoteStored({node, index}, p);
    }
    if (host_memory_ == nullptr) return;
    host_memory_->SetPriority(tree_->TextOf({node, index}).key, PriorityOf(*node, index, -1));
  });
}

EvictionHints::Hints::iterator EvictionHints::End(Hints::iterator ended) noexcept {
  PlacedHint& hint = *ended->second;
  for (PrefixNode* node = hint.cursor.node; node != nullptr; node = node->parent) {
    auto& hints = node->hints;
    hints.erase(std::remove(hints.begin(), hints.end(), &hint), hints.end());
  }
  CountPinned(hint, -1, &num_pinned_texts_);
  Apply(hint);
  // From the end, as when a sequence goes, so that the beginning is reclaimed last.
  ForEachPage(hint, [&](PrefixNode* node, int64_t index) {
    for (int32_t p = 0; hint.is_pin && p < geometry_->num_pools(); ++p) {
      if (!hint.pinned[p][index]) continue;
      pins_->Unpin(p, PageOf(*node, index, p));
      --num_pins_;
    }
  });
  tree_->Leave(hint.cursor);
  return hints_.erase(ended);
}

bool EvictionHints::Release(int64_t id) {
  if (id < 1 || id > last_id_) Raise(kKeyError, "no hint ", id, " was given to the cache");
  const auto hint = hints_.find(id);
  if (hint == hints_.end()) return false;
  End(hint);
  FindNextExpiry();
  return true;
}

void EvictionHints::Expire(int64_t now_us) noexcept {
  if (now_us < next_expiry_) return;
  for (auto hint = hints_.begin(); hint != hints_.end();) {
    hint = hint->second->expiry_us <= now_us ? End(hint) : std::next(hint);
  }
  FindNextExpiry();
}

void EvictionHints::FindNextExpiry() noexcept {
  next_expiry_ = kNever;
  for (const auto& [id, hint] : hints_) next_expiry_ = std::min(next_expiry_, hint->expiry_us);
}

void EvictionHints::Clear() noexcept {
  while (!hints_.empty()) End(hints_.begin());
  next_expiry_ = kNever;
}

int64_t EvictionHints::Demote(const std::string& salt, TokenSpan tokens, bool from_host,
                              std::vector<PrefixTree::TextPage>* pages) {
  PrefixTree::Path path;
  tree_->Find(salt, tokens, &path);
  const auto num_pages = static_cast<int64_t>(path.pages.size());
  PrefixNode* node = path.node;
  if (node == nullptr) return 0;
  // A page is the text's own while no other text, no sequence and no hint goes through it.
  const TokenSpan rest = tokens.From(num_pages * geometry_->page_size());
  bool is_own = num_pages == node->end();
  if (is_own && !node->children.empty()) {  // perhaps its last page, which is not full
    const PrefixNode* last = node->children.front();
    is_own = node->children.size() == 1 && path.num_partial == rest.size &&
             static_cast<int64_t>(last->tokens.size()) == rest.size &&
             rest.size < geometry_->page_size();
    if (is_own) pages->push_back({node->children.front(), num_pages});
  }
  for (int64_t index = num_pages - 1; is_own && index >= 0; --index) {
    if (index < node->begin) {
      node = node->parent;
      is_own = node->children.size() == 1;
    }
    is_own = is_own && node->num_cursors == 0 && PriorityOf(*node, index, -1) == 0;
    if (is_own) pages->push_back({node, index});
  }
  for (auto text = pages->rbegin(); text != pages->rend(); ++text) {  // the end goes first
    for (int32_t p = 0; p < geometry_->num_pools(); ++p) {
      const int32_t page = PageOf(*text->node, text->index, p);
      if (page >= 0) (*pools_)[p].ReclaimEarly(page);
    }
    const int64_t offset = text->index - text->node->begin;
    const bool is_full = text->node->TokensOf(offset).size == geometry_->page_size();
    if (from_host && host_memory_ != nullptr && is_full)
      host_memory_->EvictEarly(tree_->TextOf(*text).key);
  }
  return static_cast<int64_t>(pages->size());
}

void EvictionHints::CountCursors(std::map<const PrefixNode*, int64_t>* num_cursors) const {
  for (const auto& [id, hint] : hints_) ++(*num_cursors)[hint->cursor.node];
}

void EvictionHints::CheckIntegrity() const {
  int64_t num_pins = 0, first_expiry = kNever;
  std::vector<int64_t> num_pinned(pools_->size(), 0);
  std::vector<int32_t> num_retained(pools_->size(), 0);
  std::vector<std::vector<int32_t>> pins;  // [pool][page]
  for (const PagePool& pool : *pools_) pins.emplace_back(pool.num_pages(), 0);
  std::set<std::pair<const PrefixNode*, int64_t>> seen;
  for (const auto& [id, each] : hints_) {
    const PlacedHint& hint = *each;
    first_expiry = std::min(first_expiry, hint.expiry_us);
    ForEachPage(hint, [&, id = id](PrefixNode* node, int64_t index) {
      if (std::count(node->hints.begin(), node->hints.end(), &hint) != 1) {
        Raise(kRuntimeError, "page ", index, " of the text of hint ", id, " does not know of it");
      }
      const bool is_new = seen.emplace(node, index).second;
      for (int32_t p = 0; p < geometry_->num_pools(); ++p) {
        const int32_t page = PageOf(*node, index, p);
        const bool is_pinned = hint.is_pin && hint.pinned[p][index];
        if (hint.is_pin && is_pinned != (page >= 0 && hint.Covers(p, index))) {
          Raise(kRuntimeError, "hint ", id, is_pinned ? " pins" : " does not pin", " page ", index,
                " of its text in pool ", p, ", which is page ", page);
        }
        if (is_pinned) ++pins[p][page];
        num_pins += is_pinned;
        if (!is_new) continue;
        const uint8_t priority = PriorityOf(*node, index, p);
        num_pinned[p] += IsPinned(*node, index, p, nullptr);
        if (page < 0) continue;
        num_retained[p] += priority > 0;
        if ((*pools_)[p].Priority(page) == priority) continue;
        Raise(kRuntimeError, "page ", page, " of pool ", p, " has priority ",
              int{(*pools_)[p].Priority(page)}, ", but hints give it ", int{priority});
      }
    });
  }
  for (size_t p = 0; p < pools_->size(); ++p) {
    for (size_t page = 0; page < pins[p].size(); ++page) {
      if (pins[p][page] > pins_->counts(static_cast<int32_t>(p))[page]) {
        Raise(kRuntimeError, "page ", page, " of pool ", p, " has fewer pins than hints");
      }
    }
    if (num_retained[p] != (*pools_)[p].num_retained()) {
      Raise(kRuntimeError, "pool ", p, " counts ", (*pools_)[p].num_retained(),
            " pages with a priority, but hints cover ", num_retained[p]);
    }
  }
  if (num_pins != num_pins_ || num_pinned != num_pinned_texts_ || first_expiry != next_expiry_) {
    Raise(kRuntimeError, "the hints count ", num_pins_, " pins, but have ", num_pins,
          ", or count pinned pages of text or the next expiry wrongly");
  }
}

}  // namespace pagedkv
