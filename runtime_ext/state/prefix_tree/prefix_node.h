// SPDX-License-Identifier: Apache-2.0
/*!
 * \file prefix_node.h
 * \brief A node of a prefix tree: a run of pages of text, and where their K and V are.
 */
#ifndef TVM_PAGEDKV_STATE_PREFIX_TREE_PREFIX_NODE_H_
#define TVM_PAGEDKV_STATE_PREFIX_TREE_PREFIX_NODE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "state/host_memory/page_key.h"
#include "state/prefix_tree/prefix_children.h"

namespace pagedkv {

/*! \brief A page of the pool and the generation of its content; -1 for none. */
struct StoredPage {
  int32_t page = -1;
  uint64_t generation = 0;
};

/*! \brief The state of a full page of text in a tree with keys. */
struct KeyedPage {
  PageKey key{};  // zero of a page that is not full
  int64_t num_hits = 0;
};

/*! \brief Returns the number of tokens that two texts share at their beginning. */
inline int64_t NumCommon(TokenSpan a, TokenSpan b) {
  const int64_t size = std::min(a.size, b.size);
  return std::mismatch(a.data, a.data + size, b.data).first - a.data;
}

/*! \brief What a caller knows of the pages of a text; see eviction_hints.h. */
struct EvictionHint {
  int64_t num_pages = 0;  // of text
  uint8_t priority = 0;
  bool is_pin = false;
  int64_t expiry_us = 0;
  std::vector<int64_t> first_pages;       // [pool] the first page of text
  std::vector<std::vector<bool>> pinned;  // [pool][page of text] of a pin

  bool Covers(int32_t pool, int64_t index) const {
    return index >= first_pages[static_cast<size_t>(pool)] && index < num_pages;
  }
};

struct PrefixNode {
  PrefixNode(PrefixNode* parent, int64_t begin, int64_t page_size, size_t num_groups)
      : parent(parent), begin(begin), page_size(page_size), num_groups(num_groups) {}

  int64_t NumPages() const {
    return (static_cast<int64_t>(tokens.size()) + page_size - 1) / page_size;
  }
  int64_t end() const { return begin + NumPages(); }
  /*! \brief Fewer than page_size for a page that is not full, and for a root. */
  TokenSpan TokensOf(int64_t offset) const {
    const int64_t first = offset * page_size;
    return {tokens.data() + first,
            std::min(page_size, static_cast<int64_t>(tokens.size()) - first)};
  }
  /*! \brief [group] the pages of the pool for one page of text. */
  StoredPage* StoredOf(int64_t offset) { return stored.data() + offset * num_groups; }
  const StoredPage* StoredOf(int64_t offset) const { return stored.data() + offset * num_groups; }

  /*! \brief The key before page `offset` of the node. */
  const PageKey& KeyBefore(int64_t offset) const {
    if (offset > 0) return keyed[offset - 1].key;
    return parent->parent == nullptr ? parent->root_key : parent->keyed.back().key;
  }

  /*! \brief Adds a page of text. May throw std::bad_alloc; then nothing has changed. */
  void Append(TokenSpan page) {
    const int64_t count = NumPages();
    try {
      stored.resize(stored.size() + num_groups);
      if (has_keys) keyed.emplace_back();
      tokens.insert(tokens.end(), page.data, page.data + page.size);
    } catch (...) {
      stored.resize(static_cast<size_t>(count) * num_groups);
      if (has_keys) keyed.resize(static_cast<size_t>(count));
      throw;
    }
  }
  /*! \brief Computes the key of the last page, if it is full. */
  void AddKey() noexcept {
    const int64_t last = NumPages() - 1;
    if (!has_keys || TokensOf(last).size < page_size) return;
    keyed[last].key = NextKey(KeyBefore(last), TokensOf(last));
  }
  void EraseFront(int64_t count) noexcept {
    begin += count;
    tokens.erase(tokens.begin(), tokens.begin() + count * page_size);
    stored.erase(stored.begin(), stored.begin() + static_cast<ptrdiff_t>(count * num_groups));
    if (has_keys) keyed.erase(keyed.begin(), keyed.begin() + count);
  }
  /*! \brief Drops the pages of text from `count` on. */
  void Truncate(int64_t count) noexcept {
    tokens.resize(static_cast<size_t>(count * page_size));
    stored.resize(static_cast<size_t>(count) * num_groups);
    if (has_keys) keyed.resize(static_cast<size_t>(count));
  }

  PrefixNode* parent;  // null for a root
  int64_t begin;       // pages of text before the node
  int64_t page_size;
  size_t num_groups;
  std::vector<int32_t> tokens;     // whole pages, or one page that is not full
  std::vector<StoredPage> stored;  // [page][group]
  PrefixChildren children;
  int64_t num_cursors = 0;
  std::vector<EvictionHint*> hints;  // about pages of the node
  std::string salt;                  // of a root
  // Only in trees with keys.
  bool has_keys = false;
  std::vector<KeyedPage> keyed;  // [page]
  PageKey root_key{};            // of a root
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_PREFIX_TREE_PREFIX_NODE_H_
