// SPDX-License-Identifier: Apache-2.0
/*!
 * \file recurrent_states_test.cc
 * \brief Random sequences of a model with recurrent layers: every state is that of its tokens.
 */
#include "check.h"
#include "recurrent_world.h"

namespace pagedkv::recurrent_states_test {

TEST_CASE("states of random sequences are those of their tokens") {
  int64_t num_replayed = 0, num_refused = 0, num_reused = 0, num_with_lost_states = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    CAPTURE(seed);
    // Pools from plenty to hardly enough.
    const auto scarcity = static_cast<int32_t>(seed % 4);
    World world(seed, 400 - 60 * scarcity, scarcity < 2 ? 300 : 80, scarcity % 2 ? 25 : 120);
    for (int i = 0; i < 600; ++i) world.Do();
    num_replayed += world.num_replayed();
    num_refused += world.num_refused();
    num_reused += world.num_reused();
    num_with_lost_states += world.HasReclaimedState();
    world.Clear();
  }
  REQUIRE_GT(num_replayed, 1000);
  REQUIRE_GT(num_refused, 10);
  REQUIRE_GT(num_reused, 1000);
  REQUIRE_GT(num_with_lost_states, 5);
}

TEST_CASE("states of a token tree share a few pages") {
  struct Tree {
    std::vector<int64_t> parents;
    size_t num_pages;  // besides that of the sequence
  };
  Tree binary{{-1}, 6}, comb{{-1}, 2}, star{{-1}, 2}, forest{{-1, -1, 1, 1}, 2}, chain{{-1}, 1};
  for (int64_t node = 1; node < 63; ++node) {
    binary.parents.push_back((node - 1) / 2);
    comb.parents.push_back((node - 1) / 2 * 2);
    star.parents.push_back(0);
    chain.parents.push_back(node - 1);
  }
  for (const Tree& tree : {binary, comb, star, forest, chain}) {
    const auto num_nodes = static_cast<int64_t>(tree.parents.size());
    CAPTURE(tree.num_pages);
    SequenceTable table(1, 4, {64, 64}, {}, {{1, 8}}, {static_cast<int32_t>(tree.num_pages) + 1});
    ForwardPlan plan(&table, 1 << 20);
    table.Add(0);
    const int64_t id = 0, length = 7;
    plan.Prepare({&id, 1}, {&length, 1});
    plan.Acquire();
    plan.Commit();
    plan.Finish();
    plan.Prepare({&id, 1}, {&num_nodes, 1}, IntSpan{tree.parents.data(), tree.parents.size()});
    plan.Acquire();
    std::map<int32_t, int64_t> last_node{{table.At(0).states[0].pages[0], -1}};  // [page]
    std::vector<bool> is_done(num_nodes, false);
    plan.states(0).VisitSegments(0, [&](const StatePlan::Segment& segment) {
      int64_t before = last_node.at(segment.read_page);
      for (int64_t n = 0; n < segment.num_nodes; ++n) {
        const int32_t node = segment.nodes[n];
        REQUIRE_EQ(tree.parents[node], before);
        REQUIRE(!is_done[node]);
        is_done[node] = true;
        before = node;
      }
      last_node[segment.write_page] = before;
    });
    REQUIRE(std::all_of(is_done.begin(), is_done.end(), [](bool is) { return is; }));
    REQUIRE_EQ(last_node.size(), tree.num_pages + 1);
    plan.Commit();
    plan.Finish();
    table.CheckIntegrity();
  }
}

TEST_CASE("windows of sequences drop positions, and no state forgets a token") {
  int64_t num_dropped = 0, num_replayed = 0;
  for (uint64_t seed = 200; seed < 220; ++seed) {
    CAPTURE(seed);
    World world(seed, 300, seed % 2 ? 300 : 90, seed % 4 < 2 ? 30 : 120, {}, true);
    for (int i = 0; i < 600; ++i) world.Do();
    num_dropped += world.num_dropped();
    num_replayed += world.num_replayed();
    world.Clear();
  }
  REQUIRE_GT(num_dropped, 5000);
  REQUIRE_GT(num_replayed, 500);
}

