// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sequence_import_test.cc
 * \brief Imports take pages at once, share them among their sequences, and fail as a whole.
 */
#include "check.h"
#include "state/plans/forward_plan.h"
#include "state/sequences/sequence_imports.h"

namespace pagedkv::sequence_import_test {

namespace {

void Append(SequenceTable* table, int64_t id, int64_t length) {
  ForwardPlan plan(table, 1 << 20);
  plan.Prepare({&id, 1}, {&length, 1});
  plan.Acquire();
  plan.Commit();
  plan.Finish();
}

TEST_CASE("sequence import: one") {
  SequenceTable table(3, 4, {8, 8}, {0, 5});
  SequenceImports(&table).Begin({{5, 22, {0, 0}, {{0, 1, 2, 3, 4, 5}, {0, 1, 2, 3, 4, 5}}}}, 1);
  table.CheckIntegrity();
  REQUIRE_EQ(table.pool(0).num_used(), 6);
  REQUIRE_EQ(table.total_length(), 22);
  REQUIRE_EQ(SequenceImports(&table).num_importing(), 1);
  REQUIRE_RAISES("ValueError", "being imported", table.At(5));
  REQUIRE_RAISES("ValueError", "being imported", table.Fork(5, 6, -1));
  REQUIRE_RAISES("ValueError", "being imported", table.Pop(5, 1));
  REQUIRE_RAISES("ValueError", "in the cache already", table.Add(5));
  REQUIRE_EQ(SequenceImports(&table).At(5).pages[0], table.Peek(5).pages[0]);
  SequenceImports(&table).Finish(5);
  REQUIRE_RAISES("ValueError", "no import of sequence 5", SequenceImports(&table).Finish(5));
  REQUIRE_RAISES("KeyError", "no sequence 7", SequenceImports(&table).Finish(7));
  Append(&table, 5, 4);
  table.CheckIntegrity();
  REQUIRE_EQ(table.At(5).length, 26);
}

TEST_CASE("sequence import: shared") {
  // Sequence 2 shares a page with each of the others; 3 is empty.
  SequenceTable table(4, 4, {8});
  SequenceImports(&table).Begin({{1, 8, {0}, {{0, 1}}},
                                 {2, 12, {0}, {{0, 2, 3}}},
                                 {4, 9, {0}, {{4, 2, 5}}},
                                 {3, 0, {0}, {{}}}},
                                2);
  table.CheckIntegrity();
  REQUIRE_EQ(table.pool(0).num_used(), 6);
  REQUIRE_EQ(table.pool(0).num_shared(), 2);
  REQUIRE_EQ(SequenceImports(&table).num_importing(), 4);
  REQUIRE_EQ(table.Peek(1).pages[0][0], table.Peek(2).pages[0][0]);
  REQUIRE_EQ(table.Peek(4).pages[0][1], table.Peek(2).pages[0][1]);
  table.Remove(2);  // all of it
  table.CheckIntegrity();
  REQUIRE_EQ(table.num_sequences(), 0);
  REQUIRE_EQ(table.pool(0).num_free(), 8);
}

TEST_CASE("sequence import: errors") {
  SequenceTable table(3, 4, {8, 8}, {0, 5});
  table.Add(1);
  table.Add(2);
  Append(&table, 1, 6);
  auto refuse = [&](const char* kind, const char* text, std::vector<ImportedSequence> imported) {
    std::vector<int32_t> free = table.pool(0).free_pages();
    REQUIRE_RAISES(kind, text, SequenceImports(&table).Begin(imported, 1));
    table.CheckIntegrity();
    REQUIRE_EQ(table.num_sequences(), 2);
    REQUIRE_EQ(SequenceImports(&table).num_importing(), 0);
    REQUIRE(table.pool(0).free_pages() == free);
  };
  using Numbers = std::vector<std::vector<int64_t>>;
  const Numbers one{{0}, {0}};
  refuse("ValueError", "sequence 1 is in the cache", {{3, 4, {0, 0}, one}, {1, 4, {0, 0}, one}});
  refuse("ValueError", "5 is twice", {{5, 4, {0, 0}, one}, {5, 4, {0, 0}, one}});
  refuse("ValueError", "2 is twice", {{2, 4, {0, 0}, one}, {2, 4, {0, 0}, one}});
  refuse("ValueError", "needs 1 pages", {{5, 4, {0, 0}, {{0, 1}, {0}}}});
  refuse("ValueError", "needs 1 pages", {{5, 4, {0, 0}, {{0}, {}}}});
  refuse("ValueError", "has a wrong number: 1", {{5, 4, {0, 0}, {{1}, {0}}}});
  refuse("ValueError", "has a wrong number: -1", {{5, 4, {0, 0}, {{0}, {-1}}}});
  refuse("ValueError", "has a wrong number: 0", {{5, 8, {0, 0}, {{0, 0}, {0, 1}}}});
  refuse("ValueError", "no sequence has page 0",
         {{5, 4, {0, 0}, {{1}, {0}}}, {2, 4, {0, 0}, {{1}, {0}}}});
  refuse("ValueError", "from position 0 to 16 on", {{5, 22, {0, 5}, {{0, 1, 2, 3, 4, 5}, {0}}}});
  refuse("ValueError", "from position 0 to 0 on", {{5, 22, {1, 0}, {{0, 1, 2, 3, 4}, {0}}}});
  const std::vector<int64_t> seven{0, 1, 2, 3, 4, 5, 6};
  refuse("CacheFullError", "the import needs 7 pages, but 6 of 8", {{5, 28, {0, 0}, {seven, {}}}});
  SequenceImports(&table).Begin({{2, 4, {0, 0}, one}}, 1);  // which was there, and empty
  REQUIRE_EQ(SequenceImports(&table).num_importing(), 1);
  table.Clear();
  table.CheckIntegrity();
  REQUIRE_EQ(table.pool(1).num_free(), 8);
}

}  // namespace

}  // namespace pagedkv::sequence_import_test
