// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sequence_import_test.cc
 * \brief Imports take pages at once, share them among their sequences, and fail as a whole.
 */
#include <algorithm>
#include <utility>
#include <vector>

#include "check.h"
#include "state/plans/forward_plan.h"
#include "state/table/sequence_imports.h"

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

TEST_CASE("sequence import: pages that a window has left behind become cached") {
  // Recurrent layers with a state every 8 positions, beside a window of 5; sequences of 40.
  const auto make = [](int32_t num_pages, int32_t num_states) {
    return SequenceTable(3, 4, {20, num_pages, num_pages}, {0, 5, 0}, {{2, 8}}, {num_states});
  };
  const std::vector<int64_t> all{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, states{0, 1, 2, 3, 4};
  const ImportedSequence whole{5, 40, {0, 0, 0, 0}, {all, all, all, states}, {40}};
  for (int32_t num_pages = 7; num_pages <= 11; ++num_pages) {
    for (int32_t num_states = 3; num_states <= 6; ++num_states) {
      SequenceTable table = make(num_pages, num_states);
      const SequenceImports imports(&table);
      imports.Begin({whole}, 4);
      table.CheckIntegrity();
      const auto& pages = imports.At(5).pages;
      for (int32_t p = 1; p < 3; ++p) {  // the last ones, as far as there is room
        const int64_t num_left_out = std::count(pages[p].begin(), pages[p].end(), -1);
        REQUIRE_EQ(num_left_out, std::max(10 - num_pages, 0));
        REQUIRE(std::all_of(pages[p].begin(), pages[p].begin() + num_left_out,
                            [](int32_t page) { return page < 0; }));
      }
      imports.Finish(5);
      table.CheckIntegrity();
      REQUIRE_EQ(table.pool(1).num_used(), 5);  // 23 and what is seen from there
      REQUIRE_EQ(table.pool(1).num_cached(), std::min(num_pages, 10) - 5);
      REQUIRE_EQ(table.pool(2).num_used(), 4);  // from 24 on
      if (num_pages >= 10) {
        table.Pop(5, 35);
        table.CheckIntegrity();
        REQUIRE_EQ(table.At(5).length, 5);
        Append(&table, 5, 4);
      } else {
        REQUIRE_RAISES("ValueError", "cannot pop", table.Pop(5, 35));
        table.Pop(5, 16);
      }
      table.CheckIntegrity();
    }
  }
  // What a pop of 16 positions needs must fit.
  for (const auto& [num_pages, num_states] : {std::pair{4, 6}, {11, 2}}) {
    SequenceTable table = make(num_pages, num_states);
    REQUIRE_RAISES("CacheFullError", "the import needs", SequenceImports(&table).Begin({whole}, 4));
    table.CheckIntegrity();
    REQUIRE_EQ(table.num_sequences(), 0);
  }
  // Two sequences that share all but their ends, one of which needs what the other has left behind.
  SequenceTable table = make(12, 8);
  std::vector<int64_t> first(all.begin(), all.begin() + 4);
  first.push_back(10);
  const SequenceImports imports(&table);
  imports.Begin({whole, {6, 20, {0, 0, 0, 0}, {first, first, first, {0, 1, 5}}, {20}}}, 4);
  table.CheckIntegrity();
  imports.Finish(6);
  table.CheckIntegrity();
  table.Pop(5, 30);
  table.Pop(6, 20);
  table.CheckIntegrity();
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
  refuse("ValueError", "from position 16 or an earlier one on",
         {{5, 22, {0, 5}, {{0, 1, 2, 3, 4, 5}, {0}}}});
  refuse("ValueError", "from position 0 or an earlier one on",
         {{5, 22, {1, 0}, {{0, 1, 2, 3, 4}, {0}}}});
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
