// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sequence_table_test.cc
 * \brief Add, remove, fork, pop, slide; errors change nothing; copies before a write from outside.
 */
#include "state/table/sequence_table.h"

#include "check.h"
#include "state/plans/forward_plan.h"
#include "state/table/copy_on_write.h"
#include "state/table/sequence_imports.h"

namespace pagedkv::sequence_table_test {

namespace {

/*! \brief A step without kernels. */
void Step(ForwardPlan* plan, std::vector<int64_t> ids, std::vector<int64_t> lengths) {
  plan->Prepare({ids.data(), ids.size()}, {lengths.data(), lengths.size()});
  plan->Acquire();
  plan->Commit();
  plan->Finish();
}

void Append(SequenceTable* table, std::vector<int64_t> ids, std::vector<int64_t> lengths) {
  ForwardPlan plan(table, 1 << 20);
  Step(&plan, std::move(ids), std::move(lengths));
  table->CheckIntegrity();
}

TEST_CASE("sequence table: add remove") {
  SequenceTable table(2, 4, {8, 8});
  table.Add(-5);
  REQUIRE_RAISES("ValueError", "sequence -5 is in the cache already", table.Add(-5));
  table.Add(int64_t{1} << 40);
  REQUIRE_RAISES("KeyError", "no sequence 9", table.Remove(9));
  Append(&table, {-5}, {9});
  REQUIRE_EQ(table.pool(0).num_used(), 3);
  REQUIRE_EQ(table.pool(1).num_used(), 3);
  REQUIRE_EQ(table.total_length(), 9);
  table.Remove(-5);
  REQUIRE_EQ(table.pool(1).num_available(), 8);
  REQUIRE_EQ(table.total_length(), 0);
  table.CheckIntegrity();
}

/*! \brief max_num_sequences bounds the batch of a step, not the sequences that exist. */
TEST_CASE("sequence table: more sequences than one step takes") {
  SequenceTable table(2, 4, {8});
  for (int64_t id = 0; id < 6; ++id) table.Add(id);
  table.Fork(0, 6, -1);
  REQUIRE_EQ(table.num_sequences(), 7);
  Append(&table, {5, 6}, {3, 4});
  ForwardPlan plan(&table, 64);
  REQUIRE_RAISES("ValueError", "the step has 3 sequences, more than max_num_sequences (2)",
                 Step(&plan, {0, 1, 2}, {1, 1, 1}));
  REQUIRE_EQ(table.pool(0).num_used(), 2);
  Append(&table, {0, 1}, {1, 1});
}

TEST_CASE("sequence table: fork any depth in any order") {
  SequenceTable table(8, 4, {16});
  table.Add(0);
  Append(&table, {0}, {10});
  table.Fork(0, 1, -1);
  table.Fork(1, 2, 5);
  table.Fork(2, 3, 4);
  table.Fork(3, 4, 0);
  REQUIRE_EQ(table.At(1).length, 10);
  REQUIRE_EQ(table.At(2).length, 5);
  REQUIRE_EQ(table.At(4).length, 0);
  REQUIRE_EQ(table.pool(0).num_used(), 3);
  REQUIRE_EQ(table.pool(0).RefCount(0), 4);
  table.CheckIntegrity();
  table.Remove(0);
  table.Remove(2);
  REQUIRE_EQ(table.pool(0).num_used(), 3);
  table.Remove(1);
  REQUIRE_EQ(table.pool(0).num_used(), 1);
  table.Clear();
  REQUIRE_EQ(table.pool(0).num_used(), 0);
  REQUIRE_EQ(table.num_sequences(), 0);
  table.CheckIntegrity();
}

TEST_CASE("sequence table: fork errors") {
  SequenceTable table(2, 4, {4});
  table.Add(0);
  Append(&table, {0}, {5});
  REQUIRE_RAISES("ValueError", "fork position 6 of sequence 0", table.Fork(0, 1, 6));
  REQUIRE_RAISES("ValueError", "fork position -2", table.Fork(0, 1, -2));
  REQUIRE_RAISES("KeyError", "no sequence 7", table.Fork(7, 1, 0));
  REQUIRE_RAISES("ValueError", "sequence 0 is in the cache", table.Fork(0, 0, 0));
  table.Fork(0, 1, -1);
  REQUIRE_EQ(table.pool(0).RefCount(0), 2);
  table.CheckIntegrity();
}

TEST_CASE("sequence table: pop") {
  SequenceTable table(2, 4, {4});
  table.Add(0);
  Append(&table, {0}, {9});
  table.Pop(0, 0);
  table.Pop(0, 1);
  REQUIRE_EQ(table.pool(0).num_used(), 2);
  REQUIRE_RAISES("ValueError", "cannot pop 9 positions of sequence 0, which has 8",
                 table.Pop(0, 9));
  REQUIRE_RAISES("ValueError", "cannot pop -1", table.Pop(0, -1));
  table.Pop(0, 8);
  REQUIRE_EQ(table.pool(0).num_used(), 0);
  table.CheckIntegrity();
}

TEST_CASE("sequence table: copies for a write from outside") {
  SequenceTable table(4, 4, {6});
  table.Add(0);
  Append(&table, {0}, {10});
  table.Fork(0, 1, 6);  // shares pages 0 and 1 of 3
  CopyOnWrite writes(&table);
  writes.Acquire(&table.At(0), 5, 10);
  REQUIRE_EQ(writes.copies().size(), 1u);
  REQUIRE_EQ(writes.copies()[0].index, 1);
  REQUIRE_EQ(writes.copies()[0].length, 4);
  writes.Release(/*were_made=*/false);
  table.CheckIntegrity();
  writes.Acquire(&table.At(1), 0, 6);
  REQUIRE_EQ(writes.copies().size(), 2u);
  REQUIRE_EQ(writes.copies()[1].length, 2);
  writes.Commit();
  REQUIRE_EQ(table.pool(0).num_shared(), 0);
  table.CheckIntegrity();
  table.Fork(0, 2, -1);
  REQUIRE_RAISES("CacheFullError",
                 "needs 3 pages, but 1 of 6 are available; most are held by sequence",
                 writes.Acquire(&table.At(2), 0, 10));
  table.CheckIntegrity();
}

// Pages of 4 slots; the next row at position L sees L - 5 and later, and 16 more may be popped.
SequenceTable WithWindow() { return SequenceTable(8, 4, {64, 16}, {0, 6}); }

TEST_CASE("sequence table: slide") {
  SequenceTable table = WithWindow();
  ForwardPlan plan(&table, 64);
  table.Add(0);
  Step(&plan, {0}, {24});
  REQUIRE_EQ(table.geometry().FirstPosition(table.At(0), 1), 0);  // 24 - 5 - 16 = 3
  Step(&plan, {0}, {1});
  REQUIRE_EQ(table.geometry().FirstPosition(table.At(0), 1), 4);
  Step(&plan, {0}, {30});
  REQUIRE_EQ(table.At(0).length, 55);
  REQUIRE_EQ(table.geometry().FirstPosition(table.At(0), 0), 0);
  REQUIRE_EQ(table.geometry().FirstPosition(table.At(0), 1), 32);  // 55 - 5 - 16 = 34
  REQUIRE_EQ(table.pool(0).num_used(), 14);
  REQUIRE_EQ(table.pool(1).num_used(), 6);
  table.RequireKept(table.At(0), 32);
  REQUIRE_RAISES("IndexError",
                 "position 31 of sequence 0 is gone: layers with a window of 6 keep "
                 "positions from 32 on",
                 table.RequireKept(table.At(0), 31));
  for (int i = 0; i < 100; ++i) Step(&plan, {0}, {2});
  REQUIRE_EQ(table.pool(1).num_used(), 6);
  table.Remove(0);
  REQUIRE_EQ(table.pool(1).num_used(), 0);
  table.CheckIntegrity();
}

TEST_CASE("sequence table: pop with a window") {
  SequenceTable table = WithWindow();
  ForwardPlan plan(&table, 64);
  table.Add(0);
  Step(&plan, {0}, {55});  // keeps positions from 32 on
  table.Pop(0, 18);
  REQUIRE_EQ(table.At(0).pages[1].size(), 2u);
  table.CheckIntegrity();
  Step(&plan, {0}, {3});
  table.Pop(0, 40);  // to nothing, which needs nothing
  REQUIRE_EQ(table.geometry().FirstPosition(table.At(0), 1), 0);
  table.CheckIntegrity();
  Step(&plan, {0}, {5});
  REQUIRE_EQ(table.At(0).pages[1].size(), 2u);
}

TEST_CASE("sequence table: fork with a window") {
  SequenceTable table = WithWindow();
  ForwardPlan plan(&table, 64);
  table.Add(0);
  Step(&plan, {0}, {55});
  table.Fork(0, 1, 37);
  table.Fork(0, 2, -1);
  table.Fork(0, 3, 0);
  REQUIRE_EQ(table.At(1).pages[1].size(), 2u);
  REQUIRE_EQ(table.At(2).pages[1].size(), 6u);
  REQUIRE_EQ(table.geometry().FirstPosition(table.At(3), 1), 0);
  REQUIRE_EQ(table.pool(1).num_used(), 6);
  table.CheckIntegrity();
  Step(&plan, {1, 2, 3}, {1, 20, 3});  // copies page 9 for 1 and page 13 for 2
  REQUIRE_EQ(table.At(1).first_pages[1], 8);
  REQUIRE_EQ(table.At(2).first_pages[1], 13);
  table.Remove(0);
  table.CheckIntegrity();
  CopyOnWrite writes(&table);
  writes.Acquire(&table.At(1), 32, 38);
  const std::vector<PageCopy>& copies = writes.copies();
  REQUIRE_EQ(copies.size(), 2u);  // page 8, which 2 has as well, or its history notes
  REQUIRE_EQ(copies[0].group, 0);
  REQUIRE_EQ(copies[0].index, 8);
  REQUIRE_EQ(copies[1].group, 1);
  REQUIRE_EQ(copies[1].index, 0);
  writes.Release(/*were_made=*/false);
  table.CheckIntegrity();
}

TEST_CASE("sequence table: window of a sequence") {
  SequenceTable table(8, 4, {16});
  ForwardPlan plan(&table, 64);
  table.Add(0);
  table.EnableWindow(0, 8, 2);
  Step(&plan, {0}, {8});
  REQUIRE_EQ(table.At(0).window.num_dropped, 0);
  Step(&plan, {0}, {12});  // text positions 0, 1, 14 .. 19 in pages 0, 3 and 4
  table.CheckIntegrity();
  REQUIRE_EQ(table.At(0).length, 8);
  REQUIRE_EQ(table.total_length(), 8);
  REQUIRE_EQ(table.At(0).pages[0], (std::vector<int32_t>{0, 3, 4}));
  REQUIRE_EQ(table.geometry().WindowBegin(table.At(0), 0), 6);
  REQUIRE_EQ(table.geometry().PageIndex(table.At(0), 0, 1), 0);
  REQUIRE_EQ(table.geometry().PageIndex(table.At(0), 0, 2), 1);
  REQUIRE_EQ(table.geometry().OffsetInPage(table.At(0), 2), 2);
  REQUIRE_EQ(table.geometry().PageBegin(table.At(0), 0, 1), 12);
  table.Fork(0, 1, 2);
  table.Fork(0, 2, 3);
  REQUIRE(!table.At(1).window.IsSet());
  REQUIRE_EQ(table.At(2).window.num_dropped, 12);
  REQUIRE_EQ(table.At(2).pages[0], (std::vector<int32_t>{0, 3}));
  REQUIRE_RAISES("ValueError", "behind its 2 sinks; it needs as many, got 1",
                 table.EnableWindow(2, 8, 1));
  REQUIRE_RAISES("ValueError", "has a window of 8 with 2 sinks already",
                 table.EnableWindow(0, 8, 2));
  table.Pop(0, 6);  // to the sinks
  REQUIRE_EQ(table.At(0).window.num_dropped, 0);
  REQUIRE_EQ(table.At(0).pages[0], (std::vector<int32_t>{0}));
  table.Pop(2, 1);  // a gap without anything behind it is none
  REQUIRE(!table.At(2).window.IsSet());
  REQUIRE_EQ(table.pool(0).num_used(), 1);
  table.CheckIntegrity();
  Step(&plan, {0, 1, 2}, {1, 1, 1});
  table.CheckIntegrity();
  REQUIRE_EQ(table.pool(0).num_used(), 3);
}

TEST_CASE("sequence table: windows and trees exclude each other") {
  SequenceTable table(8, 4, {16});
  ForwardPlan plan(&table, 64);
  for (int64_t id : {0, 1}) table.Add(id);
  table.EnableWindow(0, 8, 2);
  Step(&plan, {0, 1}, {20, 3});
  table.Fork(0, 2, 5);  // without a window, but with the gap
  const std::vector<int64_t> lengths{1}, parents{-1};
  for (int64_t id : {0, 2}) {
    const std::vector<int64_t> ids{id};
    REQUIRE_RAISES("ValueError", "so it cannot be in a step with token trees",
                   plan.Prepare({ids.data(), 1}, {lengths.data(), 1}, IntSpan{parents.data(), 1}));
    REQUIRE_RAISES("ValueError", "so it cannot be imported",
                   SequenceImports(&table).Begin({{id, 0, {0}, {{}}}}, 1));
  }
  const std::vector<int64_t> ids{1};
  plan.Prepare({ids.data(), 1}, {lengths.data(), 1}, IntSpan{parents.data(), 1});
  plan.Acquire();
  plan.Commit();
  REQUIRE_RAISES("ValueError", "token tree nodes that are not committed",
                 table.EnableWindow(1, 8, 2));
  table.CheckIntegrity();
  table.Pop(1, 1);
  table.EnableWindow(1, 8, 2);
  table.CheckIntegrity();
}

}  // namespace

}  // namespace pagedkv::sequence_table_test
