// SPDX-License-Identifier: Apache-2.0
/*!
 * \file prefix_lookup.h
 * \brief Finds the positions of a text in the pools and in host memory below them.
 *
 * The prefix tree knows the pages of the pools. Host memory is asked by key, for pages that were
 * reclaimed and for pages behind the end of the tree's path.
 */
#ifndef TVM_PAGEDKV_STATE_PREFIX_CACHE_PREFIX_LOOKUP_H_
#define TVM_PAGEDKV_STATE_PREFIX_CACHE_PREFIX_LOOKUP_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "state/host_memory/host_memory.h"
#include "state/pages/page_pool.h"
#include "state/prefix_tree/prefix_tree.h"
#include "state/sequences/page_geometry.h"
#include "state/sequences/recurrent_states.h"

namespace pagedkv {

/*! \brief The states that a hit takes at most: the last one, and those to pop back to. */
constexpr size_t kMaxStatesOfHit = kPoppable + 1;

/*!
 * \brief The length of the state from which the one at `length` of a text can be computed, or -1.
 * \param is_known As for LongestKnown.
 */
template <typename IsKnown>
int64_t StateOfText(const PageGeometry& geometry, int32_t s, int64_t length, IsKnown is_known,
                    int64_t* end) {
  return LastStateBefore(
      geometry, s, length,
      [&](int64_t page) {
        return is_known(geometry.TextPageOfState(s, page), geometry.StatePool(s));
      },
      [&](int64_t page) { return is_known(page, geometry.state_group(s).ingredients); }, end);
}

/*!
 * \brief The longest text, up to `length`, whose pages every group has for its next row.
 * \param is_known Called with the index of a page of text and of a pool.
 */
template <typename IsKnown>
int64_t LongestKnown(const PageGeometry& geometry, int64_t length, IsKnown is_known) {
  const int64_t page_size = geometry.page_size();
  for (int32_t g = 0; g < geometry.num_groups(); ++g) {
    if (geometry.HasWindow(g)) continue;
    const int64_t num_pages = geometry.PagesFor(length);
    int64_t known = 0;
    while (known < num_pages && is_known(known, g)) ++known;
    if (known < num_pages) length = known * page_size;
  }
  for (int32_t g = 0; g < geometry.num_groups();) {
    if (geometry.StateGroupOf(g) >= 0) {
      int64_t end = 0;
      if (StateOfText(geometry, geometry.StateGroupOf(g), length, is_known, &end) >= 0) {
        ++g;
      } else {
        length = (end - 1) * page_size;
        g = 0;
      }
      continue;
    }
    // From the end: the text must stop before a page of the window that is missing.
    int64_t index = geometry.PagesFor(length);
    const int64_t first = geometry.FirstPageToSee(g, length);
    while (geometry.HasWindow(g) && index > first && is_known(index - 1, g)) --index;
    if (geometry.HasWindow(g) && index > first) {
      length = (index - 1) * page_size;
      g = 0;
    } else {
      ++g;
    }
  }
  return length;
}

/*! \brief The first of the tiers that has a page of a text. */
enum class PagePlace : int8_t { kNowhere, kPool, kHost, kStore };

/*! \brief A page of a text that comes from host memory. */
struct PageLoad {
  int32_t group;
  int64_t index;  // of the page in the text
  int32_t slot;   // of host memory, pinned
  int32_t page;   // of the pool
};

class PrefixLookup {
 public:
  /*! \brief All must outlive this. */
  PrefixLookup(const PageGeometry* geometry, std::vector<PagePool>* pools, const PrefixTree* tree)
      : geometry_(geometry), pools_(pools), tree_(tree) {}

  /*! \brief Looks into host memory as well. */
  void SetHostMemory(HostMemory* host_memory) { host_memory_ = host_memory; }

  /*!
   * \brief Finds how many positions of a text can be reused, and for how many there are pages.
   *
   * Never all of them: the last token must be computed for its logits.
   */
  int64_t Find(const std::string& salt, TokenSpan tokens);
  /*! \brief Like Find, without host memory. */
  int64_t FindInPools(const std::string& salt, TokenSpan tokens);

