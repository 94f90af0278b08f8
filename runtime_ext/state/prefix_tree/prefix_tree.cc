// SPDX-License-Identifier: Apache-2.0
/*!
 * \file prefix_tree.cc
 * \brief A radix tree over token ids: texts are found, added and erased.
 */
#include "state/prefix_tree/prefix_tree.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace pagedkv {

PrefixTree::PrefixTree(int32_t page_size, std::vector<PagePool>* pools)
    : page_size_(page_size), pools_(pools), texts_(pools->size()) {}

int64_t PrefixTree::FindChild(const PrefixNode& node, TokenSpan tokens, PrefixNode** child) const {
  return node.children.Find({tokens.data, std::min(tokens.size, page_size_)}, child);
}

void PrefixTree::EnableKeys(std::string space) {
  if (!roots_.empty()) Raise(kValueError, "the cache has texts: tiers come before the first one");
  key_space_ = std::move(space);
  has_keys_ = true;
}

void PrefixTree::Find(const std::string& salt, TokenSpan tokens, Path* path) const {
  path->node = nullptr;
  path->pages.clear();
  path->keys.clear();
  path->partial = nullptr;
  path->num_partial = 0;
  const auto root = roots_.find(salt);
  if (root == roots_.end()) return;
  path->node = root->second.get();
  for (;;) {
    PrefixNode* child = nullptr;
    int64_t num_common = FindChild(*path->node, tokens, &child);
    int64_t offset = 0;
    while (num_common == page_size_) {
      path->node = child;
      if (has_keys_) path->keys.push_back(child->keyed[offset].key);
      path->pages.push_back(child->StoredOf(offset++));
      tokens = tokens.From(page_size_);
      if (offset == child->NumPages()) break;
      num_common = NumCommon(child->TokensOf(offset), tokens);
    }
    if (num_common == page_size_) continue;  // behind the last page of the child
    if (num_common > 0) {
      path->partial = child->StoredOf(offset);
      path->num_partial = num_common;
    }
    return;
  }
}

PrefixTree::Cursor PrefixTree::Enter(const std::string& salt) {
  for (size_t g = 0; g < num_groups(); ++g) {
    if (texts_[g].empty()) texts_[g].resize((*pools_)[g].num_pages(), TextPage{nullptr, 0});
  }
  auto root = roots_.find(salt);
  if (root == roots_.end()) {
    std::unique_ptr<PrefixNode> node = MakeNode(nullptr, 0);
    node->salt = salt;
    if (has_keys_) node->root_key = RootKey(key_space_, salt);
    root = roots_.emplace(salt, std::move(node)).first;
  }
  return EnterAt(root->second.get(), 0);
}

PrefixTree::Cursor PrefixTree::EnterAt(PrefixNode* node, int64_t num_pages) noexcept {
  ++node->num_cursors;
  Cursor cursor{node, num_pages};
  MoveUp(&cursor);
  return cursor;
}

void PrefixTree::Leave(const Cursor& cursor) noexcept {
  --cursor.node->num_cursors;
  Trim(cursor.node);
}

void PrefixTree::MoveTo(Cursor* cursor, PrefixNode* node, int64_t num_pages) noexcept {
  const Cursor old = *cursor;
  ++node->num_cursors;
  *cursor = {node, num_pages};
  Leave(old);
}

void PrefixTree::MoveUp(Cursor* cursor) noexcept {
  PrefixNode* node = cursor->node;
  while (node->parent != nullptr && cursor->num_pages <= node->begin) node = node->parent;
  if (node != cursor->node) MoveTo(cursor, node, cursor->num_pages);
}

void PrefixTree::MoveBack(Cursor* cursor, int64_t num_pages) noexcept {
  cursor->num_pages = num_pages;
  MoveUp(cursor);
}

TokenSpan PrefixTree::TokensBefore(const Cursor& cursor, int64_t index) const noexcept {
  const PrefixNode* node = cursor.node;
  while (index < node->begin) node = node->parent;
  return node->TokensOf(index - node->begin);
}

PrefixTree::TextPage PrefixTree::At(const Cursor& cursor, int64_t index) const noexcept {
  PrefixNode* node = cursor.node;
  while (index < node->begin) node = node->parent;
  return {node, index};
}

