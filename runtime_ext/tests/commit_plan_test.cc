// SPDX-License-Identifier: Apache-2.0
/*!
 * \file commit_plan_test.cc
 * \brief Commits are checked before they change anything, move nodes in order, and are undone
 * exactly.
 */
#include "state/plans/commit_plan.h"

#include <vector>

#include "check.h"
#include "state/plans/forward_plan.h"

namespace pagedkv::commit_plan_test {

namespace {

using Ids = std::vector<int64_t>;
using Ints = std::vector<int32_t>;

IntSpan Span(const Ids& values) { return {values.data(), values.size()}; }

/*! \brief A table and its steps. */
struct Cache {
  explicit Cache(std::vector<int32_t> num_pages, std::vector<int64_t> windows = {})
      : table(4, 4, num_pages, windows), steps(&table, 1 << 10) {}

  void Step(const Ids& ids, const Ids& lengths) {
    steps.Prepare(Span(ids), Span(lengths));
    Finish();
  }
  void TreeStep(const Ids& ids, const Ids& lengths, const Ids& parents) {
    steps.Prepare(Span(ids), Span(lengths), Span(parents));
    Finish();
  }
  void Finish() {
    steps.Acquire();
    steps.Commit();
    steps.Finish();
    table.CheckIntegrity();
  }

