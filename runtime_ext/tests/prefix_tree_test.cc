// SPDX-License-Identifier: Apache-2.0
/*!
 * \file prefix_tree_test.cc
 * \brief Texts are found by their tokens, branch at pages, and go when their pages are gone.
 */
#include "state/prefix_tree/prefix_tree.h"

#include "check.h"

namespace pagedkv::prefix_tree_test {

namespace {

using Tokens = std::vector<int32_t>;

TokenSpan Span(const Tokens& tokens) {
  return {tokens.data(), static_cast<int64_t>(tokens.size())};
}

struct World {
  std::vector<PagePool> pools{PagePool(12)};
  PrefixTree tree{4, &pools};
  std::map<const PrefixNode*, int64_t> cursors;

  /*! \brief Adds a text with a page of the pool for each of its pages, which are cached then. */
  std::vector<int32_t> Add(const Tokens& tokens, const std::string& salt = "") {
    std::vector<int32_t> pages;
    PrefixTree::Cursor cursor = tree.Enter(salt);
    for (size_t i = 0; i < tokens.size(); i += 4) {
      const Tokens page(tokens.begin() + i, tokens.begin() + std::min(i + 4, tokens.size()));
      pages.push_back(pools[0].Allocate());
      const PrefixTree::TextPage text = page.size() == 4 ? tree.Advance(&cursor, Span(page))
                                                         : tree.AddPartial(&cursor, Span(page));
      if (text.node != nullptr) tree.Store(text, 0, pages.back());
    }
    tree.Leave(cursor);
    pools[0].ReleaseFrom(0, &(pages_ = pages));
    Check();
    return pages;
  }

  /*! \brief The pages of a text, and how many tokens of the next one are found. */
  std::pair<std::vector<int32_t>, int64_t> Find(const Tokens& tokens,
                                                const std::string& salt = "") const {
    PrefixTree::Path path;
    tree.Find(salt, Span(tokens), &path);
    std::vector<int32_t> pages;
    for (const StoredPage* stored : path.pages) pages.push_back(stored->page);
    if (path.partial != nullptr) pages.push_back(path.partial->page);
    return {pages, path.num_partial};
  }

  void Check() const {
    std::vector<std::vector<int32_t>> num_keepers{std::vector<int32_t>(12, 0)};
    tree.CheckIntegrity(cursors, &num_keepers);
    std::vector<int32_t> num_owners;
    for (int32_t page = 0; page < 12; ++page) num_owners.push_back(pools[0].RefCount(page));
    pools[0].CheckIntegrity(num_owners, num_keepers[0]);
  }

