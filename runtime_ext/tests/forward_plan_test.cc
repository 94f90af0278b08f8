// SPDX-License-Identifier: Apache-2.0
/*!
 * \file forward_plan_test.cc
 * \brief A batch is checked before it changes anything, laid out as CSR arrays, and undone exactly.
 */
#include "state/plans/forward_plan.h"

#include <limits>
#include <vector>

#include "check.h"
#include "state/plans/plan_arrays.h"

namespace pagedkv::forward_plan_test {

namespace {

using Ids = std::vector<int64_t>;
using Ints = std::vector<int32_t>;

void Prepare(ForwardPlan* plan, const Ids& ids, const Ids& lengths) {
  plan->Prepare({ids.data(), ids.size()}, {lengths.data(), lengths.size()});
}

void Step(ForwardPlan* plan, const Ids& ids, const Ids& lengths) {
  Prepare(plan, ids, lengths);
  plan->Acquire();
  plan->Commit();
}

TEST_CASE("forward plan: errors") {
  SequenceTable table(4, 4, {4});
  ForwardPlan plan(&table, 12);
  table.Add(0);
  table.Add(1);
  REQUIRE_RAISES("ValueError", "got 2 ids and 1 lengths", Prepare(&plan, {0, 1}, {1}));
  REQUIRE_RAISES("ValueError", "at least one sequence", Prepare(&plan, {}, {}));
  REQUIRE_RAISES("KeyError", "no sequence 2", Prepare(&plan, {0, 2}, {1, 1}));
  REQUIRE_RAISES("ValueError", "sequence 0 is twice", Prepare(&plan, {0, 1, 0}, {1, 1, 1}));
  REQUIRE_RAISES("ValueError", "at least 1, got 0", Prepare(&plan, {0}, {0}));
  REQUIRE_RAISES("ValueError", "at least 1, got -1", Prepare(&plan, {0, 1}, {2, -1}));
  REQUIRE_RAISES("ValueError", "prefill_chunk_size (12)", Prepare(&plan, {0, 1}, {6, 7}));
  const int64_t huge = std::numeric_limits<int64_t>::max();
  REQUIRE_RAISES("ValueError", "prefill_chunk_size (12)", Prepare(&plan, {0, 1}, {huge, huge}));
  Step(&plan, {0}, {12});
  REQUIRE_RAISES("CacheFullError",
                 "needs 2 pages, but 1 of 4 are available; most are held by sequence 0 (3)",
                 Prepare(&plan, {1}, {5}));
  Step(&plan, {1}, {4});
  table.CheckIntegrity();
}

TEST_CASE("forward plan: arrays") {
  SequenceTable table(4, 4, {16});
  ForwardPlan plan(&table, 64);
  for (int64_t id : {0, 1, 2}) table.Add(id);
  Step(&plan, {0, 1}, {6, 4});  // pages 0 1, 2
  Prepare(&plan, {1, 2, 0}, {1, 5, 3});
  plan.Acquire();  // 3, 4 5, 6
  REQUIRE_EQ(plan.num_rows(), 9);
  REQUIRE(!plan.is_decode());
  REQUIRE_EQ(PlanArrays(plan).NumPages(0, PageRange::kWithStep), 7);
  REQUIRE_EQ(PlanArrays(plan).NumPages(0, PageRange::kPast), 3);

  Ints indptr(4), positions(9), past(3), page_indptr(4), values(7), last(3), slots(9);
  PlanArrays(plan).FillQueryIndptr(indptr.data());
  REQUIRE_EQ(indptr, (Ints{0, 1, 6, 9}));
  PlanArrays(plan).FillQueryPositions(positions.data());
  REQUIRE_EQ(positions, (Ints{4, 0, 1, 2, 3, 4, 6, 7, 8}));
  PlanArrays(plan).FillPastLengths(past.data());
  REQUIRE_EQ(past, (Ints{4, 0, 6}));
  PlanArrays(plan).FillPageIndptr(0, PageRange::kWithStep, page_indptr.data());
  REQUIRE_EQ(page_indptr, (Ints{0, 2, 4, 7}));
  PlanArrays(plan).FillPageIds(0, PageRange::kWithStep, values.data());
  REQUIRE_EQ(values, (Ints{2, 3, 4, 5, 0, 1, 6}));
  PlanArrays(plan).FillLastPageLengths(PageRange::kWithStep, last.data());
  REQUIRE_EQ(last, (Ints{1, 1, 1}));
  PlanArrays(plan).FillSlots(0, slots.data());
  REQUIRE_EQ(slots, (Ints{12, 16, 17, 18, 19, 20, 6, 7, 24}));

  plan.Commit();
  table.CheckIntegrity();
  PlanArrays(plan).FillPageIndptr(0, PageRange::kPast, page_indptr.data());
  REQUIRE_EQ(page_indptr, (Ints{0, 1, 1, 3}));
  values.resize(3);
  PlanArrays(plan).FillPageIds(0, PageRange::kPast, values.data());
  REQUIRE_EQ(values, (Ints{2, 0, 1}));
  PlanArrays(plan).FillLastPageLengths(PageRange::kPast, last.data());
  REQUIRE_EQ(last, (Ints{4, 0, 2}));
}

TEST_CASE("forward plan: copy on write") {
  SequenceTable table(4, 4, {16, 16});
  ForwardPlan plan(&table, 64);
  table.Add(0);
  Step(&plan, {0}, {6});
  table.Fork(0, 1, -1);
  table.Fork(0, 2, 5);

  const Ints free_before = table.pool(1).free_pages();
  Prepare(&plan, {1, 2}, {1, 1});  // page 1 keeps sequence 0 as its owner: both copy
  plan.Acquire();
  REQUIRE_EQ(plan.copies().size(), 4u);
  REQUIRE_EQ(plan.copies()[0].source, 1);
  REQUIRE_EQ(plan.copies()[0].length, 2);
  REQUIRE_EQ(plan.copies()[1].length, 1);
  plan.Release();
  REQUIRE(table.pool(1).free_pages() == free_before);
  table.CheckIntegrity();

  Prepare(&plan, {2, 0, 1}, {1, 1, 1});  // all write: the last of the longest need not copy
  plan.Acquire();
  REQUIRE_EQ(plan.copies().size(), 4u);
  REQUIRE_EQ(plan.copies()[0].sequence->id, 2);
  REQUIRE_EQ(plan.copies()[1].sequence->id, 0);
  plan.Commit();
  plan.Finish();
  REQUIRE_EQ(table.At(1).pages[0], (Ints{0, 1}));
  REQUIRE_EQ(table.pool(0).num_shared(), 1);
  REQUIRE_EQ(table.At(2).length, 6);
  table.CheckIntegrity();

  table.Fork(0, 3, 4);  // at a page boundary nothing is written to a shared page
  Prepare(&plan, {3}, {1});
  plan.Acquire();
  REQUIRE(plan.copies().empty());
  plan.Commit();
  table.CheckIntegrity();
}

TEST_CASE("forward plan: write after pop into a shared page") {
  SequenceTable table(4, 4, {16});
  ForwardPlan plan(&table, 64);
  table.Add(0);
  Step(&plan, {0}, {8});
  table.Fork(0, 1, -1);
  table.Pop(1, 3);
  Prepare(&plan, {1}, {2});
  plan.Acquire();
  REQUIRE_EQ(plan.copies().size(), 1u);
  REQUIRE_EQ(plan.copies()[0].length, 1);
  plan.Commit();
  REQUIRE_EQ(table.At(0).pages[0], (Ints{0, 1}));
  REQUIRE_EQ(table.At(1).pages[0], (Ints{0, 2}));
  table.CheckIntegrity();
}

TEST_CASE("forward plan: arrays of a window") {
  SequenceTable table(4, 4, {16}, {3});  // also keeps 16 positions to pop
  ForwardPlan plan(&table, 64);
  table.Add(0);
  table.Add(1);
  Step(&plan, {0}, {30});
  plan.Finish();          // 30 - 2 - 16 = 12: pages 0 1 2 are cached
  Step(&plan, {1}, {2});  // takes page 8
  plan.Finish();
  table.CheckIntegrity();
  Prepare(&plan, {0, 1}, {3, 1});
  plan.Acquire();  // 9
  REQUIRE_EQ(PlanArrays(plan).NumPages(0, PageRange::kWithStep), 7);
  REQUIRE_EQ(PlanArrays(plan).NumPages(0, PageRange::kPast), 6);
  Ints first(2), indptr(3), values(7), slots(4), positions(4);
  PlanArrays(plan).FillFirstPositions(0, first.data());
  REQUIRE_EQ(first, (Ints{12, 0}));
  PlanArrays(plan).FillPageIndptr(0, PageRange::kWithStep, indptr.data());
  REQUIRE_EQ(indptr, (Ints{0, 6, 7}));
  PlanArrays(plan).FillPageIds(0, PageRange::kWithStep, values.data());
  REQUIRE_EQ(values, (Ints{3, 4, 5, 6, 7, 9, 8}));
  PlanArrays(plan).FillQueryPositions(positions.data());
  REQUIRE_EQ(positions, (Ints{30, 31, 32, 2}));
  PlanArrays(plan).FillSlots(0, slots.data());
  REQUIRE_EQ(slots, (Ints{30, 31, 36, 34}));
  plan.Commit();
  table.CheckIntegrity(/*has_slid=*/false);
  values.resize(6);
  PlanArrays(plan).FillPageIds(0, PageRange::kPast, values.data());
  REQUIRE_EQ(values, (Ints{3, 4, 5, 6, 7, 8}));
  plan.Finish();
  table.CheckIntegrity();
}

TEST_CASE("forward plan: segments") {
  constexpr int32_t kPage = 256;  // two pages are worth a segment for two sequences
  SequenceTable table(4, kPage, {16, 16});
  ForwardPlan plan(&table, 2048);
  plan.SharePrefixes(0);
  table.Add(0);
  Step(&plan, {0}, {3 * kPage + 5});  // pages 0 1 2 3
  table.Fork(0, 1, 2 * kPage + 9);
  table.Fork(0, 2, -1);
  Prepare(&plan, {1, 0, 2}, {1, 2, 1});
  plan.Acquire();  // 4, 5, and sequence 2 keeps page 3
  REQUIRE_EQ(plan.shared_prefix(0).segments().size(), 1u);
  REQUIRE(plan.shared_prefix(1).segments().empty());
  REQUIRE_EQ(PlanArrays(plan).NumSegmentPages(0), 2);
  REQUIRE_EQ(PlanArrays(plan).NumSegmentRows(0), 4);
  REQUIRE_EQ(PlanArrays(plan).NumPages(0, PageRange::kWithStep), 5);
  REQUIRE_EQ(PlanArrays(plan).NumSharedPages(0), 6);
  REQUIRE_EQ(PlanArrays(plan).NumPages(1, PageRange::kWithStep), 11);
  Ints page_indptr(2), values(2), first(1), row_indptr(2), rows(4);
  PlanArrays(plan).FillSegmentPageIndptr(0, page_indptr.data());
  REQUIRE_EQ(page_indptr, (Ints{0, 2}));
  PlanArrays(plan).FillSegmentPageIds(0, values.data());
  REQUIRE_EQ(values, (Ints{0, 1}));
  PlanArrays(plan).FillSegmentFirstPositions(0, first.data());
  REQUIRE_EQ(first, (Ints{0}));
  PlanArrays(plan).FillSegmentRowIndptr(0, row_indptr.data());
  REQUIRE_EQ(row_indptr, (Ints{0, 4}));
  PlanArrays(plan).FillSegmentRows(0, rows.data());
  REQUIRE_EQ(rows, (Ints{1, 2, 3, 0}));  // those first that have page 2 in common as well
  // The tables of the sequences begin after them, also those of the past.
  Ints indptr(4), own(5), positions(3), past(5), slots(4);
  PlanArrays(plan).FillPageIndptr(0, PageRange::kWithStep, indptr.data());
  REQUIRE_EQ(indptr, (Ints{0, 1, 3, 5}));
  PlanArrays(plan).FillPageIds(0, PageRange::kWithStep, own.data());
  REQUIRE_EQ(own, (Ints{4, 2, 5, 2, 3}));
  PlanArrays(plan).FillFirstPositions(0, positions.data());
  REQUIRE_EQ(positions, (Ints{2 * kPage, 2 * kPage, 2 * kPage}));
  PlanArrays(plan).FillFirstPositions(1, positions.data());
  REQUIRE_EQ(positions, (Ints{0, 0, 0}));
  PlanArrays(plan).FillSlots(0, slots.data());
  REQUIRE_EQ(slots, (Ints{4 * kPage + 9, 5 * kPage + 5, 5 * kPage + 6, 3 * kPage + 5}));
  plan.Commit();
  table.CheckIntegrity();
  REQUIRE_EQ(PlanArrays(plan).NumPages(0, PageRange::kPast), 5);
  PlanArrays(plan).FillPageIds(0, PageRange::kPast, past.data());
  REQUIRE_EQ(past, (Ints{4, 2, 5, 2, 3}));

  // Popped back to the end of the shared pages: nothing of the past is left for itself.
  table.Pop(1, 10);
  Prepare(&plan, {0, 1}, {1, 1});
  plan.Acquire();
  REQUIRE_EQ(PlanArrays(plan).NumSegmentPages(0), 2);
  plan.Commit();
  PlanArrays(plan).FillPageIndptr(0, PageRange::kPast, indptr.data());
  REQUIRE_EQ((Ints{indptr[0], indptr[1], indptr[2]}), (Ints{0, 2, 2}));
  Prepare(&plan, {1}, {1});  // alone it shares with nobody
  REQUIRE(plan.shared_prefix(0).segments().empty());
  REQUIRE_EQ(PlanArrays(plan).NumPages(0, PageRange::kWithStep), 3);
}

TEST_CASE("forward plan: trees") {
  SequenceTable table(4, 4, {16});
  ForwardPlan plan(&table, 64);
  for (int64_t id : {0, 1}) table.Add(id);
  Step(&plan, {0, 1}, {6, 2});
  auto prepare = [&](const Ids& ids, const Ids& lengths, const Ids& parents) {
    plan.Prepare({ids.data(), ids.size()}, {lengths.data(), lengths.size()},
                 IntSpan{parents.data(), parents.size()});
  };
  REQUIRE_RAISES("ValueError", "the parent of each of its 3 rows, got 2 parents",
                 prepare({0, 1}, {1, 2}, {-1, -1}));
  REQUIRE_RAISES("ValueError", "node 1 of sequence 1", prepare({0, 1}, {1, 2}, {-1, -1, 1}));
  REQUIRE(table.At(0).tree.empty());

  Ids parents{-1, 0, 1, -1, 0};
  Ids ids{0, 1}, lengths{3, 2};
  plan.Prepare({ids.data(), 2}, {lengths.data(), 2}, IntSpan{parents.data(), 5});
  REQUIRE((plan.has_trees() && !plan.needs_tree_mask()));  // chains
  plan.Acquire();
  plan.Release();
  REQUIRE(table.At(0).tree.empty());

  parents = {-1, 0, 0, -1, 0};
  plan.Prepare({ids.data(), 2}, {lengths.data(), 2}, IntSpan{parents.data(), 5});
  REQUIRE((plan.needs_tree_mask() && !plan.has_earlier_nodes()));
  plan.Acquire();
  Ints positions(5), indptr(3), order(10), past_order(10);
  PlanArrays(plan).FillQueryPositions(positions.data());
  REQUIRE_EQ(positions, (Ints{6, 7, 7, 2, 3}));
  PlanArrays(plan).FillTreeOrderIndptr(indptr.data());
  REQUIRE_EQ(indptr, (Ints{0, 3, 5}));
  PlanArrays(plan).FillTreeOrder(PageRange::kWithStep, order.data());
  REQUIRE_EQ(order, (Ints{0, 3, 1, 2, 2, 3, 0, 2, 1, 2}));
  plan.Commit();
  PlanArrays(plan).FillTreeOrder(PageRange::kPast, past_order.data());
  REQUIRE_EQ(past_order, (Ints{0, 0, 1, 1, 2, 2, 0, 0, 1, 1}));
  table.CheckIntegrity();

  REQUIRE_RAISES("ValueError", "sequence 1 has 2 token tree nodes that are not committed",
                 Prepare(&plan, {1}, {1}));
  ids = {1}, lengths = {1}, parents = {1};
  plan.Prepare({ids.data(), 1}, {lengths.data(), 1}, IntSpan{parents.data(), 1});
  REQUIRE((!plan.needs_tree_mask() && plan.has_earlier_nodes()));  // its tree is still a chain
  REQUIRE_EQ(plan.num_tree_nodes(), 3);
  plan.Acquire();
  positions.resize(1);
  PlanArrays(plan).FillQueryPositions(positions.data());
  REQUIRE_EQ(positions, (Ints{4}));
  plan.Release();
  REQUIRE_EQ(table.At(1).tree.size(), 2);
  table.CheckIntegrity();
}

/*! \brief Slots count the whole text, so the longest text keeps a shared page, not the sequence
 * that holds the most positions. */
TEST_CASE("forward plan: a sequence with a window writes to a shared page") {
  SequenceTable table(4, 16, {8});
  ForwardPlan plan(&table, 64);
  table.Add(0);
  Step(&plan, {0}, {14});
  plan.Finish();
  table.Fork(0, 1, -1);
  table.EnableWindow(1, 6, 0, /*counts_row=*/true);
  table.Pop(0, 1);
  REQUIRE_EQ(table.At(0).length, 13);
  REQUIRE_EQ(table.At(1).length, 5);  // of a text of 14
  for (const Ids& ids : {Ids{0, 1}, Ids{1, 0}}) {
    Prepare(&plan, ids, {1, 1});
    plan.Acquire();
    REQUIRE_EQ(plan.copies().size(), 1u);
    REQUIRE_EQ(plan.copies()[0].sequence->id, 0);
    REQUIRE_EQ(plan.copies()[0].length, 13);
    plan.Release();
  }
  table.CheckIntegrity();
}

/*! \brief Rotations of K count the whole text; the row is one of its window. */
TEST_CASE("forward plan: positions in the text") {
  SequenceTable table(4, 4, {16});
  ForwardPlan plan(&table, 64);
  for (int64_t id : {0, 1}) table.Add(id);
  REQUIRE_RAISES("ValueError", "at least 2 more than its sinks (2)",
                 table.EnableWindow(0, 3, 2, /*includes_self=*/true));
  table.EnableWindow(0, 8, 2, /*includes_self=*/true);
  Step(&plan, {0, 1}, {20, 5});
  plan.Finish();
  table.CheckIntegrity();
  REQUIRE_EQ(table.At(0).length, 7);
  REQUIRE_EQ(table.At(0).window.num_dropped, 13);

  Prepare(&plan, {1, 0}, {1, 3});
  plan.RequireTextPositions();
  plan.Acquire();
  Ints positions(4), windows(6);
  PlanArrays(plan).FillQueryPositions(positions.data());
  REQUIRE_EQ(positions, (Ints{5, 7, 8, 9}));
  PlanArrays(plan).FillTextPositions(positions.data());
  REQUIRE_EQ(positions, (Ints{5, 20, 21, 22}));
  PlanArrays(plan).FillWindows(0, windows.data());
  REQUIRE_EQ(windows[5], 5);  // positions that a row sees besides the sinks and itself
  plan.Release();
  REQUIRE_RAISES("ValueError", "at most 6 rows", {
    Prepare(&plan, {0}, {7});
    plan.RequireRowsSeeEachOther("self_attention");
  });
}

}  // namespace

}  // namespace pagedkv::forward_plan_test