  SequenceTable table;
  ForwardPlan steps;
};

TEST_CASE("commit plan: errors") {
  Cache cache({16});
  SequenceTable& table = cache.table;
  table.Add(0);
  table.Add(1);
  cache.TreeStep({0}, {3}, {-1, 0, 0});
  CommitPlan plan(&table);
  REQUIRE_RAISES("ValueError", "got 2 ids and 1 leaves", plan.Prepare(Span({0, 1}), Span({0})));
  REQUIRE_RAISES("KeyError", "no sequence 7", plan.Prepare(Span({0, 7}), Span({0, -1})));
  REQUIRE_RAISES("ValueError", "sequence 0 is twice", plan.Prepare(Span({0, 0}), Span({0, 0})));
  REQUIRE_RAISES("ValueError", "one of its 3 token tree nodes", plan.Prepare(Span({0}), Span({3})));
  REQUIRE_RAISES("ValueError", "or -1 for none, got -2", plan.Prepare(Span({0}), Span({-2})));
  REQUIRE_RAISES("ValueError", "one of its 0 token tree nodes", plan.Prepare(Span({1}), Span({0})));
  plan.Prepare(Span({1}), Span({-1}));  // nothing to drop is no error
  plan.Acquire();
  plan.Commit();
  REQUIRE_EQ(table.At(0).tree.size(), 3);
  REQUIRE_EQ(table.At(1).length, 0);
}

TEST_CASE("commit plan: moves") {
  Cache cache({16});
  SequenceTable& table = cache.table;
  for (int64_t id : {0, 1, 2}) table.Add(id);
  cache.Step({0, 1, 2}, {6, 4, 1});                          // pages 0 1, 2, 3
  cache.TreeStep({0, 1}, {4, 3}, {-1, 0, 0, 1, -1, -1, 1});  // 4 5, 6
  cache.TreeStep({1, 0, 2}, {2, 1, 1}, {2, 2, 2, -1});       // 7, then all in old ones
  REQUIRE_EQ(table.At(0).length, 11);
  REQUIRE_EQ(table.At(0).committed_length(), 6);
  REQUIRE_EQ(table.At(0).pages[0], (Ints{0, 1, 4}));
  REQUIRE_EQ(table.At(1).pages[0], (Ints{2, 5, 6}));

  CommitPlan plan(&table);
  plan.Prepare(Span({2, 1, 0}), Span({0, 4, 4}));  // paths 0; 1 2 4; 0 2 4
  plan.Acquire();
  REQUIRE(plan.copies().empty());
  REQUIRE_EQ(plan.num_moves(), 5);
  REQUIRE_EQ(plan.num_committed(), 7);
  REQUIRE_EQ(plan.num_dropped(), 4);
  Ints indptr(4), slots(10);
  plan.FillMoveIndptr(indptr.data());
  REQUIRE_EQ(indptr, (Ints{0, 0, 3, 5}));
  plan.FillMoves(0, slots.data());
  REQUIRE_EQ(slots, (Ints{21, 22, 24, 16, 18, 20, 21, 22, 7, 16}));
  plan.Commit();
  table.CheckIntegrity();
  REQUIRE_EQ(table.At(0).length, 9);
  REQUIRE_EQ(table.At(1).length, 7);
  REQUIRE_EQ(table.At(2).length, 2);
  REQUIRE_EQ(table.At(1).pages[0], (Ints{2, 5}));
  REQUIRE(table.At(0).tree.empty());
  REQUIRE_EQ(table.total_length(), 18);
}

TEST_CASE("commit plan: drop all") {
  Cache cache({16});
  SequenceTable& table = cache.table;
  table.Add(0);
  cache.TreeStep({0}, {9}, {-1, 0, 0, 0, 1, 1, -1, 2, 2});
  CommitPlan plan(&table);
  plan.Prepare(Span({0}), Span({-1}));
  plan.Acquire();
  REQUIRE_EQ(plan.num_moves(), 0);
  plan.Commit();
  table.CheckIntegrity();
  REQUIRE_EQ(table.At(0).length, 0);
  REQUIRE_EQ(table.pool(0).num_used(), 0);
}

TEST_CASE("commit plan: shared pages") {
  Cache cache({4, 8});
  SequenceTable& table = cache.table;
  table.Add(0);
  cache.Step({0}, {5});                     // pages 0 1
  cache.TreeStep({0}, {4}, {-1, 0, 0, 2});  // 2
  REQUIRE_RAISES("ValueError", "positions from 5 on are token tree nodes", table.Fork(0, 1, -1));
  REQUIRE_RAISES("ValueError", "positions from 5 on are token tree nodes", table.Fork(0, 1, 6));
  table.Fork(0, 1, 5);
  REQUIRE(table.At(1).tree.empty());
  const Ints free_before = table.pool(0).free_pages();
  CommitPlan plan(&table);
  plan.Prepare(Span({0}), Span({3}));  // 0 2 3 move to slots of pages 1 and 2
  plan.Acquire();
  REQUIRE_EQ(plan.copies().size(), 2u);
  REQUIRE_EQ(plan.copies()[0].source, 1);
  REQUIRE_EQ(plan.copies()[0].length, 4);
  Ints slots(4);
  plan.FillMoves(0, slots.data());
  REQUIRE_EQ(slots, (Ints{15, 8, 14, 15}));
  plan.Release();
  REQUIRE(table.pool(0).free_pages() == free_before);
  table.CheckIntegrity();

  table.Add(2);
  cache.Step({2}, {4});  // the last page of the first group
  REQUIRE_RAISES("CacheFullError", "needs 1 pages, but 0 of 4 are available", plan.Acquire());
  table.CheckIntegrity();
  REQUIRE_EQ(table.At(0).tree.size(), 4);
  table.Remove(2);
  plan.Prepare(Span({0}), Span({3}));
  plan.Acquire();
  plan.Commit();
  table.CheckIntegrity();
  REQUIRE_EQ(table.At(0).length, 8);
  REQUIRE_EQ(table.At(0).pages[0], (Ints{0, 3}));
  REQUIRE_EQ(table.At(1).pages[0], (Ints{0, 1}));
}

TEST_CASE("commit plan: pop and remove") {
  Cache cache({16});
  SequenceTable& table = cache.table;
  table.Add(0);
  cache.Step({0}, {5});
  cache.TreeStep({0}, {6}, {-1, 0, 0, 1, 2, -1});
  table.Pop(0, 2);  // the nodes that were appended last
  table.CheckIntegrity();
  REQUIRE_EQ(table.At(0).tree.size(), 4);
  cache.TreeStep({0}, {1}, {3});
  REQUIRE_EQ(table.At(0).tree.depth(4), 3);
  table.Pop(0, 7);  // and then committed positions
  table.CheckIntegrity();
  REQUIRE(table.At(0).tree.empty());
  REQUIRE_EQ(table.At(0).length, 3);
  cache.TreeStep({0}, {2}, {-1, -1});
  table.Remove(0);
  table.CheckIntegrity();
  REQUIRE_EQ(table.pool(0).num_used(), 0);
  REQUIRE_EQ(table.total_length(), 0);
}

/*! \brief The window follows the committed positions, and slides when nodes are committed. */
TEST_CASE("commit plan: window") {
  Cache cache({64}, {3});
  SequenceTable& table = cache.table;
  table.Add(0);
  cache.Step({0}, {30});  // 30 - 2 - 16 = 12
  REQUIRE_EQ(table.geometry().FirstPosition(table.At(0), 0), 12);
  Ids parents(20, 0);
  parents[0] = -1;
  cache.TreeStep({0}, {20}, parents);
  REQUIRE_EQ(table.geometry().FirstPosition(table.At(0), 0), 12);
  cache.TreeStep({0}, {4}, {19, 20, 21, 22});
  CommitPlan plan(&table);
  plan.Prepare(Span({0}), Span({23}));  // 0 19 20 21 22 23
  plan.Acquire();
  Ints slots(10);
  plan.FillMoves(0, slots.data());
  plan.Commit();
  table.CheckIntegrity();
  REQUIRE_EQ(table.At(0).length, 36);
  REQUIRE_EQ(table.geometry().FirstPosition(table.At(0), 0), 16);
  REQUIRE_EQ(table.At(0).pages[0].size(), 5u);
}

}  // namespace

}  // namespace pagedkv::commit_plan_test
