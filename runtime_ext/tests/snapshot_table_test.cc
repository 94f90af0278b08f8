// SPDX-License-Identifier: Apache-2.0
/*!
 * \file snapshot_table_test.cc
 * \brief Random sequences of an RNN state: a page that the table names holds the state of its
 * position, failing calls change nothing, and the newest state of a sequence is never evicted.
 */
#include "rnn/snapshot_table.h"

#include <map>
#include <random>
#include <string>
#include <vector>

#include "check.h"

namespace pagedkv::snapshot_table_test {

namespace {

constexpr int64_t kMaxSequences = 4, kInitial = 0;

/*! \brief A model with the state of every position, and tables whose pages are numbers. */
class World {
 public:
  World(uint64_t seed, int64_t max_history)
      : engine_(seed),
        table_(kMaxSequences, max_history),
        content_(kMaxSequences * max_history, -1) {}

  void Run(int num_calls) {
    for (int i = 0; i < num_calls; ++i) {
      const int64_t id = Draw(6), other = Draw(6);
      switch (Draw(8)) {
        case 0:
          Add(id);
          break;
        case 1:
          Remove(id);
          break;
        case 2:
          Fork(id, other);
          break;
        case 3:
          PopN(id);
          break;
        default:
          Step();
          break;
      }
      Check();
    }
  }

  int num_evicted = 0, num_in_place = 0, num_full = 0;

 private:
  using States = std::map<int64_t, int64_t>;  // position -> state

  int64_t Draw(int64_t bound) { return static_cast<int64_t>(engine_() % bound); }

  /*! \brief Whether the call succeeded; an error has one of the kinds that calls may have. */
  template <typename F>
  bool Try(F call) {
    try {
      call();
      return true;
    } catch (const Error& error) {
      const std::string kind = error.kind();
      REQUIRE((kind == kValueError || kind == kKeyError || kind == kCacheFullError));
      num_full += kind == kCacheFullError;
      return false;
    }
  }

  void Initialize(int32_t page) {
    if (page != SnapshotTable::kNone) content_[page] = kInitial;
  }

  void Add(int64_t id) {
    const bool is_possible = !texts_.count(id) && texts_.size() < kMaxSequences;
    REQUIRE_EQ(Try([&] { Initialize(table_.Add(id)); }), is_possible);
    if (is_possible) texts_[id] = {{0, kInitial}};
  }

  void Remove(int64_t id) {
    REQUIRE_EQ(Try([&] { table_.Remove(id); }), texts_.erase(id) == 1);
  }

  void Fork(int64_t parent, int64_t child) {
    if (!texts_.count(parent)) {
      REQUIRE_FALSE(Try([&] { table_.Fork(parent, child, -1); }));
      return;
    }
    const int64_t length = table_.Length(parent);
    const int64_t position = Draw(2) ? Draw(length + 1) : -1;
    const bool is_kept = table_.CanFork(parent, position);
    num_evicted += !is_kept && texts_[parent].count(position);
    const bool is_possible = is_kept && !texts_.count(child) && texts_.size() < kMaxSequences;
    REQUIRE_EQ(Try([&] { Initialize(table_.Fork(parent, child, position)); }), is_possible);
    if (is_possible) texts_[child] = Cut(texts_[parent], position == -1 ? length : position);
  }

  void PopN(int64_t id) {
    if (!texts_.count(id)) {
      REQUIRE_FALSE(Try([&] { table_.PopN(id, 0); }));
      return;
    }
    const int64_t length = table_.Length(id), count = Draw(length + 2);
    const bool is_possible = count <= length && table_.CanPopN(id, count);
    REQUIRE_EQ(Try([&] { Initialize(table_.PopN(id, count)); }), is_possible);
    if (is_possible) texts_[id] = Cut(texts_[id], length - count);
  }

  static States Cut(States states, int64_t length) {
    states.erase(states.upper_bound(length), states.end());
    REQUIRE_EQ(states.rbegin()->first, length);  // a state that a step has left
    return states;
  }