PageText PrefixTree::TextOf(const TextPage& text) const noexcept {
  const int64_t offset = text.index - text.node->begin;
  return {text.node->keyed[offset].key, text.node->KeyBefore(offset), text.node->TokensOf(offset)};
}

bool PrefixTree::FindTextOf(int32_t group, int32_t page, TextPage* text) const noexcept {
  if (texts_[group].empty()) return false;
  *text = texts_[group][page];
  if (text->node == nullptr) return false;
  const int64_t offset = text->index - text->node->begin;
  return IsKnown(group, text->node->StoredOf(offset)[group]);
}

std::unique_ptr<PrefixNode> PrefixTree::MakeNode(PrefixNode* parent, int64_t begin) const {
  auto node = std::make_unique<PrefixNode>(parent, begin, page_size_, num_groups());
  node->has_keys = has_keys_;
  return node;
}

PrefixNode* PrefixTree::AddChild(PrefixNode* parent, TokenSpan tokens) {
  std::unique_ptr<PrefixNode> node = MakeNode(parent, parent->end());
  node->Append(tokens);
  node->AddKey();
  PrefixNode* child = parent->children.Insert(std::move(node));
  num_tokens_ += tokens.size;
  ++num_nodes_;
  return child;
}

PrefixNode* PrefixTree::Split(PrefixNode* node, int64_t offset) {
  PrefixNode* parent = node->parent;
  std::unique_ptr<PrefixNode> above = MakeNode(parent, node->begin);
  for (int64_t i = 0; i < offset; ++i) above->Append(node->TokensOf(i));
  PrefixNode* upper = above.get();
  upper->children.Reserve();
  upper->hints = node->hints;
  // What follows cannot fail. The lower part stays the same object: cursors that are in the upper
  // part find it upwards.
  std::unique_ptr<PrefixNode> below = parent->children.Replace(node, std::move(above));
  upper->stored.assign(node->StoredOf(0), node->StoredOf(offset));
  if (has_keys_) upper->keyed.assign(node->keyed.begin(), node->keyed.begin() + offset);
  for (int64_t i = 0; i < offset; ++i) {
    for (size_t g = 0; g < num_groups(); ++g) {
      const StoredPage& stored = upper->StoredOf(i)[g];
      if (stored.page >= 0) texts_[g][stored.page].node = upper;
    }
  }
  node->EraseFront(offset);
  node->hints.erase(
      std::remove_if(node->hints.begin(), node->hints.end(),
                     [&](const EvictionHint* hint) { return hint->num_pages <= node->begin; }),
      node->hints.end());
  node->parent = upper;
  upper->children.Insert(std::move(below));
  ++num_nodes_;
  return upper;
}

PrefixTree::TextPage PrefixTree::Advance(Cursor* cursor, TokenSpan tokens) {
  MoveUp(cursor);
  PrefixNode* node = cursor->node;
  const int64_t index = cursor->num_pages, offset = index - node->begin;
  if (offset < node->NumPages()) {
    if (NumCommon(node->TokensOf(offset), tokens) == page_size_) {
      ++cursor->num_pages;
      return {node, index};
    }
    node = Split(node, offset);
    MoveTo(cursor, node, index);
  }
  PrefixNode* child = nullptr;
  const int64_t num_common = FindChild(*node, tokens, &child);
  if (num_common < page_size_) {
    // At most one shorter page is the beginning of this one, which takes its place.
    PrefixNode* beginning =
        num_common > 0 && num_common == child->TokensOf(0).size ? child : nullptr;
    const bool is_leaf = node->children.size() == (beginning != nullptr ? 1 : 0);
    if (is_leaf && node->parent != nullptr) {
      node->Append(tokens);
      node->AddKey();
      num_tokens_ += tokens.size;
      child = node;
    } else {
      child = AddChild(node, tokens);
    }
    if (beginning != nullptr) Erase(beginning);
  }
  MoveTo(cursor, child, index + 1);
  return {child, index};
}