  std::vector<int32_t> pages_;
};

using Found = std::pair<std::vector<int32_t>, int64_t>;

TEST_CASE("prefix tree: texts that branch") {
  World world;
  const auto a = world.Add({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12});
  REQUIRE_EQ(world.tree.num_nodes(), 1);
  REQUIRE_EQ(world.Find({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}), Found(a, 0));
  REQUIRE_EQ(world.Find({1, 2, 3, 4, 5, 6, 7, 9}), Found({a[0], a[1]}, 3));
  REQUIRE_EQ(world.Find({1, 2, 3, 4, 5}), Found({a[0], a[1]}, 1));
  REQUIRE_EQ(world.Find({1, 2, 3, 4}), Found({a[0]}, 0));
  REQUIRE_EQ(world.Find({1, 2}), Found({a[0]}, 2));
  REQUIRE_EQ(world.Find({2, 2}), Found({}, 0));
  REQUIRE_EQ(world.Find({}), Found({}, 0));
  REQUIRE_EQ(world.Find({1, 2}, "other"), Found({}, 0));

  const auto b = world.Add({1, 2, 3, 4, 5, 6, 7, 9, 1, 1, 1, 1});  // splits behind the first page
  REQUIRE_EQ(world.tree.num_nodes(), 3);
  REQUIRE_EQ(world.tree.num_tokens(), 20);
  REQUIRE_EQ(world.Find({1, 2, 3, 4, 5, 6, 7, 8, 9}), Found({a[0], a[1], a[2]}, 1));
  REQUIRE_EQ(world.Find({1, 2, 3, 4, 5, 6, 7, 9, 1, 1, 1, 1}), Found({a[0], b[1], b[2]}, 0));
  const auto c = world.Add({1, 2, 3, 4, 5, 6}, "other");
  REQUIRE_EQ(world.Find({1, 2, 3, 4, 5, 6, 7}, "other"), Found(c, 2));
  world.tree.Clear();
  REQUIRE_EQ(world.pools[0].num_free(), 12);
  world.Check();
}

TEST_CASE("prefix tree: pages that are not full") {
  World world;
  const auto a = world.Add({1, 2, 3, 4, 5, 6});
  REQUIRE_EQ(world.tree.num_nodes(), 2);
  REQUIRE_EQ(world.Find({1, 2, 3, 4, 5, 6, 7}), Found(a, 2));
  world.Add({1, 2, 3, 4, 5});  // the beginning of one
  REQUIRE_EQ(world.tree.num_tokens(), 6);
  const auto b = world.Add({1, 2, 3, 4, 5, 6, 7});  // takes its place
  REQUIRE_EQ(world.tree.num_tokens(), 7);
  REQUIRE_EQ(world.Find({1, 2, 3, 4, 5, 6, 8}), Found({a[0], b[1]}, 2));
  const auto c = world.Add({1, 2, 3, 4, 5, 6, 7, 8});  // and a full one the place of that
  REQUIRE_EQ(world.tree.num_nodes(), 1);
  REQUIRE_EQ(world.Find({1, 2, 3, 4, 5, 6, 7, 8}), Found({a[0], c[1]}, 0));
  const auto d = world.Add({1, 2, 3, 4, 5, 7});
  REQUIRE_EQ(world.tree.num_nodes(), 3);
  REQUIRE_EQ(world.Find({1, 2, 3, 4, 5, 7, 7, 8}), Found({a[0], d[1]}, 2));
}

TEST_CASE("prefix tree: text without pages is erased") {
  World world;
  const auto a = world.Add({1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3});
  const auto b = world.Add({1, 1, 1, 1, 4, 4, 4, 4, 5, 5});
  REQUIRE_EQ(world.pools[0].num_cached(), 5);
  for (int i = 0; i < 12; ++i) world.pools[0].Allocate();  // reclaims all
  PrefixTree::Path path;
  const Tokens tokens{1, 1, 1, 1, 2, 2, 2, 2};
  world.tree.Find("", Span(tokens), &path);
  REQUIRE_EQ(path.pages.size(), 2u);
  for (const StoredPage* stored : path.pages) REQUIRE(!world.tree.IsKnown(0, *stored));
  world.Check();
  REQUIRE_EQ(world.tree.num_tokens(), 18);
  for (int32_t page = 0; page < 12; ++page) world.pools[0].Release(page);
  for (int32_t i = 0; i < 12; ++i) world.Add({i, 7, 7, 7});  // every page is stored anew
  REQUIRE_EQ(world.tree.num_tokens(), 4 * 12);
}

TEST_CASE("prefix tree: cursors keep text") {
  World world;
  const auto a = world.Add({1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3});
  PrefixTree::Path path;
  const Tokens tokens{1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  world.tree.Find("", Span(tokens), &path);
  PrefixTree::Cursor cursor = world.tree.EnterAt(path.node, 2);
  world.cursors[cursor.node] = 1;
  const Tokens fork{4, 4, 4, 4};
  world.Add({1, 1, 1, 1, 5, 5, 5, 5});  // splits above the cursor
  REQUIRE_EQ(world.tree.TokensBefore(cursor, 0).data[0], 1);
  REQUIRE_EQ(world.tree.TokensBefore(cursor, 1).data[3], 2);
  const PrefixTree::TextPage text = world.tree.Advance(&cursor, Span(fork));
  REQUIRE_EQ(text.index, 2);
  world.cursors = {{cursor.node, 1}};
  for (int i = 0; i < 12; ++i) world.pools[0].Allocate();
  for (int32_t page = 0; page < 12; ++page) world.pools[0].Release(page);
  for (int32_t i = 0; i < 12; ++i) world.Add({10 + i, 7, 7, 7});
  REQUIRE_EQ(world.tree.num_tokens(), 4 * 12 + 12);  // the text before the cursor
  world.tree.MoveBack(&cursor, 1);
  world.cursors = {{cursor.node, 1}};
  world.Check();
  REQUIRE_EQ(world.tree.num_tokens(), 4 * 12 + 4);
  REQUIRE_EQ(world.tree.TokensBefore(cursor, 0).data[0], 1);
  world.cursors.clear();
  world.tree.Leave(cursor);
  world.Check();
  REQUIRE_EQ(world.tree.num_tokens(), 4 * 12);
}

}  // namespace

}  // namespace pagedkv::prefix_tree_test