  // About the text of the last search, whose tokens must still be there.
  const PrefixTree::Path& path() const { return path_; }
  int64_t num_whole() const { return static_cast<int64_t>(path_.pages.size()); }
  /*! \brief Whether a pool has the page. */
  bool IsInPool(int64_t index, int32_t group) const {
    const bool has_page = index < num_whole() || (index == num_whole() && uses_partial_);
    return has_page && tree_->IsKnown(group, StoredAt(index, group));
  }
  const StoredPage& StoredAt(int64_t index, int32_t group) const {
    return (index < num_whole() ? path_.pages[index] : path_.partial)[group];
  }
  /*! \brief What a hit takes of a state group. */
  struct HitStates {
    int64_t first_page;   // of states
    int64_t length;       // of the last one
    int64_t ingredients;  // the first position whose ingredients the hit takes
  };
  /*! \brief The states of the hit that PinLoads has settled. */
  const HitStates& hit_states(int32_t s) const { return hit_states_[s]; }
  bool IsKnown(int64_t index, int32_t group) const {
    return IsInPool(index, group) || IsInHostMemory(index, group);
  }
  /*!
   * \brief Settles the pages of a hit: pins the slots of those that no pool has.
   *
   * Host memory changes at any time, so this may find less than Find did.
   * \return False when a page is gone or damaged; then nothing is pinned. May throw std::bad_alloc.
   */
  bool PinLoads(int64_t length, std::vector<PageLoad>* loads);
  /*! \brief The first page of the hit that PinLoads has settled. */
  int64_t first_page(int32_t group) const { return first_pages_[group]; }
  /*! \brief A lookup of the pages that neither a pool nor host memory has. May throw bad_alloc. */
  StoreLookup MakeLookup(const std::string& salt, TokenSpan tokens);
  /*!
   * \brief Finds each full page of a text, apart from the store. May throw std::bad_alloc.
   * \param question Gets the values that neither a pool nor host memory has.
   * \return [page][group]
   */
  std::vector<PagePlace> Locate(const std::string& salt, TokenSpan tokens, StoreLookup* question);

 private:
  bool IsInHostMemory(int64_t index, int32_t group) const {
    return host_memory_ != nullptr && index < num_keyed_ && host_memory_->Has(group, TextAt(index));
  }
  PageText TextAt(int64_t index) const {
    const int64_t page_size = geometry_->page_size();
    return {keys_[index + 1], keys_[index], {tokens_.data + index * page_size, page_size}};
  }
  HitStates StatesOf(int32_t s, int64_t length) const;
  /*! \brief The first page of a hit of this length: the window, and pages before it to pop to. */
  int64_t FirstPage(int32_t group, int64_t length) const;
  bool PinLoads(int32_t group, int64_t length, std::vector<PageLoad>* loads);
  bool PinStates(int32_t s, std::vector<PageLoad>* loads);
  /*! \brief Whether a page that is not held must be taken from the pool for a hit. */
  bool IsToTake(int64_t index, int32_t pool) const {
    return !IsInPool(index, pool) || (*pools_)[pool].RefCount(StoredAt(index, pool).page) == 0;
  }
  /*! \brief Computes the keys of full pages up to `end`. */
  void ExtendKeys(int64_t end);
  void FindKeys(const std::string& salt, TokenSpan tokens);
  /*! \brief The longest text, up to `length`, for whose pages there is room in the pools. */
  int64_t Fit(int64_t length) const;
  int64_t LongestOf(int64_t length) const {
    return LongestKnown(*geometry_, length, [&](int64_t i, int32_t g) { return IsKnown(i, g); });
  }

  const PageGeometry* geometry_;
  std::vector<PagePool>* pools_;
  const PrefixTree* tree_;
  HostMemory* host_memory_ = nullptr;
  // Of the last search.
  PrefixTree::Path path_;
  TokenSpan tokens_{nullptr, 0};
  bool uses_partial_ = true;
  std::vector<PageKey> keys_;  // that of the root, then one for each full page
  int64_t num_keyed_ = 0;
  std::vector<int64_t> first_pages_;   // [group]
  std::vector<HitStates> hit_states_;  // [state group]
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_PREFIX_CACHE_PREFIX_LOOKUP_H_
