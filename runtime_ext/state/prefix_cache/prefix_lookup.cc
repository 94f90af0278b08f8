// SPDX-License-Identifier: Apache-2.0
/*!
 * \file prefix_lookup.cc
 * \brief The search for the positions of a text that the cache has.
 */
#include "state/prefix_cache/prefix_lookup.h"

#include <memory>
#include <utility>

namespace pagedkv {

int64_t PrefixLookup::FindInPools(const std::string& salt, TokenSpan tokens) {
  tree_->Find(salt, tokens, &path_);
  tokens_ = tokens;
  uses_partial_ = true;
  num_keyed_ = 0;
  const int64_t found = num_whole() * geometry_->page_size() + path_.num_partial;
  return LongestOf(std::max<int64_t>(std::min(found, tokens.size - 1), 0));
}

void PrefixLookup::FindKeys(const std::string& salt, TokenSpan tokens) {
  tree_->Find(salt, tokens, &path_);
  tokens_ = tokens;
  uses_partial_ = false;
  keys_.clear();
  keys_.push_back(RootKey(tree_->key_space(), salt));
  keys_.insert(keys_.end(), path_.keys.begin(), path_.keys.end());
  num_keyed_ = num_whole();
}

void PrefixLookup::ExtendKeys(int64_t end) {
  const int64_t page_size = geometry_->page_size();
  for (; num_keyed_ < end; ++num_keyed_) {
    keys_.push_back(NextKey(keys_.back(), {tokens_.data + num_keyed_ * page_size, page_size}));
  }
}

int64_t PrefixLookup::Find(const std::string& salt, TokenSpan tokens) {
  // A cache without pages keeps nothing in the tier either.
  if (host_memory_ == nullptr || geometry_->num_groups() == 0) return FindInPools(salt, tokens);
  FindKeys(salt, tokens);
  const int64_t page_size = geometry_->page_size(), num_full = tokens.size / page_size;
  const int64_t limit = std::max<int64_t>(tokens.size - 1, 0);
  int32_t required = 0;  // a group that needs every page
  while (required < geometry_->num_groups() && geometry_->HasWindow(required)) ++required;
  if (required == geometry_->num_groups()) {
    ExtendKeys(num_full);
  } else {
    while (num_keyed_ < num_full) {
      ExtendKeys(num_keyed_ + 1);
      if (!IsInHostMemory(num_keyed_ - 1, required)) break;
    }
  }
  int64_t length = 0;
  if (num_keyed_ > num_whole()) {
    length = Fit(LongestOf(std::min(num_keyed_ * page_size, limit)));
  }
  // The pools may have the beginning of a page that the tier does not have.
  uses_partial_ = true;
  const int64_t with_partial =
      Fit(LongestOf(std::min(num_whole() * page_size + path_.num_partial, limit)));
  uses_partial_ = with_partial >= length;
  return std::max(length, with_partial);
}

PrefixLookup::HitStates PrefixLookup::StatesOf(int32_t s, int64_t length) const {
  auto state_of = [&](int64_t at) {
    int64_t end = 0;
    return StateOfText(
        *geometry_, s, at, [&](int64_t i, int32_t g) { return IsKnown(i, g); }, &end);
  };
  const int64_t interval = geometry_->state_group(s).interval;
  const int64_t last = state_of(length);
  if (last == 0) return {0, 0, 0};
  // Those before it, which pops of a few positions may need, with all ingredients between.
  const int32_t ingredients = geometry_->state_group(s).ingredients;
  int64_t first = last;
  while (first > std::max<int64_t>(length - kPoppable, 0) &&
         IsKnown(geometry_->PageOf(first - 1), ingredients) &&
         state_of(first - 1) == first - interval) {
    first -= interval;
  }
  return {std::max<int64_t>(first / interval - 1, 0), last, first};
}

int64_t PrefixLookup::FirstPage(int32_t group, int64_t length) const {
  const int32_t s = geometry_->StateGroupOf(group);
  if (s >= 0) return geometry_->PageOf(StatesOf(s, length).ingredients);
  int64_t first = geometry_->FirstPageToSee(group, length);
  const int64_t wanted = geometry_->FirstPageToKeep(group, length);
  while (first > wanted && IsKnown(first - 1, group)) --first;
  return first;
}

int64_t PrefixLookup::Fit(int64_t length) const {
  for (int32_t g = 0; g < geometry_->num_groups();) {
    const PagePool& pool = (*pools_)[g];
    int64_t num_needed = 0, index = FirstPage(g, length);
    for (; index < geometry_->PagesFor(length); ++index) {
      const bool is_held = IsInPool(index, g) && pool.RefCount(StoredAt(index, g).page) > 0;
      num_needed += !is_held;
      if (num_needed > pool.num_available()) break;
    }
    if (index == geometry_->PagesFor(length)) {
      ++g;
    } else {
      length = LongestOf(index * geometry_->page_size());
      g = 0;
    }
  }
  for (int32_t s = 0; s < geometry_->num_state_groups(); ++s) {
    const HitStates hit = StatesOf(s, length);
    const int32_t pool = geometry_->StatePool(s);
    int64_t num_needed = 0;
    for (int64_t page = hit.first_page; page < hit.length / geometry_->state_group(s).interval;
         ++page) {
      num_needed += IsToTake(geometry_->TextPageOfState(s, page), pool);
    }
    if (num_needed > (*pools_)[pool].num_available()) return Fit(LongestOf(hit.length - 1));
  }
  return length;
}

bool PrefixLookup::PinStates(int32_t s, std::vector<PageLoad>* loads) {
  const HitStates& hit = hit_states_[s];
  const int32_t pool = geometry_->StatePool(s);
  loads->reserve(loads->size() + kMaxStatesOfHit);  // may throw: before any pin
  int64_t num_needed = 0;
  for (int64_t page = hit.length / geometry_->state_group(s).interval - 1; page >= hit.first_page;
       --page) {
    const int64_t index = geometry_->TextPageOfState(s, page);
    num_needed += IsToTake(index, pool);
    if (num_needed > (*pools_)[pool].num_available()) return false;
    if (IsInPool(index, pool)) continue;
    if (index >= num_keyed_) return false;
    const int32_t slot = host_memory_->Pin(pool, TextAt(index));
    if (slot < 0) return false;
    loads->push_back({pool, index, slot, -1});
  }
  return true;
}

bool PrefixLookup::PinLoads(int32_t group, int64_t length, std::vector<PageLoad>* loads) {
  const PagePool& pool = (*pools_)[group];
  const int32_t s = geometry_->StateGroupOf(group);
  first_pages_[group] =
      s >= 0 ? geometry_->PageOf(hit_states_[s].ingredients) : FirstPage(group, length);
  if (host_memory_ == nullptr) return true;
  loads->reserve(loads->size() + geometry_->PagesFor(length));  // may throw: before any pin
  int64_t num_needed = 0;
  // From the end, so that the first pages are the ones used last when the pins go.
  for (int64_t i = geometry_->PagesFor(length) - 1; i >= first_pages_[group]; --i) {
    const bool is_in_pool = IsInPool(i, group);
    num_needed += !is_in_pool || pool.RefCount(StoredAt(i, group).page) == 0;
    if (num_needed > pool.num_available()) return false;
    if (is_in_pool) continue;
    if (i >= num_keyed_) return false;
    const int32_t slot = host_memory_->Pin(group, TextAt(i));
    if (slot < 0) return false;
    loads->push_back({group, i, slot, -1});
  }
  return true;
}

bool PrefixLookup::PinLoads(int64_t length, std::vector<PageLoad>* loads) {
  auto unpin = [&] {
    for (const PageLoad& load : *loads) host_memory_->Unpin(load.slot);
    loads->clear();
  };
  loads->clear();
  first_pages_.resize(static_cast<size_t>(geometry_->num_groups()));
  hit_states_.clear();
  for (int32_t s = 0; s < geometry_->num_state_groups(); ++s) {
    hit_states_.push_back(StatesOf(s, length));
  }
  try {
    bool is_complete = true;
    for (int32_t g = 0; g < geometry_->num_groups() && is_complete; ++g) {
      is_complete = PinLoads(g, length, loads);
    }
    const int32_t num_state_groups = host_memory_ == nullptr ? 0 : geometry_->num_state_groups();
    for (int32_t s = 0; s < num_state_groups && is_complete; ++s) {
      is_complete = PinStates(s, loads);
    }
    if (!is_complete) unpin();
    return is_complete;
  } catch (...) {
    unpin();
    throw;
  }
}

std::vector<PagePlace> PrefixLookup::Locate(const std::string& salt, TokenSpan tokens,
                                            StoreLookup* question) {
  FindKeys(salt, tokens);
  const int64_t num_pages = tokens.size / geometry_->page_size();
  if (host_memory_ != nullptr) ExtendKeys(num_pages);
  question->page_size = geometry_->page_size();
  question->keys = keys_;
  question->tokens.assign(tokens.data, tokens.data + num_pages * geometry_->page_size());
  question->is_question = true;
  std::vector<PagePlace> places;
  for (int64_t i = 0; i < num_pages; ++i) {
    for (int32_t g = 0; g < geometry_->num_groups(); ++g) {
      places.push_back(IsInPool(i, g)         ? PagePlace::kPool
                       : IsInHostMemory(i, g) ? PagePlace::kHost
                                              : PagePlace::kNowhere);
      const bool is_nowhere = places.back() == PagePlace::kNowhere;
      if (is_nowhere) question->values.push_back({i, g, /*is_required=*/false});
    }
  }
  return places;
}

StoreLookup PrefixLookup::MakeLookup(const std::string& salt, TokenSpan tokens) {
  FindKeys(salt, tokens);
  const int64_t page_size = geometry_->page_size();
  const int32_t num_pools = geometry_->num_pools();
  ExtendKeys(tokens.size / page_size);
  StoreLookup lookup;
  lookup.page_size = page_size;
  lookup.keys = keys_;
  lookup.tokens.assign(tokens.data, tokens.data + num_keyed_ * page_size);
  std::vector<bool> known(num_keyed_ * num_pools);
  std::vector<int64_t> num_slots;
  for (int32_t g = 0; g < num_pools; ++g) num_slots.push_back(host_memory_->num_slots(g));
  for (int64_t i = 0; i < num_keyed_; ++i) {
    for (int32_t g = 0; g < num_pools; ++g) {
      const int32_t s = g - geometry_->num_groups();
      if (s >= 0 && geometry_->StateBehind(s, i) < 0) continue;
      known[i * num_pools + g] = IsKnown(i, g);
      if (known[i * num_pools + g]) continue;
      lookup.values.push_back({i, g, s < 0 && !geometry_->HasWindow(g)});
    }
  }
  // What is useful: the pages of the longest hit with what the store has, as far as there are
  // slots.
  const int64_t limit = std::min(num_keyed_ * page_size, std::max<int64_t>(tokens.size - 1, 0));
  lookup.choose = [geometry = *geometry_, known, values = lookup.values, num_slots,
                   limit](const std::vector<bool>& is_there) {
    const int32_t num_pools = geometry.num_pools();
    std::vector<bool> with_store = known;
    for (size_t v = 0; v < values.size(); ++v) {
      if (is_there[v]) with_store[values[v].page * num_pools + values[v].group] = true;
    }
    auto longest = [&](const std::vector<bool>& bits, int64_t length) {
      return LongestKnown(geometry, length,
                          [&](int64_t i, int32_t g) { return bits[i * num_pools + g]; });
    };
    // [pool] the first page that a hit of this length takes, or may take to pop back.
    auto first_pages = [&](int64_t length) {
      std::vector<int64_t> first;
      for (int32_t g = 0; g < geometry.num_groups(); ++g) {
        first.push_back(geometry.FirstPageToKeep(g, length));
      }
      for (int32_t s = 0; s < geometry.num_state_groups(); ++s) {
        int64_t end = 0;
        const int64_t state = StateOfText(
            geometry, s, length,
            [&](int64_t i, int32_t g) { return with_store[i * num_pools + g]; }, &end);
        first[geometry.state_group(s).ingredients] = geometry.PageOf(state);
        first.push_back(geometry.PageOf(state) - 1);
      }
      return first;
    };
    const int64_t known_length = longest(known, limit);
    int64_t length = longest(with_store, limit);
    std::vector<size_t> chosen;
    while (length > known_length) {
      chosen.clear();
      std::vector<int64_t> num_chosen(num_pools, 0);
      const std::vector<int64_t> first = first_pages(length);
      int64_t end = -1;  // the page that has no slot
      for (size_t v = 0; v < values.size() && end < 0; ++v) {
        const auto& [page, group, is_required] = values[v];
        if (page >= geometry.PagesFor(length)) break;
        if (!is_there[v] || page < first[group]) continue;
        if (++num_chosen[group] > num_slots[group]) end = page;
        chosen.push_back(v);
      }
      if (end < 0) return chosen;
      length = longest(with_store, end * geometry.page_size());
    }
    return std::vector<size_t>();
  };
  return lookup;
}

}  // namespace pagedkv
