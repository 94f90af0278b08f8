// SPDX-License-Identifier: Apache-2.0
/*!
 * \file prefix_children_test.cc
 * \brief Children of a node against a plain list of their first pages.
 */
#include "state/prefix_tree/prefix_children.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "check.h"
#include "state/prefix_tree/prefix_node.h"

namespace pagedkv::prefix_children_test {

namespace {

constexpr int64_t kPageSize = 6;
using Tokens = std::vector<int32_t>;

TokenSpan Span(const Tokens& tokens) {
  return {tokens.data(), static_cast<int64_t>(tokens.size())};
}

std::unique_ptr<PrefixNode> NodeOf(const Tokens& tokens) {
  auto node = std::make_unique<PrefixNode>(nullptr, 0, kPageSize, 1);
  node->Append(Span(tokens));
  return node;
}

class Children {
 public:
  explicit Children(uint64_t seed) : engine_(seed) {}

  /*! \brief A page that begins with `num_shared` zeros; tokens from a small vocabulary. */
  Tokens Draw(int64_t num_shared, int32_t vocabulary) {
    Tokens page(num_shared, 0);
    const int64_t size = engine_() % 4 ? kPageSize : 1 + engine_() % kPageSize;
    for (int64_t i = num_shared; i < size; ++i) {
      page.push_back(static_cast<int32_t>(engine_() % vocabulary));
    }
    if (page.empty()) page.push_back(0);
    return page;
  }
  int64_t Longest(const Tokens& page) const {
    int64_t longest = 0;
    for (const auto& [tokens, node] : expected_) {
      longest = std::max(longest, NumCommon(Span(tokens), Span(page)));
    }
    return longest;
  }
  void Add(const Tokens& page) {
    for (const auto& [tokens, node] : expected_) {  // none may be the beginning of another
      const auto common = NumCommon(Span(tokens), Span(page));
      if (common == Span(page).size || common == Span(tokens).size) return;
    }
    expected_.emplace_back(page, children_.Insert(NodeOf(page)));
  }
  void Remove() {
    if (expected_.empty()) return;
    std::swap(expected_[engine_() % expected_.size()], expected_.back());
    const auto [tokens, node] = expected_.back();
    CHECK(children_.Remove(node).get() == node);
    expected_.pop_back();
  }
  void Replace() {
    if (expected_.empty()) return;
    auto& [tokens, node] = expected_[engine_() % expected_.size()];
    std::unique_ptr<PrefixNode> other = NodeOf(tokens);
    const PrefixNode* old = node;
    node = other.get();
    CHECK(children_.Replace(old, std::move(other)).get() == old);
  }
  void Check(const Tokens& page) {
    PrefixNode* child = nullptr;
    const int64_t found = children_.Find(Span(page), &child);
    CHECK(found == Longest(page));
    CHECK((child != nullptr) == (found > 0));
    if (child != nullptr) CHECK(NumCommon(child->TokensOf(0), Span(page)) == found);
    CHECK(children_.size() == static_cast<int64_t>(expected_.size()));
  }
  void CheckOrder() {
    children_.CheckIntegrity();
    std::sort(expected_.begin(), expected_.end());
    size_t i = 0;
    children_.ForEach([&](const PrefixNode& node) { CHECK(expected_.at(i++).second == &node); });
    CHECK(i == expected_.size());
  }
  uint64_t Random(uint64_t count) { return engine_() % count; }

 private:
  std::mt19937_64 engine_;
  PrefixChildren children_;
  std::vector<std::pair<Tokens, PrefixNode*>> expected_;
};

}  // namespace

TEST_CASE("children are found by the most tokens in common") {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Children children(seed);
    const auto vocabulary = static_cast<int32_t>(2 + seed % 5 * seed % 30);
    for (int turn = 0; turn < 1500; ++turn) {
      // What all share shrinks in the course of the run, and with the last child it begins anew.
      const auto num_shared = static_cast<int64_t>(turn < 700 ? 3 : children.Random(4));
      const uint64_t choice = children.Random(10);
      if (choice < (turn % 500 < 400 ? 6 : 1)) {
        children.Add(children.Draw(num_shared, vocabulary));
      } else if (choice < 8) {
        children.Remove();
      } else {
        children.Replace();
      }
      children.Check(children.Draw(static_cast<int64_t>(children.Random(4)), vocabulary));
      if (turn % 50 == 0) children.CheckOrder();
    }
  }
}

TEST_CASE("children that fill many blocks are found") {
  Children children(1);
  for (int i = 0; i < 3000; ++i) children.Add(children.Draw(1, 9));
  children.CheckOrder();
  for (int i = 0; i < 3000; ++i) children.Check(children.Draw(static_cast<int64_t>(i % 3), 9));
  for (int i = 0; i < 3000; ++i) {
    children.Remove();
    if (i % 100 == 0) children.Check(children.Draw(1, 9));
  }
  children.CheckOrder();
}

}  // namespace pagedkv::prefix_children_test