  void Step() {
    std::vector<int64_t> ids, lengths;
    for (const auto& [id, states] : texts_) {
      if (Draw(3) == 0) continue;
      ids.push_back(id);
      lengths.push_back(1 + Draw(3));
    }
    const bool is_wrong = ids.empty() || Draw(20) == 0;
    if (is_wrong) ids.push_back(ids.empty() ? 9 : ids[0]), lengths.push_back(1);
    const bool has_begun =
        Try([&] { table_.Begin({ids.data(), ids.size()}, {lengths.data(), lengths.size()}); });
    REQUIRE_NE(has_begun, is_wrong);  // there are pages for every step
    if (!has_begun) return;
    const bool is_written = Draw(5) > 0;
    if (!is_written && Draw(2)) return table_.Abort();
    std::vector<int64_t> before, after;
    for (const auto& item : table_.step()) before.push_back(content_[item.read]);
    if (is_written) {
      table_.BeginWrite();
      for (const auto& item : table_.step()) {
        after.push_back(++next_state_);
        content_[item.write] = next_state_;
      }
    } else {
      after = before;
    }
    num_in_place += table_.HasWrittenInPlace();
    if (is_written && !table_.HasWrittenInPlace() && Draw(3) == 0) return table_.Abort();
    table_.End();
    for (size_t i = 0; i < ids.size(); ++i) {
      States& states = texts_[ids[i]];
      REQUIRE_EQ(states.rbegin()->second, before[i]);
      states[states.rbegin()->first + lengths[i]] = after[i];
    }
  }

  void Check() {
    table_.CheckIntegrity();
    REQUIRE_EQ(table_.num_sequences(), static_cast<int64_t>(texts_.size()));
    for (const auto& [id, states] : texts_) {
      REQUIRE_EQ(table_.Length(id), states.rbegin()->first);
      REQUIRE_EQ(content_[table_.Page(id)], states.rbegin()->second);
    }
  }

  std::mt19937_64 engine_;
  SnapshotTable table_;
  std::vector<int64_t> content_;  // of each page
  std::map<int64_t, States> texts_;
  int64_t next_state_ = kInitial;
};

void Begin(SnapshotTable* table, std::vector<int64_t> ids) {
  const std::vector<int64_t> lengths(ids.size(), 1);
  table->Begin({ids.data(), ids.size()}, {lengths.data(), lengths.size()});
}

}  // namespace

TEST_CASE("random sequences of an RNN state") {
  for (int64_t max_history : {1, 2, 3, 6}) {
    int num_evicted = 0, num_in_place = 0, num_full = 0;
    for (uint64_t seed = 0; seed < 60; ++seed) {
      CAPTURE(max_history);
      CAPTURE(seed);
      World world(seed, max_history);
      world.Run(300);
      num_evicted += world.num_evicted;
      num_in_place += world.num_in_place;
      num_full += world.num_full;
    }
    REQUIRE_GT(num_full, 0);
    REQUIRE_GT(num_evicted, 0);
    REQUIRE_EQ(num_in_place > 0, max_history == 1);
  }
}

TEST_CASE("an aborted step that has written nothing evicts nothing") {
  SnapshotTable table(1, 2);
  table.Add(0);
  Begin(&table, {0});
  table.BeginWrite();
  table.End();  // the states at 0 and 1 have a page each
  const int32_t page = table.Page(0);
  Begin(&table, {0});
  REQUIRE_EQ(table.pool().num_cached(), 0);
  table.Abort();
  REQUIRE_EQ(table.Page(0), page);
  REQUIRE_EQ(table.pool().num_cached(), 1);
  REQUIRE_EQ(table.PopN(0, 1), SnapshotTable::kNone);
  table.CheckIntegrity();
}

TEST_CASE("the last owner of a shared page writes in place when there is no other page") {
  SnapshotTable table(2, 1);
  table.Add(0);
  table.Fork(0, 1, -1);
  Begin(&table, {0});
  REQUIRE_NE(table.step()[0].write, table.Page(1));  // sequence 1 is not in the step
  table.Abort();
  Begin(&table, {0, 1});
  REQUIRE_NE(table.step()[0].write, table.step()[0].read);
  REQUIRE_EQ(table.step()[1].write, table.step()[1].read);
  table.BeginWrite();
  REQUIRE(table.HasWrittenInPlace());
  table.End();
  table.CheckIntegrity();
  REQUIRE_NE(table.Page(0), table.Page(1));
}

}  // namespace pagedkv::snapshot_table_test
