// SPDX-License-Identifier: Apache-2.0
/*!
 * \file recurrent_returns_test.cc
 * \brief Where the pools have room for all running sequences, these can go back anywhere.
 */
#include "check.h"
#include "recurrent_world.h"

namespace pagedkv::recurrent_states_test {

namespace {

/*! \brief A table whose only group has the ingredients of states behind every 8 positions. */
struct Recurrent {
  explicit Recurrent(int32_t num_pages)
      : table(4, 4, {num_pages}, {}, {{0, 8}}, {64}), plan(&table, 1 << 20) {}

  void Step(int64_t id, int64_t length) {
    plan.Prepare({&id, 1}, {&length, 1});
    plan.Acquire();
    plan.Commit();
    plan.Finish();
    table.CheckIntegrity();
  }
  /*! \brief Adds a sequence whose text is found later. \return What it reuses. */
  int64_t Add(int64_t id, const Tokens& tokens) {
    const int64_t reused = table.AddWithPrefix(id, "", Span(tokens));
    const Tokens rest(tokens.begin() + reused, tokens.end());
    Step(id, static_cast<int64_t>(rest.size()));
    table.prefixes().Record(&table.At(id), Span(rest));
    table.prefixes().AddPages(&table.At(id));
    return reused;
  }

  SequenceTable table;
  ForwardPlan plan;
};

Tokens TextOf(int32_t size, int32_t first) {
  Tokens tokens;
  for (int32_t i = 0; i < size; ++i) tokens.push_back(first + i);
  return tokens;
}

}  // namespace

TEST_CASE("ingredients that nobody runs are reclaimed before those of a running sequence") {
  Recurrent cache(12);
  cache.table.Add(0);
  cache.Step(0, 40);  // takes ten pages, and leaves six of them behind
  REQUIRE_EQ(cache.table.At(0).first_pages[0], 6);
  cache.Add(1, TextOf(8, 0));
  cache.table.Remove(1);  // used later than those six
  REQUIRE_EQ(cache.table.pool(0).num_spare(), 2);
  cache.table.Add(2);
  cache.Step(2, 8);
  cache.table.Fork(0, 3, 5);
  cache.table.Pop(0, 39);
  cache.table.CheckIntegrity();
  REQUIRE_EQ(cache.table.prefixes().Match("", Span(TextOf(8, 0))), 0);
}

TEST_CASE("a sequence that begins with a hit can go back before it") {
  Recurrent cache(12);
  const Tokens text = TextOf(40, 0);
  cache.Add(0, text);
  cache.table.Remove(0);
  REQUIRE_EQ(cache.Add(1, text), 39);
  cache.table.Add(2);
  cache.Step(2, 4);
  cache.table.Fork(1, 3, 2);
  cache.table.Pop(1, 37);
  cache.table.CheckIntegrity();
}

TEST_CASE("no copy for a text takes a page that a running sequence may return to") {
  // Sequence 1 writes to a page that only a text has; the pool is full but for what 0 returns to.
  Recurrent cache(11);
  const Tokens text = TextOf(6, 0);
  cache.table.Add(0);
  cache.Step(0, 36);
  cache.Add(1, text);
  cache.table.Remove(1);
  REQUIRE_EQ(cache.table.AddWithPrefix(1, "", Span(TextOf(7, 0))), 6);
  REQUIRE_EQ(cache.table.pool(0).num_spare(), 0);
  cache.Step(1, 1);
  cache.table.Pop(0, 35);
  cache.table.CheckIntegrity();
}

TEST_CASE("a sequence with a window of its own protects no pages") {
  Recurrent cache(12);
  cache.table.Add(0);
  cache.Step(0, 40);
  REQUIRE_EQ(cache.table.pool(0).num_spare(), 2);
  cache.table.EnableWindow(0, 20, 2);
  REQUIRE_EQ(cache.table.pool(0).num_spare(), 8);
  cache.table.CheckIntegrity();
  cache.table.Remove(0);
  cache.table.Add(1);  // it has the allocations of the other one
  cache.Step(1, 40);
  REQUIRE_EQ(cache.table.pool(0).num_spare(), 2);
  cache.table.CheckIntegrity();
}

TEST_CASE("a pool without room for all texts reclaims pages in the order of their use") {
  SequenceTable table(4, 4, {64, 8}, {0, 6});
  ForwardPlan plan(&table, 1 << 20);
  const int64_t id = 0, length = 32;
  table.Add(0);
  plan.Prepare({&id, 1}, {&length, 1});
  plan.Acquire();
  plan.Commit();
  plan.Finish();
  REQUIRE_EQ(table.pool(1).num_spare(), table.pool(1).num_available());
  REQUIRE_GT(table.pool(1).num_cached(), 0);
}

TEST_CASE("where attention has room, no fork and no pop of random sequences is refused") {
  int64_t num_replayed = 0, num_reused = 0, num_reclaimed = 0;
  for (uint64_t seed = 300; seed < 340; ++seed) {
    CAPTURE(seed);
    const auto num_pages = static_cast<int32_t>(30 + seed % 4 * 20);
    World world(seed, num_pages, num_pages, 200);
    for (int i = 0; i < 600; ++i) world.Do();
    REQUIRE_EQ(world.num_refused(), 0);
    num_replayed += world.num_replayed();
    num_reused += world.num_reused();
    num_reclaimed += world.num_reclaimed();
    world.Clear();
  }
  REQUIRE_GT(num_replayed, 1000);
  REQUIRE_GT(num_reused, 1000);
  REQUIRE_GT(num_reclaimed, 1000);
}

}  // namespace pagedkv::recurrent_states_test
