// SPDX-License-Identifier: Apache-2.0
/*!
 * \file unwritten_rows_test.cc
 * \brief Rows that a layer left out of its step are never published, nor is what follows them.
 */
#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "check.h"
#include "state/plans/commit_plan.h"
#include "state/plans/forward_plan.h"
#include "state/table/sends.h"
#include "state/table/sequence_table.h"

namespace pagedkv::unwritten_rows_test {

namespace {

using Ids = std::vector<int64_t>;
using Tokens = std::vector<int32_t>;

constexpr int64_t kAllWritten = Sequence::kAllWritten;

Tokens Range(int32_t begin, int32_t end) {
  Tokens tokens;
  for (int32_t token = begin; token < end; ++token) tokens.push_back(token);
  return tokens;
}

TokenSpan Span(const Tokens& tokens) {
  return {tokens.data(), static_cast<int64_t>(tokens.size())};
}

/*! \brief A table with sequence 0, whose token at position i is i, and its steps. */
struct Cache {
  explicit Cache(std::vector<int64_t> windows = {0})
      : table(4, 4, std::vector<int32_t>(windows.size(), 32), windows), plan(&table, 64) {
    table.Add(0);
  }

  void Begin(const Ids& ids, const Ids& lengths, std::optional<IntSpan> parents = std::nullopt) {
    plan.Prepare({ids.data(), ids.size()}, {lengths.data(), lengths.size()}, parents);
    plan.Acquire();
    plan.Commit();
  }
  void End(bool is_written) {
    plan.Finish(is_written);
    table.CheckIntegrity();
  }
  void Step(int64_t id, int64_t count, bool is_written = true) {
    Begin({id}, {count});
    End(is_written);
  }
  /*! \brief Also records the tokens of the rows. */
  void TextStep(int64_t count, bool is_written = true) {
    const int64_t begin = table.At(0).length;
    Begin({0}, {count});
    table.prefixes().Record(&table.At(0), Span(Range(begin, begin + count)));
    End(is_written);
  }
  void TreeStep(const Ids& parents, bool is_written) {
    Begin({0}, {static_cast<int64_t>(parents.size())}, IntSpan{parents.data(), parents.size()});
    End(is_written);
  }
  void Commit(int64_t leaf) {
    const int64_t id = 0;
    CommitPlan commit(&table);
    commit.Prepare({&id, 1}, {&leaf, 1});
    commit.Acquire();
    commit.Commit();
    table.CheckIntegrity();
  }
  /*! \brief Positions that a prompt like the text of sequence 0 reuses. */
  int64_t Match() { return table.prefixes().Match("", Span(Range(0, 60))); }
  int64_t NumRecorded() { return table.prefixes().NumRecorded(table.At(0)); }
  int64_t first_unwritten(int64_t id = 0) { return table.At(id).first_unwritten; }

