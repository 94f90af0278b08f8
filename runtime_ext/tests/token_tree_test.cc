// SPDX-License-Identifier: Apache-2.0
/*!
 * \file token_tree_test.cc
 * \brief Trees that grow in rounds: what is refused, depths, depth-first order, paths, chains.
 */
#include "state/sequences/token_tree.h"

#include <limits>
#include <random>
#include <vector>

#include "check.h"

namespace pagedkv::token_tree_test {

namespace {

using Parents = std::vector<int64_t>;
using Ints = std::vector<int32_t>;

IntSpan Span(const Parents& parents) { return {parents.data(), parents.size()}; }

void Grow(TokenTree* tree, const Parents& parents) {
  tree->CheckParents(Span(parents), 7);
  tree->Reserve(static_cast<int64_t>(parents.size()));
  tree->Append(Span(parents));
  tree->CheckIntegrity(7);
}

Ints Order(const TokenTree& tree) {
  Ints order(2 * tree.size());
  tree.FillOrder(order.data());
  return order;
}

TEST_CASE("token tree: errors") {
  TokenTree tree;
  const char* first = "the parent of node 0 of sequence 7";
  REQUIRE_RAISES("ValueError", first, tree.CheckParents(Span({0}), 7));
  REQUIRE_RAISES("ValueError", "in [-1, 0), got -2", tree.CheckParents(Span({-2}), 7));
  REQUIRE_RAISES("ValueError", "node 2 of sequence 7 (row 2 of its rows)",
                 tree.CheckParents(Span({-1, 0, 2}), 7));
  const int64_t huge = std::numeric_limits<int64_t>::max();
  REQUIRE_RAISES("ValueError", "got 9223372036854775807", tree.CheckParents(Span({-1, huge}), 7));
  REQUIRE_RAISES("ValueError", "got -9223372036854775807", tree.CheckParents(Span({-1, -huge}), 7));
  Grow(&tree, {-1, 0, 0});
  REQUIRE_RAISES("ValueError", "node 3 of sequence 7 (row 0 of its rows) must be an earlier node",
                 tree.CheckParents(Span({3}), 7));
  REQUIRE_EQ(tree.size(), 3);
}

TEST_CASE("token tree: rounds") {
  TokenTree tree;
  REQUIRE((tree.empty() && tree.is_chain()));
  Grow(&tree, {-1, 0, 0});
  REQUIRE_EQ(Order(tree), (Ints{0, 3, 1, 2, 2, 3}));
  Grow(&tree, {1, 2, -1});  // a later root; children of nodes of the first round
  REQUIRE_EQ(Order(tree), (Ints{0, 5, 1, 3, 3, 5, 2, 3, 4, 5, 5, 6}));
  const Ints depths{0, 1, 1, 2, 2, 0};
  for (int64_t i = 0; i < tree.size(); ++i) REQUIRE_EQ(tree.depth(i), depths[i]);
  REQUIRE_EQ(tree.PathTo(4), (Ints{0, 2, 4}));
  REQUIRE_EQ(tree.PathTo(2), (Ints{0, 2}));
  REQUIRE_EQ(tree.PathTo(5), (Ints{5}));
  tree.Truncate(3);
  REQUIRE_EQ(Order(tree), (Ints{0, 3, 1, 2, 2, 3}));
  tree.Truncate(5);
  REQUIRE_EQ(tree.size(), 3);
  tree.Truncate(0);
  REQUIRE(tree.empty());
  tree.CheckIntegrity(7);
}

TEST_CASE("token tree: chains") {
  TokenTree tree;
  REQUIRE(tree.CheckParents(Span({-1, 0, 1}), 7));
  REQUIRE(!tree.CheckParents(Span({-1, -1}), 7));
  REQUIRE(!tree.CheckParents(Span({-1, 0, 0}), 7));
  Grow(&tree, {-1, 0, 1});
  REQUIRE(tree.is_chain());
  REQUIRE(tree.CheckParents(Span({2, 3}), 7));
  REQUIRE(!tree.CheckParents(Span({1}), 7));
  Grow(&tree, {2, 2, 4});
  REQUIRE(!tree.is_chain());
  tree.Truncate(4);  // without the branch it is one again
  REQUIRE(tree.is_chain());
  tree.CheckIntegrity(7);
}

/*! \brief The order says of every pair of nodes what following the parents says. */
TEST_CASE("token tree: order of large trees") {
  std::mt19937 random(0);
  for (int64_t num_nodes : {1, 2, 50, 700}) {
    Parents parents;
    for (int64_t i = 0; i < num_nodes; ++i) {
      parents.push_back(std::uniform_int_distribution<int64_t>(-1, i - 1)(random));
    }
    TokenTree tree;
    Grow(&tree, parents);
    const Ints order = Order(tree);
    for (int64_t i = 0; i < num_nodes; ++i) {
      std::vector<bool> is_seen(num_nodes, false);
      for (int64_t node = i; node >= 0; node = parents[node]) is_seen[node] = true;
      for (int64_t j = 0; j < num_nodes; ++j) {
        const bool is_visible = order[2 * j] <= order[2 * i] && order[2 * i] < order[2 * j + 1];
        REQUIRE_EQ(is_visible, is_seen[j]);
      }
      REQUIRE_EQ(static_cast<int64_t>(tree.PathTo(i).size()), tree.depth(i) + 1);
    }
  }
}

}  // namespace

}  // namespace pagedkv::token_tree_test
