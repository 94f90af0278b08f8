// SPDX-License-Identifier: Apache-2.0
/*!
 * \file kv_transfer_test.cc
 * \brief Slot maps; receives that are finished, cancelled or used; pages that blocks keep.
 */
#include <limits>
#include <memory>
#include <utility>

#include "check.h"
#include "state/plans/forward_plan.h"
#include "state/table/receives.h"
#include "state/table/sends.h"
#include "state/table/sequence_table.h"

namespace pagedkv::kv_transfer_test {

namespace {

using Numbers = std::vector<int64_t>;

std::vector<SlotRuns> Parse(const Numbers& map, const Numbers& num_slots,
                            const std::vector<bool>& has_window) {
  return ParseSlotMap(map.data(), map.size(), num_slots, has_window).groups;
}

void Step(ForwardPlan* plan, Numbers ids, Numbers lengths) {
  plan->Prepare({ids.data(), ids.size()}, {lengths.data(), lengths.size()});
  plan->Acquire();
  plan->Commit();
  plan->Finish();
}

void BeginReceive(SequenceTable* table, int64_t id, int64_t count) {
  Receives receives(table);
  receives.Commit(receives.Acquire(&table->At(id), count), 1);
  table->CheckIntegrity();
}

TEST_CASE("kv transfer: maps") {
  auto runs = Parse({2, 8, 4, 0, 3}, {16}, {false});
  REQUIRE_EQ(NumPositions(runs[0]), 7);
  REQUIRE_EQ(runs[0][1].slot, 0);
  runs = Parse({1, 4, 6, 2, -1, 2, 0, 4}, {16, 4}, {false, true});
  REQUIRE_EQ(runs[1][0].slot, kNotWanted);

  const int64_t kMax = std::numeric_limits<int64_t>::max();
  auto refuse = [](const char* text, const Numbers& map, bool has_window = false) {
    REQUIRE_RAISES("ValueError", text, Parse(map, {16}, {has_window}));
  };
  refuse("has 0 groups", {});
  refuse("should have 0 runs", {0});
  refuse("should have -1 runs", {-1, 0, 1});
  refuse("should have 2 runs", {2, 0, 1});
  refuse("should have 9223372036854775807 runs", {kMax, 0, 1});
  refuse("1 numbers after", {1, 0, 1, 7});
  refuse("slot 16", {1, 16, 1});
  refuse("slot -1", {1, -1, 1});
  refuse("slot -2", {1, -2, 1}, true);
  refuse("slot -1", {2, 0, 1, -1, 1}, true);
  refuse("a run of 0", {1, 0, 0});
  refuse("a run of -1", {1, 0, -1});
  refuse("a run of 5 slots from 12", {1, 12, 5});
  refuse("a run of 9223372036854775807", {1, 1, kMax});
  refuse("slot 5 twice", {2, 4, 4, 5, 1});
  refuse("more than 2^31 - 1", {2, -1, 0x7fffffff, 0, 1}, true);
  REQUIRE_RAISES("ValueError", "has 1 groups, but the cache has 2",
                 Parse({1, 0, 4}, {16, 16}, {false, false}));
  REQUIRE_RAISES("ValueError", "group 1 has 3 positions, that of group 0 has 4",
                 Parse({1, 0, 4, 1, 0, 3}, {16, 16}, {false, false}));
}

TEST_CASE("kv transfer: receive on a shared page") {
  SequenceTable table(4, 4, {8});
  ForwardPlan plan(&table, 1 << 20);
  table.Add(0);
  Step(&plan, {0}, {6});
  table.Fork(0, 1, -1);
  const std::vector<int32_t> before = table.At(1).pages[0], free = table.pool(0).free_pages();
  Receives receives(&table);
  ReceivePlan receive = receives.Acquire(&table.At(1), 5);
  REQUIRE_EQ(receive.copies.size(), 1u);
  REQUIRE_EQ(receive.copies[0].length, 2);
  receives.Release(receive);
  REQUIRE(table.pool(0).free_pages() == free);
  table.CheckIntegrity();

  BeginReceive(&table, 1, 5);
  REQUIRE_EQ(table.At(1).length, 11);
  REQUIRE(table.At(1).pages[0][1] != before[1]);
  table.Pop(1, 5);  // just what is being received: a cancellation
  REQUIRE(table.At(1).pages[0] == before);
  REQUIRE(table.pool(0).free_pages() == free);
  REQUIRE(table.At(1).receive == nullptr);
  table.CheckIntegrity();

  BeginReceive(&table, 1, 5);
  table.FinishReceive(&table.At(1));
  REQUIRE_EQ(table.pool(0).num_used(), 4);
  table.CheckIntegrity();
  REQUIRE_RAISES("CacheFullError", "needs 5 pages, but 4 of 8", receives.Acquire(&table.At(1), 21));
  REQUIRE_RAISES("ValueError", "at least 1", receives.Acquire(&table.At(1), 0));
  REQUIRE_RAISES("ValueError", "2^31 - 1", receives.Acquire(&table.At(1), 0x7fffffff));
  table.CheckIntegrity();
}

TEST_CASE("kv transfer: receive with a window") {
  SequenceTable table(4, 4, {64, 32}, {0, 6});
  ForwardPlan plan(&table, 1 << 20);
  table.Add(0);
  Step(&plan, {0}, {10});
  const std::vector<int32_t> before = table.At(0).pages[1];
  Receives receives(&table);
  ReceivePlan receive = receives.Acquire(&table.At(0), 90);
  std::vector<SlotRuns> slots = receives.SlotsOf(receive).groups;
  receives.Commit(std::move(receive), 1);
  table.CheckIntegrity();  // the window keeps positions from (95 - 16) / 4 * 4 = 76 on
  REQUIRE_EQ(NumPositions(slots[0]), 90);
  REQUIRE_EQ(slots[1][0].slot, kNotWanted);
  REQUIRE_EQ(slots[1][0].length, 66);
  REQUIRE_EQ(NumPositions(slots[1]), 90);
  REQUIRE_EQ(table.pool(1).num_used(), 3 + 6);
  table.CancelReceive(&table.At(0));
  REQUIRE_EQ(table.At(0).length, 10);
  REQUIRE(table.At(0).pages[1] == before);
  REQUIRE_EQ(table.At(0).first_pages[1], 0);
  table.CheckIntegrity();

  BeginReceive(&table, 0, 90);
  Step(&plan, {0}, {1});  // uses the rows, so they are there
  REQUIRE_EQ(table.pool(1).num_used(), 6);
  BeginReceive(&table, 0, 3);
  table.Fork(0, 1, -1);
  REQUIRE(table.At(0).receive == nullptr);
  BeginReceive(&table, 1, 100);
  table.Remove(1);
  table.Remove(0);
  table.CheckIntegrity();
  REQUIRE_EQ(table.pool(0).num_used() + table.pool(1).num_used(), 0);
}

void Mark(SequenceTable* table, int64_t id, int64_t begin, SlotRuns slots) {
  auto mark = std::make_unique<SendMark>();
  *mark = {1, 0, begin, begin + NumPositions(slots), begin, {slots, slots}, {}};
  Sends(table).RequireSendable(table->At(id), *mark);
  table->At(id).send = std::move(mark);
}

TEST_CASE("kv transfer: send") {
  SequenceTable table(4, 4, {16, 16}, {0, 6});
  ForwardPlan plan(&table, 1 << 20);
  table.Add(0);
  Step(&plan, {0}, {6});
  Mark(&table, 0, 1, {{9, 3}, {20, 4}});
  Sends sends(&table);
  SendBlock block = sends.Plan(table.At(0));  // positions 1 to 5
  REQUIRE_EQ(table.pins().num_pins(), 0);
  REQUIRE_EQ(table.At(0).send->next, 1);
  sends.Commit(block);
  REQUIRE_EQ(block.end, 6);
  REQUIRE_EQ(block.runs[0].size(), 2u);
  REQUIRE_EQ(block.runs[0][0].source, 1);
  REQUIRE_EQ(block.runs[0][0].destination, 9);
  REQUIRE_EQ(block.runs[0][0].length, 3);
  REQUIRE_EQ(block.runs[0][1].destination, 20);
  REQUIRE_EQ(block.runs[0][1].length, 2);
  REQUIRE_EQ(table.pins().num_pins(), 4);
  table.CheckIntegrity();
  table.Pop(0, 1);  // a row that was handed over: the rest is not the same sequence
  REQUIRE(table.At(0).send == nullptr);
  table.Remove(0);
  table.CheckIntegrity();
  REQUIRE_EQ(table.pool(0).num_used(), 2);
  sends.Release(block);
  table.CheckIntegrity();
  REQUIRE_EQ(table.pool(0).num_used() + table.pool(1).num_used(), 0);

  table.Add(1);
  Step(&plan, {1}, {40});
  REQUIRE_RAISES("ValueError", "position 0 of sequence 1 is gone: layers with a window of 6",
                 Mark(&table, 1, 0, {{0, 16}}));
  Mark(&table, 1, 38, {{5, 2}});
  block = sends.Plan(table.At(1));
  sends.Commit(block);
  sends.Release(block);
  REQUIRE(table.At(1).send == nullptr);  // nothing is left to send
  table.CheckIntegrity();
}

/*! \brief A mark for positions from 0 on, whose state is wanted in page 5. */
SendMark MarkWithState(int64_t end, int64_t position) {
  return {1,
          0,
          0,
          end,
          0,
          {{{0, end}}, {{kNotWanted, position}, {0, end - position}}},
          {{5, position}}};
}

TEST_CASE("kv transfer: a state that is not computed yet") {
  SequenceTable table(4, 4, {64, 64}, {}, {{1, 8}}, {6});
  ForwardPlan plan(&table, 1 << 20);
  table.Add(0);
  Step(&plan, {0}, {40});
  table.Add(1);
  Step(&plan, {1}, {24});  // reclaims the states behind 8 and 16 positions
  const Sends sends(&table);
  table.Fork(0, 2, 26);  // from 24
  table.Fork(0, 3, 20);  // from 0
  REQUIRE_EQ(table.At(2).states[0].length, 24);
  REQUIRE_EQ(table.At(3).states[0].length, 0);
  BeginReceive(&table, 3, 16);  // whose state would be behind 16 positions: the sequence has them
  REQUIRE_EQ(table.At(3).first_pages[1], 0);
  table.Pop(3, 16);
  table.CheckIntegrity();
  REQUIRE_RAISES("ValueError",
                 "asks for the state behind 12 positions, but with positions 0 to 26 ",
                 sends.RequireSendable(table.At(3), MarkWithState(26, 12)));
  sends.RequireSendable(table.At(3), MarkWithState(26, 16));  // a later one will do
  sends.RequireSendable(table.At(3), MarkWithState(26, 8));
  table.At(3).send = std::make_unique<SendMark>(MarkWithState(26, 8));
  REQUIRE_EQ(sends.ReadyEnd(table.At(3)), 7);
  REQUIRE(sends.Plan(table.At(3)).runs[2].empty());
  REQUIRE_EQ(sends.FirstToSend(table.At(2), 0, 26), Numbers{0, 24, 24});
  REQUIRE_EQ(sends.FirstToSend(table.At(3), 0, 26), Numbers{0, 8, 8});
  Numbers ids{3}, lengths{6};
  for (int64_t id : {0, 1, 2}) table.Remove(id);
  plan.Prepare({ids.data(), 1}, {lengths.data(), 1});
  plan.Acquire();
  plan.Commit();
  SendBlock block = sends.Plan(table.At(3));
  sends.Commit(block);
  plan.Finish();
  REQUIRE_EQ(block.end, 26);
  REQUIRE_EQ(block.runs[2].size(), 1u);
  REQUIRE_EQ(block.runs[2][0].source, table.states().FindPage(table.At(3), 0, 0));
  REQUIRE_EQ(block.runs[2][0].destination, 5);
  table.CheckIntegrity();
  table.Remove(3);
  REQUIRE_EQ(table.pins().num_pins(), 7 + 5 + 1);
  table.CheckIntegrity();
  sends.Release(block);
  table.CheckIntegrity();

  table.Clear();
  table.Add(0);
  Step(&plan, {0}, {40});
  table.Add(1);
  Step(&plan, {1}, {24});
  table.Fork(0, 3, 20);
  table.At(3).length = 26;  // as if there were no step to come
  REQUIRE_RAISES("ValueError",
                 "the state of recurrent layers behind position 8 of sequence 3 is gone",
                 sends.RequireSendable(table.At(3), MarkWithState(26, 8)));
}

TEST_CASE("kv transfer: receive of a state") {
  SequenceTable table(4, 4, {64, 64}, {}, {{1, 8}}, {8});
  ForwardPlan plan(&table, 1 << 20);
  Receives receives(&table);
  table.Add(0);
  Step(&plan, {0}, {10});
  auto state = [&] {
    const SequenceStates& states = table.At(0).states[0];
    return std::make_pair(states.pages, Numbers{states.length, states.first_page});
  };
  const auto before = state();
  const std::vector<int32_t> pages = table.At(0).pages[1], free = table.pool(2).free_pages();
  for (int64_t count : {5, 13, 14, 40}) {  // states behind 0, 0, 8 and 32 positions
    ReceivePlan plan = receives.Acquire(&table.At(0), count);
    const SlotMap map = receives.SlotsOf(plan);
    const int64_t position = count == 40 ? 32 : 0;
    REQUIRE_EQ(map.states[0].position, position);
    const std::vector<int64_t> numbers = EncodeSlotMap(map);
    const SlotMap parsed =
        ParseSlotMap(numbers.data(), numbers.size(), {256, 256, 8}, {false, true});
    REQUIRE_EQ(parsed.states[0].page, map.states[0].page);
    REQUIRE_EQ(parsed.states[0].position, position);
    receives.Commit(std::move(plan), count);
    table.CheckIntegrity();
    receives.HoldPages(table.At(0));
    table.CheckIntegrity();
    receives.ReleasePages(count);
    table.Pop(0, count);
    REQUIRE(state() == before);
    REQUIRE(table.At(0).pages[1] == pages);
    REQUIRE(table.pool(2).free_pages() == free);
    table.CheckIntegrity();
  }
  BeginReceive(&table, 0, 40);
  REQUIRE_RAISES("ValueError", "while it is receiving", table.Fork(0, 1, 20));
  Step(&plan, {0}, {1});
  REQUIRE_EQ(table.At(0).states[0].length, 51);
  table.Fork(0, 1, 35);
  REQUIRE_RAISES("ValueError", "cannot fork", table.Fork(0, 2, 20));
  table.CheckIntegrity();
  table.Clear();
  REQUIRE_EQ(table.pool(2).num_used(), 0);
}

TEST_CASE("kv transfer: a sender that lacks what could be popped") {
  for (const int64_t begin : {10, 12, 22}) {
    for (const bool is_shared : {false, true}) {
      SequenceTable table(4, 4, {64, 32}, {0, 6});
      ForwardPlan plan(&table, 1 << 20);
      Receives receives(&table);
      table.Add(0);
      Step(&plan, {0}, {begin});
      if (is_shared) table.Fork(0, 1, -1);  // of a last page that is not full, there is a copy
      const std::vector<std::vector<int32_t>> before = table.At(0).pages;
      const std::vector<int64_t> first_pages = table.At(0).first_pages;
      const int32_t num_used = table.pool(1).num_used();
      for (const bool is_cancelled : {true, false}) {
        BeginReceive(&table, 0, 30 - begin);
        receives.HoldPages(table.At(0));
        REQUIRE_RAISES("ValueError", "cannot do without those before 28",
                       receives.Shorten(&table.At(0), {begin, 28}));
        receives.Shorten(&table.At(0), {begin, 24});  // the next row sees position 25
        table.CheckIntegrity();
        REQUIRE_EQ(table.At(0).first_pages[1], 6);
        REQUIRE_EQ(table.At(0).pages[1].size(), 2u);
        receives.ReleasePages(1);
        table.CheckIntegrity();
        if (is_cancelled) {
          table.Pop(0, 30 - begin);
          REQUIRE(table.At(0).pages == before);
          REQUIRE(table.At(0).first_pages == first_pages);
          REQUIRE_EQ(table.pool(1).num_used(), num_used);
        } else {
          table.FinishReceive(&table.At(0));
          REQUIRE_EQ(table.pool(1).num_used(), is_shared ? num_used + 2 : 2);
          REQUIRE_RAISES("ValueError", "have been reclaimed", table.Pop(0, 6));
          Step(&plan, {0}, {7});
        }
        table.CheckIntegrity();
      }
      table.Clear();
      table.CheckIntegrity();
    }
  }
}

TEST_CASE("kv transfer: a later state in place of the receiver's own") {
  SequenceTable table(4, 4, {64, 64}, {}, {{1, 8}}, {8});
  ForwardPlan plan(&table, 1 << 20);
  Receives receives(&table);
  Sends sends(&table);
  table.Add(0);
  Step(&plan, {0}, {10});
  table.Add(1);
  Step(&plan, {1}, {40});
  table.Fork(1, 2, 26);  // has the state behind 24 positions, and the ingredients behind it
  REQUIRE_EQ(sends.FirstToSend(table.At(2), 10, 26), Numbers{10, 24, 24});
  REQUIRE_EQ(sends.FirstToSend(table.At(2), 24, 26), Numbers{24, 24, 0});
  const std::vector<std::vector<int32_t>> before = table.At(0).pages;
  const std::vector<int32_t> states = table.At(0).states[0].pages;
  for (const bool is_cancelled : {true, false}) {
    BeginReceive(&table, 0, 16);
    REQUIRE_RAISES("ValueError", "cannot take the one behind 8",
                   receives.Shorten(&table.At(0), {10, 8, 8}));
    const std::vector<int32_t> pages = receives.Shorten(&table.At(0), {10, 24, 24});
    REQUIRE(pages[0] >= 0);
    table.CheckIntegrity();
    REQUIRE_EQ(table.At(0).states[0].length, 24);
    REQUIRE_EQ(table.At(0).first_pages[1], 6);
    receives.ReleasePages(1);
    if (is_cancelled) {
      table.Pop(0, 16);
      REQUIRE(table.At(0).pages == before);
      REQUIRE(table.At(0).states[0].pages == states);
      REQUIRE_EQ(table.At(0).states[0].length, 10);
    } else {
      table.FinishReceive(&table.At(0));
      REQUIRE_RAISES("ValueError", "have been reclaimed", table.Pop(0, 3));
      Step(&plan, {0}, {7});
    }
    table.CheckIntegrity();
  }
}

}  // namespace

}  // namespace pagedkv::kv_transfer_test