  SequenceTable table;
  ForwardPlan plan;
};

TEST_CASE("unwritten rows: not found by their tokens") {
  for (int64_t window : {0, 3}) {
    Cache cache({0, window});
    cache.TextStep(6);
    cache.TextStep(5, /*is_written=*/false);
    REQUIRE_EQ(cache.table.At(0).length, 11);
    REQUIRE_EQ(cache.first_unwritten(), 6);
    REQUIRE_EQ(cache.NumRecorded(), 6);
    REQUIRE_EQ(cache.Match(), 4);
    REQUIRE_RAISES("ValueError", "the row at position 6; pop the sequence back to length 6",
                   cache.table.prefixes().Record(&cache.table.At(0), Span(Range(6, 7))));
    cache.Step(0, 20);  // rows that were computed from those
    REQUIRE_EQ(cache.first_unwritten(), 6);
    REQUIRE_RAISES("ValueError", "left out the row at position 6",
                   cache.table.prefixes().Record(&cache.table.At(0), Span(Range(6, 31))));
    cache.table.Remove(0);
    cache.table.CheckIntegrity();
    REQUIRE_EQ(cache.Match(), 6);
  }
}

TEST_CASE("unwritten rows: popped, they are written again") {
  for (int64_t length : {6, 3, 0}) {
    Cache cache;
    cache.TextStep(6);
    cache.TextStep(5, /*is_written=*/false);
    cache.table.Pop(0, 4);
    REQUIRE_EQ(cache.first_unwritten(), 6);
    cache.table.Pop(0, 7 - length);
    REQUIRE_EQ(cache.first_unwritten(), kAllWritten);
    cache.table.CheckIntegrity();
    cache.TextStep(20);
    REQUIRE_EQ(cache.Match(), (length + 20) / 4 * 4);
  }
  Cache cache;  // the first of several such steps counts
  cache.Step(0, 5);
  cache.Step(0, 1, /*is_written=*/false);
  cache.Step(0, 1, /*is_written=*/false);
  REQUIRE_EQ(cache.first_unwritten(), 5);
  cache.Begin({0}, {1});
  cache.plan.Abort();
  REQUIRE_EQ(cache.first_unwritten(), 5);
  for (const auto& [begin, end, first] :
       std::vector<std::array<int64_t, 3>>{{0, 5, 5}, {6, 7, 5}, {3, 6, 6}, {6, 7, kAllWritten}}) {
    cache.table.NoteWritten(&cache.table.At(0), begin, end);
    REQUIRE_EQ(cache.first_unwritten(), first);
  }
  cache.Step(0, 1, /*is_written=*/false);
  cache.table.Remove(0);
  cache.table.Add(0);
  REQUIRE_EQ(cache.first_unwritten(), kAllWritten);
}

TEST_CASE("unwritten rows: forks") {
  Cache cache;
  cache.TextStep(6);
  cache.Step(0, 5, /*is_written=*/false);
  cache.table.Fork(0, 1, 6);
  cache.table.Fork(0, 2, 7);
  cache.table.Fork(2, 3, -1);
  REQUIRE_EQ(cache.first_unwritten(1), kAllWritten);
  REQUIRE_EQ(cache.first_unwritten(2), 6);
  REQUIRE_EQ(cache.first_unwritten(3), 6);
  cache.table.CheckIntegrity();
}

TEST_CASE("unwritten rows: token trees") {
  const Ids written{-1, 0, 0}, unwritten{1, 2, 3};  // nodes 3 and 5 follow 1, and 4 follows 2
  for (int64_t leaf = -1; leaf < 6; ++leaf) {
    Cache cache;
    cache.Step(0, 2);
    cache.TreeStep(written, /*is_written=*/true);
    cache.TreeStep(unwritten, /*is_written=*/false);
    REQUIRE_EQ(cache.first_unwritten(), 5);
    cache.Commit(leaf);
    REQUIRE_EQ(cache.first_unwritten(), leaf < 3 ? kAllWritten : 4);
  }
  Cache cache;  // positions before the tree
  cache.Step(0, 2, /*is_written=*/false);
  cache.TreeStep(written, /*is_written=*/true);
  cache.Commit(2);
  REQUIRE_EQ(cache.table.At(0).length, 4);
  REQUIRE_EQ(cache.first_unwritten(), 0);
  cache.TreeStep(written, /*is_written=*/false);
  cache.table.Pop(0, 7);
  REQUIRE_EQ(cache.first_unwritten(), kAllWritten);
}

TEST_CASE("unwritten rows: windows of sequences count the text") {
  Cache cache;
  cache.table.EnableWindow(0, 8, 2);
  cache.Step(0, 20);  // holds 8
  cache.Step(0, 1, /*is_written=*/false);
  REQUIRE_EQ(cache.first_unwritten(), 20);
  cache.Step(0, 3);
  REQUIRE_EQ(cache.table.At(0).length, 8);
  cache.table.Fork(0, 1, 4);
  cache.table.Fork(0, 2, 5);
  REQUIRE_EQ(cache.first_unwritten(1), kAllWritten);
  REQUIRE_EQ(cache.first_unwritten(2), 20);
  cache.table.Pop(0, 3);
  REQUIRE_EQ(cache.first_unwritten(), 20);
  cache.table.Pop(0, 1);
  REQUIRE_EQ(cache.first_unwritten(), kAllWritten);
  cache.table.CheckIntegrity();
}

TEST_CASE("unwritten rows: not sent") {
  Cache cache;
  cache.Step(0, 6);
  Sends sends(&cache.table);
  Sequence& sequence = cache.table.At(0);
  sequence.send = std::make_unique<SendMark>(SendMark{1, 1, 0, 9, 0, {{{0, 9}}}});
  sends.RequireSendable(sequence, *sequence.send);
  SendBlock block = sends.Plan(sequence);
  sends.Commit(block);
  REQUIRE_EQ(block.end, 6);
  sends.Release(block);
  cache.Step(0, 1, /*is_written=*/false);
  cache.Step(0, 4);
  REQUIRE_EQ(sequence.publishable_length(), 6);
  REQUIRE_RAISES("ValueError", "sequence 0 cannot be sent: a step that ended without all layers",
                 sends.RequireSendable(sequence, *sequence.send));
  sends.RequireSendable(sequence, {2, 1, 0, 6, 0, {{{0, 6}}}});  // rows before it

  cache.table.Pop(0, 5);  // the send goes on where it was
  REQUIRE(sequence.send != nullptr);
  cache.Step(0, 4);
  block = sends.Plan(sequence);
  sends.Commit(block);
  REQUIRE_EQ(block.begin, 6);
  REQUIRE_EQ(block.end, 9);
  sends.Release(block);
  cache.table.CheckIntegrity();
}

}  // namespace

}  // namespace pagedkv::unwritten_rows_test
