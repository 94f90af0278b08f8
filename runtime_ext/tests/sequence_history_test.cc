// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sequence_history_test.cc
 * \brief Forks and pops further back than a window get back the pages that it has left behind.
 */
#include "check.h"
#include "state/plans/forward_plan.h"
#include "state/table/receives.h"
#include "state/table/sends.h"
#include "state/table/sequence_table.h"

namespace pagedkv::sequence_history_test {

namespace {

using Pages = std::vector<int32_t>;

struct World {
  SequenceTable table;
  ForwardPlan plan;

  // Pages of 4 slots; a row at position L sees L - 5 and later, and 16 more may be popped.
  explicit World(int32_t num_pages, int64_t window = 6)
      : table(8, 4, {num_pages}, {window}), plan(&table, 1 << 20) {}

  void Prepare(const std::vector<int64_t>& ids, const std::vector<int64_t>& lengths) {
    plan.Prepare({ids.data(), ids.size()}, {lengths.data(), lengths.size()});
  }
  void Step(const std::vector<int64_t>& ids, const std::vector<int64_t>& lengths) {
    Prepare(ids, lengths);
    plan.Acquire();
    plan.Commit();
    table.CheckIntegrity(/*has_slid=*/false);
    plan.Finish();
    table.CheckIntegrity();
  }
};

TEST_CASE("sequence history: pop") {
  World world(16);
  SequenceTable& table = world.table;
  table.Add(0);
  world.Step({0}, {30});
  world.Step({0}, {30});  // holds pages 9 to 14
  REQUIRE_EQ(table.At(0).first_pages[0], 9);
  REQUIRE_EQ(table.pool(0).num_cached(), 9);
  REQUIRE_EQ(table.pool(0).num_available(), 10);
  table.Pop(0, 33);  // to 27, which sees position 22 next
  REQUIRE_EQ(table.At(0).pages[0], (Pages{5, 6}));
  REQUIRE_EQ(table.At(0).first_pages[0], 5);
  table.CheckIntegrity();
  world.Step({0}, {2});
  REQUIRE_EQ(table.At(0).pages[0], (Pages{5, 6, table.At(0).pages[0][2]}));
  table.Pop(0, 28);  // to 1
  REQUIRE_EQ(table.At(0).pages[0], (Pages{0}));
  table.CheckIntegrity();
  table.Pop(0, 1);
  REQUIRE_EQ(table.pool(0).num_used(), 0);
  table.CheckIntegrity();
}

TEST_CASE("sequence history: forks share the history") {
  World world(40);
  SequenceTable& table = world.table;
  table.Add(0);
  world.Step({0}, {30});
  world.Step({0}, {30});
  table.Fork(0, 1, 40);  // sees 35 next
  REQUIRE_EQ(table.At(1).pages[0], (Pages{8, 9}));
  table.Fork(1, 2, 10);
  REQUIRE_EQ(table.At(2).pages[0], (Pages{1, 2}));
  table.Remove(0);
  table.CheckIntegrity();
  table.Pop(1, 20);
  REQUIRE_EQ(table.At(1).pages[0], (Pages{3, 4}));
  world.Step({1, 2}, {30, 30});
  table.Pop(1, 31);
  REQUIRE_EQ(table.At(1).pages[0], (Pages{3, 4}));
  table.CheckIntegrity();
}

TEST_CASE("sequence history: errors of reclaimed pages") {
  World world(12);
  SequenceTable& table = world.table;
  table.Add(0);
  world.Step({0}, {30});
  world.Step({0}, {14});  // holds pages 5 to 10; 0 to 4 are cached, and page 11 is free
  table.Add(1);
  world.Step({1}, {12});  // takes pages 11, 0 and 1
  const int64_t num_available = table.pool(0).num_available();
  REQUIRE_RAISES(
      "ValueError",
      "cannot pop sequence 0 (length 44) at position 12: layers with a window of 6 would "
      "see position 7 next, but the pages of positions 4 to 7 have been reclaimed for "
      "others since their window left them behind; pop at position 13 or later",
      table.Pop(0, 32));
  REQUIRE_RAISES("ValueError", "the pages of positions 0 to 7 have been reclaimed",
                 table.Fork(0, 2, 8));
  REQUIRE_EQ(table.At(0).length, 44);
  REQUIRE_EQ(table.num_sequences(), 2);
  REQUIRE_EQ(table.pool(0).num_available(), num_available);
  table.CheckIntegrity();
  table.Fork(0, 2, 13);
  REQUIRE_EQ(table.At(2).pages[0], (Pages{2, 3}));
  table.CheckIntegrity();
}

void WritesSpareTheHistoryWhileThereIsRoom(bool is_step) {
  for (const bool has_room : {true, false}) {
    World world(has_room ? 10 : 9);
    SequenceTable& table = world.table;
    table.Add(0);
    world.Step({0}, {32});
    world.Step({0}, {1});  // holds pages 3 to 8
    table.Fork(0, 1, 10);
    REQUIRE_EQ(table.At(1).pages[0], (Pages{1, 2}));
    table.Add(2);
    world.Step({2}, {1});
    REQUIRE_EQ(table.pool(0).num_available(), has_room ? 1 : 0);
    if (is_step) {
      world.Step({1}, {1});  // slot 2 of page 2, which the history of 0 notes
    } else {
      CopyOnWrite copies(&table);
      copies.Acquire(&table.At(1), 8, 10);
      REQUIRE_EQ(copies.copies().size(), has_room ? 1u : 0u);
      copies.Commit();
      copies.Overwrite(table.At(1), 8, 10);
      table.CheckIntegrity();
    }
    REQUIRE_EQ(table.At(1).pages[0], (Pages{1, has_room ? 0 : 2}));
    if (has_room) {
      table.Fork(0, 3, 12);
      REQUIRE_EQ(table.At(3).pages[0], (Pages{1, 2}));
    } else {
      REQUIRE_RAISES("ValueError", "positions 8 to 11 have been reclaimed", table.Fork(0, 3, 12));
    }
    table.CheckIntegrity();
  }
}

TEST_CASE("sequence history: writes spare the history while there is room") {
  for (const bool is_step : {true, false}) WritesSpareTheHistoryWhileThereIsRoom(is_step);
}

TEST_CASE("sequence history: failed and aborted steps") {
  World world(12);
  SequenceTable& table = world.table;
  ForwardPlan& plan = world.plan;
  table.Add(0);
  world.Step({0}, {30});
  world.Step({0}, {14});  // 0 to 4 are cached, 11 is free
  table.Add(1);
  const Pages free = table.pool(0).free_pages(), cached = table.pool(0).cached_pages().List();
  world.Prepare({1}, {16});
  plan.Acquire();
  plan.Release();
  REQUIRE_EQ(table.pool(0).free_pages(), free);
  REQUIRE_EQ(table.pool(0).cached_pages().List(), cached);
  REQUIRE_EQ(table.pool(0).num_reclaimed(), 0);
  table.CheckIntegrity();
  world.Prepare({1}, {16});
  plan.Acquire();
  plan.Commit();
  plan.Abort();
  table.CheckIntegrity();
  REQUIRE_EQ(table.pool(0).num_available(), static_cast<int32_t>(free.size() + cached.size()));
  REQUIRE_EQ(table.pool(0).cached_pages().List(), (Pages{3, 4}));
  REQUIRE_RAISES("ValueError", "have been reclaimed", table.Fork(0, 2, 10));
  REQUIRE_RAISES("CacheFullError", "needs 7 pages, but 6 of 12 are available",
                 world.Prepare({1}, {25}));
}

TEST_CASE("sequence history: removed sequences and clear") {
  World world(8, 0);
  SequenceTable& table = world.table;
  table.Add(0);
  world.Step({0}, {10});
  table.Remove(0);
  REQUIRE_EQ(table.pool(0).num_free(), 8);  // nobody could find its pages
  table.Add(0);
  world.Step({0}, {10});
  const Pages tokens{1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  table.prefixes().Record(&table.At(0), {tokens.data(), 10});
  table.prefixes().AddPages(&table.At(0));
  table.Fork(0, 1, 4);
  table.Remove(0);
  REQUIRE_EQ(table.pool(0).cached_pages().List(), (Pages{2, 1}));  // the end first
  table.Remove(1);
  REQUIRE_EQ(table.pool(0).cached_pages().List(), (Pages{2, 1, 0}));
  table.Add(2);
  world.Step({2}, {24});
  REQUIRE_EQ(table.pool(0).cached_pages().List(), (Pages{1, 0}));
  table.Clear();
  REQUIRE_EQ(table.pool(0).num_free(), 8);
  table.CheckIntegrity();
}

TEST_CASE("sequence history: pinned pages stay") {
  World world(16);
  SequenceTable& table = world.table;
  table.Add(0);
  world.Step({0}, {30});
  Sequence& sequence = table.At(0);
  const int64_t first = table.geometry().FirstPosition(sequence, 0);
  sequence.send = std::make_unique<SendMark>();
  *sequence.send = {1, 1, first, 30, first, {{{0, 30 - first}}}};
  Sends sends(&table);
  const SendBlock block = sends.Plan(sequence);
  sends.Commit(block);
  world.Step({0}, {30});
  table.Add(1);
  world.Step({1}, {4 * table.pool(0).num_available()});
  table.Pop(0, 60 - 28);  // the block has kept what it sees; of its last page there is a copy
  table.CheckIntegrity();
  sends.Release(block);
  table.CheckIntegrity();
  table.Remove(0);
  REQUIRE_EQ(table.pool(0).num_used(), static_cast<int32_t>(table.At(1).pages[0].size()));
  table.CheckIntegrity();
}

TEST_CASE("sequence history: receives") {
  World world(24);
  SequenceTable& table = world.table;
  table.Add(0);
  world.Step({0}, {20});
  Receives receives(&table);
  ReceivePlan plan = receives.Acquire(&table.At(0), 20);
  receives.Commit(std::move(plan), 1);
  REQUIRE_RAISES("ValueError", "finish or cancel that first", table.Fork(0, 1, 9));
  table.CancelReceive(&table.At(0));
  table.CheckIntegrity();
  for (const int64_t count : {20, 80}) {
    receives.Commit(receives.Acquire(&table.At(0), count), 2);
    table.CheckIntegrity();
    table.FinishReceive(&table.At(0));
    table.CheckIntegrity();
    if (count == 20) {
      table.Fork(0, 1, 9);
      REQUIRE_EQ(table.At(1).pages[0], (Pages{1, 2}));
    } else {  // positions in between were never there
      REQUIRE_RAISES("ValueError", "have been reclaimed", table.Fork(0, 2, 9));
    }
    table.CheckIntegrity();
  }
}

}  // namespace

}  // namespace pagedkv::sequence_history_test