PrefixTree::TextPage PrefixTree::AddPartial(Cursor* cursor, TokenSpan tokens) {
  MoveUp(cursor);
  PrefixNode* node = cursor->node;
  const int64_t index = cursor->num_pages, offset = index - node->begin;
  if (offset < node->NumPages()) {
    if (NumCommon(node->TokensOf(offset), tokens) == tokens.size) return {nullptr, index};
    node = Split(node, offset);
    MoveTo(cursor, node, index);
  }
  PrefixNode* child = nullptr;
  int64_t num_common = FindChild(*node, tokens, &child);
  if (num_common == tokens.size) {
    Trim(child);  // it may have lost its pages
    num_common = FindChild(*node, tokens, &child);
    if (num_common == tokens.size) {
      const bool is_same = child->TokensOf(0).size == tokens.size;
      return {is_same ? child : nullptr, index};
    }
  }
  PrefixNode* beginning = num_common > 0 && num_common == child->TokensOf(0).size ? child : nullptr;
  child = AddChild(node, tokens);
  if (beginning != nullptr) Erase(beginning);
  return {child, index};
}

void PrefixTree::Store(const TextPage& text, int32_t group, int32_t page) noexcept {
  StoredPage& stored = text.node->StoredOf(text.index - text.node->begin)[group];
  if (IsKnown(group, stored)) return;
  PagePool& pool = (*pools_)[group];
  std::vector<TextPage>& texts = texts_[group];
  if (stored.page >= 0) texts[stored.page].node = nullptr;
  stored.page = -1;
  const TextPage other = texts[page];
  if (other.node != nullptr) {
    StoredPage& old = other.node->StoredOf(other.index - other.node->begin)[group];
    if (IsKnown(group, old)) pool.DropKeeper(page);
    old.page = -1;
  }
  stored = {page, pool.Generation(page)};
  texts[page] = text;
  pool.AddKeeper(page);
  if (other.node != nullptr) Trim(other.node);
}

bool PrefixTree::IsKnown(const PrefixNode& node, int64_t offset) const {
  for (size_t g = 0; g < num_groups(); ++g) {
    if (IsKnown(g, node.StoredOf(offset)[g])) return true;
  }
  return false;
}

void PrefixTree::Forget(PrefixNode* node, int64_t offset) noexcept {
  for (; offset < node->NumPages(); ++offset) {
    for (size_t g = 0; g < num_groups(); ++g) {
      StoredPage& stored = node->StoredOf(offset)[g];
      if (stored.page < 0) continue;
      if (IsKnown(g, stored)) (*pools_)[g].DropKeeper(stored.page);
      texts_[g][stored.page].node = nullptr;
      stored.page = -1;
    }
  }
}

void PrefixTree::Erase(PrefixNode* node) noexcept {
  Forget(node, 0);
  num_tokens_ -= static_cast<int64_t>(node->tokens.size());
  --num_nodes_;
  node->parent->children.Remove(node);
}

void PrefixTree::Trim(PrefixNode* node) noexcept {
  while (node->parent != nullptr && node->children.empty() && node->num_cursors == 0) {
    int64_t num_pages = node->NumPages();
    while (num_pages > 0 && !IsKnown(*node, num_pages - 1)) --num_pages;
    if (num_pages == node->NumPages()) return;
    if (num_pages > 0) {
      Forget(node, num_pages);
      num_tokens_ -= static_cast<int64_t>(node->tokens.size()) - num_pages * page_size_;
      return node->Truncate(num_pages);
    }
    PrefixNode* parent = node->parent;
    Erase(node);
    node = parent;
  }
  const bool is_unused = node->children.empty() && node->num_cursors == 0;
  if (node->parent == nullptr && is_unused) roots_.erase(roots_.find(node->salt));
}

void PrefixTree::Clear() noexcept {
  // Not by recursion: a text of many branches is deep.
  for (auto& [salt, root] : roots_) {
    PrefixNode* node = root.get();
    while (node->parent != nullptr || !node->children.empty()) {
      PrefixNode* next = node->children.empty() ? node->parent : node->children.front();
      if (node->children.empty()) Erase(node);
      node = next;
    }
  }
  roots_.clear();
}

}  // namespace pagedkv