TEST_CASE("states come back from host memory and from a store") {
  for (const TierWrites writes : {TierWrites::kBack, TierWrites::kThrough}) {
    int64_t num_host = 0, num_store = 0;
    for (uint64_t seed = 100; seed < 120; ++seed) {
      CAPTURE(seed);
      TierSetup setup;
      setup.num_slots = seed % 2 ? 200 : 10;
      setup.policy = {writes, 1};
      setup.has_store = seed % 4 < 2;
      World world(seed, 90, 70, 20, setup);
      for (int i = 0; i < 600; ++i) world.Do();
      num_host += world.counts().host_tokens;
      num_store += world.counts().store_tokens;
      world.Clear();
    }
    REQUIRE_GT(num_host, 100);
    REQUIRE_GT(num_store, 20);
  }
}

void Step(ForwardPlan* plan, int64_t id, int64_t length, bool is_written = true) {
  plan->Prepare({&id, 1}, {&length, 1});
  plan->Acquire();
  plan->Commit();
  plan->Finish(is_written);
}

TEST_CASE("states that pops and forks go back to") {
  SequenceTable table(4, 4, {64}, {}, {{0, 8}}, {16});
  ForwardPlan plan(&table, 1 << 20);
  table.Add(0);
  Step(&plan, 0, 60);
  REQUIRE_EQ(table.At(0).states[0].first_page, 4);  // those behind 40 positions and more are held
  table.Fork(0, 1, 20);
  REQUIRE_EQ(table.At(1).states[0].length, 16);
  table.Pop(0, 47);
  REQUIRE_EQ(table.At(0).states[0].length, 8);
  Step(&plan, 0, 1);
  REQUIRE_EQ(table.At(0).states[0].length, 14);
  REQUIRE_EQ(table.states().FindPage(table.At(0), 0, 1), -1);  // not that of 16 positions yet
  table.Pop(0, 2);
  REQUIRE_EQ(table.At(0).states[0].length, 8);
  Step(&plan, 0, 6, /*is_written=*/false);  // 16 and 18 were not computed
  REQUIRE_EQ(table.At(0).states[0].length, 8);
  table.CheckIntegrity();
  table.Pop(0, 6);
  Step(&plan, 0, 6);
  REQUIRE_EQ(table.At(0).states[0].length, 18);
  table.CheckIntegrity();
}

TEST_CASE("a hit takes the states to pop back to, as far as their ingredients are there") {
  // [missing] ingredients of so many last positions are reclaimed before the hit.
  for (int64_t missing : {0, 1, 3}) {
    CAPTURE(missing);
    SequenceTable table(4, 1, {12}, {}, {{0, 2}}, {40});
    ForwardPlan plan(&table, 1 << 20);
    const Tokens tokens{1, 2, 3, 4, 5, 6, 7, 8};
    table.AddWithPrefix(0, "", Span(tokens));
    Step(&plan, 0, 8);
    table.prefixes().Record(&table.At(0), Span(tokens));
    table.prefixes().AddPages(&table.At(0));
    table.Remove(0);
    table.Add(1);
    if (missing > 0) Step(&plan, 1, 4 + missing);
    // The last ones go first, and that of the eighth position is none of the hit's.
    const int64_t length = missing > 1 ? 6 : 7, first = missing > 1 ? 6 : 0;
    REQUIRE_EQ(table.AddWithPrefix(2, "", Span(tokens)), length);
    table.CheckIntegrity();
    REQUIRE_EQ(table.At(2).first_pages[0], first);
    REQUIRE_EQ(table.At(2).states[0].length, 6);
    table.Pop(2, length - first);
    table.CheckIntegrity();
    if (first > 0) REQUIRE_RAISES("ValueError", "did not come with a prefix hit", table.Pop(2, 1));
    table.CheckIntegrity();
  }
}

}  // namespace pagedkv::recurrent_states_test
