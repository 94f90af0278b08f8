// SPDX-License-Identifier: Apache-2.0
/*!
 * \file forward_plan_advance_test.cc
 * \brief A decode step that continues the last one: its arrays, and what keeps it from doing so.
 *
 * runtime_ext/fuzz/fuzz_sequence_table.cc compares it with steps that are planned anew.
 */
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "state/plans/commit_plan.h"
#include "state/plans/forward_plan.h"
#include "state/plans/plan_arrays.h"

namespace pagedkv::forward_plan_advance_test {

namespace {

using Ids = std::vector<int64_t>;
using Ints = std::vector<int32_t>;

constexpr int32_t kPage = 4;

/*! \brief Sequences 0, 1 and 2 of 3, 5 and 4 rows; their pages are 0, 1 2 and 3. */
struct Batch {
  SequenceTable table{4, kPage, {16}};
  ForwardPlan plan{&table, 64};
  Ids ids{0, 1, 2}, ones{1, 1, 1};

  Batch() {
    for (int64_t id : ids) table.Add(id);
    const Ids lengths{3, 5, 4};
    plan.Prepare({ids.data(), 3}, {lengths.data(), 3});
    Run();
  }
  void Run() {
    plan.Acquire();
    plan.AllowAdvance(8);
    plan.Commit();
    plan.Finish();
  }
  void Plan() { plan.Prepare({ids.data(), ids.size()}, {ones.data(), ones.size()}); }
  bool Advance() { return plan.Advance({ids.data(), ids.size()}, {ones.data(), ones.size()}); }
};

TEST_CASE("forward plan: the arrays of a step become those of the next") {
  Batch batch;
  batch.Plan();
  batch.Run();  // lengths 4, 6, 5; pages 0, 1 2, 3 4
  REQUIRE(batch.Advance());
  batch.plan.Acquire();
  REQUIRE_EQ(PlanArrays(batch.plan).NumNewPages(), 1);
  Ints positions{3, 5, 4}, past(positions), indptr{0, 1, 3, 5}, ids{0, 1, 2, 3, 4, -1};
  Ints lengths{4, 2, 1}, slots{3, 9, 16};
  const PlanArrays arrays(batch.plan);
  arrays.AdvancePositions(positions.data(), past.data());
  arrays.AdvancePageTable(0, indptr.data(), ids.data());
  arrays.AdvanceLengthsAndSlots(0, lengths.data(), slots.data());
  REQUIRE_EQ(positions, (Ints{4, 6, 5}));
  REQUIRE_EQ(past, (Ints{4, 6, 5}));
  REQUIRE_EQ(indptr, (Ints{0, 2, 4, 6}));
  REQUIRE_EQ(ids, (Ints{0, 5, 1, 2, 3, 4}));
  REQUIRE_EQ(lengths, (Ints{1, 3, 2}));
  REQUIRE_EQ(slots, (Ints{20, 10, 17}));
  REQUIRE_EQ(arrays.NumPages(0, PageRange::kWithStep), 6);
  REQUIRE_EQ(arrays.NumPages(0, PageRange::kPast), 5);
  batch.plan.Commit();
  batch.table.CheckIntegrity();
}

TEST_CASE("forward plan: sequences get their lengths when somebody looks") {
  Batch batch;
  batch.Plan();
  batch.Run();
  for (int i = 0; i < 6; ++i) {
    REQUIRE(batch.Advance());
    batch.Run();
  }
  REQUIRE_EQ(batch.table.total_length(), 12 + 3 * 7);
  REQUIRE_EQ(std::as_const(batch.table).At(1).length, 12);
  REQUIRE(batch.Advance());  // reading is no change
  batch.Run();
  REQUIRE_EQ(batch.plan.SequenceAt(2).length, 12);
  REQUIRE_EQ(batch.table.sequences().at(0).length, 11);
  batch.table.CheckIntegrity();
}

TEST_CASE("forward plan: a step that is aborted or released takes its pages back") {
  for (bool is_committed : {false, true}) {
    Batch batch;
    batch.Plan();
    batch.Run();
    const Ints free = batch.table.pool(0).free_pages();
    REQUIRE(batch.Advance());
    batch.plan.Acquire();
    if (is_committed) batch.plan.Commit();
    is_committed ? batch.plan.Abort() : batch.plan.Release();
    REQUIRE_EQ(batch.table.pool(0).free_pages(), free);
    REQUIRE_EQ(batch.table.At(0).length, 4);
    REQUIRE_EQ(batch.table.total_length(), 15);
    batch.table.CheckIntegrity();
    REQUIRE(!batch.Advance());
    batch.Plan();
    batch.Run();
    batch.table.CheckIntegrity();
  }
}

TEST_CASE("forward plan: what keeps a step from continuing the last one") {
  const int64_t root = -1, zero = 0;
  const std::pair<const char*, std::function<void(Batch*)>> changes[] = {
      {"fork", [](Batch* b) { b->table.Fork(0, 7, -1); }},
      {"pop", [](Batch* b) { b->table.Pop(0, 0); }},
      {"remove", [](Batch* b) { b->table.Remove(1), b->table.Add(1); }},
      {"remove another", [](Batch* b) { b->table.Add(7), b->table.Remove(7); }},
      {"window", [](Batch* b) { b->table.EnableWindow(2, 16, 1); }},
      {"pin", [](Batch* b) { b->table.pins().Pin(0, std::as_const(b->table).At(1).pages[0][1]); }},
      {"access", [](Batch* b) { b->table.At(1); }},
      {"clear", [](Batch* b) { b->table.Clear(), b->ids = {}, b->ones = {}; }},
      {"order", [](Batch* b) { std::swap(b->ids[0], b->ids[1]); }},
      {"other rows", [](Batch* b) { b->ones[1] = 2; }},
      {"fewer", [](Batch* b) { b->ids.pop_back(), b->ones.pop_back(); }},
      {"no room", [](Batch* b) { b->plan.AllowAdvance(0); }},
      {"not allowed", [](Batch* b) { b->plan.AllowAdvance(-1); }},
      {"segments", [](Batch* b) { b->plan.SharePrefixes(0, 1); }},
      {"tree",
       [&](Batch* b) {
         b->plan.Prepare({&zero, 1}, {b->ones.data(), 1}, IntSpan{&root, 1});
         b->Run();
         CommitPlan commit(&b->table);
         commit.Prepare({&zero, 1}, {&root, 1});
         commit.Acquire();
         commit.Commit();
       }},
  };
  for (const auto& [name, change] : changes) {
    INFO(std::string(name));
    Batch batch;
    batch.Plan();
    batch.Run();
    change(&batch);
    REQUIRE(!batch.Advance());
    if (batch.ids.empty()) continue;
    batch.Plan();
    batch.Run();
    batch.table.CheckIntegrity();
    REQUIRE(batch.table.total_length() >= 12);
  }
}

TEST_CASE("forward plan: a page that is pinned meanwhile is copied") {
  Batch batch;
  batch.Plan();
  batch.Run();
  const int32_t page = std::as_const(batch.table).At(1).pages[0].back();
  batch.table.pins().Pin(0, page);
  REQUIRE(!batch.Advance());
  batch.Plan();
  batch.plan.Acquire();
  REQUIRE_EQ(batch.plan.copies().size(), 1);
  REQUIRE_EQ(batch.plan.copies()[0].source, page);
  batch.plan.Commit();
  batch.plan.Finish();
  batch.table.pins().Unpin(0, page);
  batch.table.CheckIntegrity();
}

TEST_CASE("forward plan: a full pool and windows of layers are left to a new plan") {
  Batch batch;
  batch.table.Add(3);
  const int64_t other = 3, rows = 4 * 11;  // all pages but one
  batch.plan.Prepare({&other, 1}, {&rows, 1});
  batch.Run();
  batch.Plan();
  batch.Run();  // takes the last page
  REQUIRE(!batch.Advance());
  REQUIRE_RAISES("CacheFullError", "needs 1 pages, but 0 of 16", batch.Plan());
  batch.table.CheckIntegrity();

  SequenceTable table(4, kPage, {16}, {6});
  ForwardPlan plan(&table, 64);
  table.Add(0);
  const int64_t id = 0, one = 1;
  for (int i = 0; i < 40; ++i) {
    REQUIRE(!plan.Advance({&id, 1}, {&one, 1}));
    plan.Prepare({&id, 1}, {&one, 1});
    plan.Acquire();
    plan.AllowAdvance(8);
    plan.Commit();
    plan.Finish();
  }
  table.CheckIntegrity();
}

}  // namespace

}  // namespace pagedkv::forward_plan_advance_test
