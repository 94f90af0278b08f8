// SPDX-License-Identifier: Apache-2.0
/*!
 * \file prefix_tree_integrity.cc
 * \brief The invariants of a prefix tree.
 */
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "state/prefix_tree/prefix_tree.h"

namespace pagedkv {

void PrefixTree::CheckNode(const PrefixNode& node) const {
  const auto num_tokens = static_cast<int64_t>(node.tokens.size());
  const bool is_root = node.parent == nullptr;
  const bool is_partial = num_tokens % page_size_ != 0;
  const bool has_size = is_root ? num_tokens == 0 : num_tokens > 0;
  const bool is_partial_leaf = num_tokens < page_size_ && node.children.empty();
  if (!has_size || (is_partial && !is_partial_leaf) ||
      node.stored.size() != node.NumPages() * num_groups() ||
      node.begin != (is_root ? 0 : node.parent->end())) {
    Raise(kRuntimeError, "a node of the prefix tree at page ", node.begin, " has ", num_tokens,
          " tokens, ", node.stored.size(), " stored pages and ", node.children.size(), " children");
  }
  if (node.has_keys != has_keys_ ||
      node.keyed.size() != static_cast<size_t>(has_keys_ ? node.NumPages() : 0)) {
    Raise(kRuntimeError, "a node of the prefix tree at page ", node.begin, " has ",
          node.keyed.size(), " keys");
  }
  for (int64_t i = 0; has_keys_ && !is_root && i < node.NumPages(); ++i) {
    const bool is_full = node.TokensOf(i).size == page_size_;
    const PageKey key = is_full ? NextKey(node.KeyBefore(i), node.TokensOf(i)) : PageKey{};
    if (node.keyed[i].key != key) {
      Raise(kRuntimeError, "page ", node.begin + i, " of a text has the key of another text");
    }
  }
  node.children.CheckIntegrity();
  const PrefixNode* last = nullptr;
  node.children.ForEach([&](const PrefixNode& child) {
    if (child.parent != &node) Raise(kRuntimeError, "a node of the prefix tree has two parents");
    if (last != nullptr) {
      // What begins with the tokens of another comes right behind it in this order.
      const TokenSpan a = last->TokensOf(0), b = child.TokensOf(0);
      if (NumCommon(a, b) == a.size ||
          !std::lexicographical_compare(a.data, a.data + a.size, b.data, b.data + b.size)) {
        Raise(kRuntimeError, "siblings of the prefix tree at page ", child.begin,
              " are not in order, or one is the beginning of the other");
      }
    }
    last = &child;
  });
}

void PrefixTree::CheckIntegrity(std::map<const PrefixNode*, int64_t> num_cursors,
                                std::vector<std::vector<int32_t>>* num_keepers) const {
  int64_t num_nodes = 0, num_tokens = 0;
  std::vector<int64_t> num_stored(num_groups(), 0);
  std::vector<const PrefixNode*> stack;
  for (const auto& [salt, root] : roots_) {
    if (root->salt != salt) Raise(kRuntimeError, "a root of the prefix tree has another salt");
    stack.push_back(root.get());
  }
  while (!stack.empty()) {
    const PrefixNode& node = *stack.back();
    stack.pop_back();
    CheckNode(node);
    num_nodes += node.parent != nullptr;
    num_tokens += static_cast<int64_t>(node.tokens.size());
    auto cursors = num_cursors.extract(&node);
    if (node.num_cursors != (cursors.empty() ? 0 : cursors.mapped())) {
      Raise(kRuntimeError, "a node of the prefix tree counts ", node.num_cursors,
            " cursors but has ", cursors.empty() ? 0 : cursors.mapped());
    }
    for (int64_t i = 0; i < node.NumPages(); ++i) {
      for (size_t g = 0; g < num_groups(); ++g) {
        const StoredPage& stored = node.StoredOf(i)[g];
        if (stored.page < 0) continue;
        ++num_stored[g];
        const TextPage& text = texts_[g].at(stored.page);
        if (text.node != &node || text.index != node.begin + i) {
          Raise(kRuntimeError, "page ", stored.page, " of group ", g, " is stored at page ",
                node.begin + i, " of a text, but noted elsewhere");
        }
        (*num_keepers)[g][stored.page] += IsKnown(g, stored);
      }
    }
    node.children.ForEach([&](const PrefixNode& child) { stack.push_back(&child); });
  }
  if (!num_cursors.empty()) Raise(kRuntimeError, "a cursor is at no node of the prefix tree");
  for (size_t g = 0; g < num_groups(); ++g) {
    const auto count = std::count_if(texts_[g].begin(), texts_[g].end(),
                                     [](const TextPage& text) { return text.node != nullptr; });
    if (count != num_stored[g]) {
      Raise(kRuntimeError, "the prefix tree notes ", count, " pages of group ", g, " but stores ",
            num_stored[g]);
    }
  }
  if (num_nodes != num_nodes_ || num_tokens != num_tokens_) {
    Raise(kRuntimeError, "the prefix tree counts ", num_nodes_, " nodes and ", num_tokens_,
          " tokens, but has ", num_nodes, " and ", num_tokens);
  }
}

}  // namespace pagedkv
