// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sequence_history_random_test.cc
 * \brief Random forks, pops, steps and writes with windows: whatever is held has the right tokens.
 *
 * Slots of pages hold tokens. Where the pool never runs short every fork and pop works; where it
 * does, each works or says that pages have been reclaimed.
 */
#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "state/plans/forward_plan.h"
#include "state/plans/plan_arrays.h"
#include "state/table/sequence_table.h"

namespace pagedkv::sequence_history_random_test {

namespace {

constexpr int64_t kMaxSequences = 6, kMaxLength = 90;
constexpr int32_t kPageSize = 4;

class World {
 public:
  // Groups with windows have pools of their own size: also such that copies find no room.
  World(uint64_t seed, int32_t num_windowed, int32_t num_whole)
      : engine_(seed),
        table_(kMaxSequences, kPageSize, {num_windowed, num_whole, num_windowed},
               seed % 2 == 0 ? std::vector<int64_t>{3, 0, 9} : std::vector<int64_t>{-6, 0, 9}),
        plan_(&table_, 1 << 20),
        slots_(3, std::vector<int32_t>(std::max(num_windowed, num_whole) * kPageSize, 0)) {}

  void Do() {
    const int64_t id = static_cast<int64_t>(Below(kMaxSequences));
    if (!texts_.count(id)) {
      table_.Add(id);
      texts_[id] = {};
    }
    try {
      switch (Below(12)) {
        case 0:
          table_.Remove(id);
          texts_.erase(id);
          break;
        case 1:
        case 2:
          Fork(id);
          break;
        case 3:
          Pop(id);
          break;
        case 4:
        case 5:
        case 6:
          Overwrite(id);
          break;
        default:
          Step(id);
      }
    } catch (const Error& error) {
      const std::string text = error.what();
      const bool is_reclaimed = text.find("have been reclaimed") != std::string::npos;
      REQUIRE((is_reclaimed || text.find("are available") != std::string::npos));
      REQUIRE((!is_reclaimed || num_reclaimed() > 0));
      num_reclaimed_errors += is_reclaimed;
      if (!is_reclaimed) {  // make room
        table_.Remove(id);
        texts_.erase(id);
      }
    }
    table_.CheckIntegrity();
    Check();
  }

  int64_t num_reclaimed() const {
    int64_t total = 0;
    for (int32_t g = 0; g < table_.num_groups(); ++g) total += table_.pool(g).num_reclaimed();
    return total;
  }

  int num_further_back = 0, num_reclaimed_errors = 0;

 private:
  using Text = std::vector<int32_t>;

  uint64_t Below(uint64_t limit) { return engine_() % limit; }

  void Fork(int64_t parent) {
    const auto child = static_cast<int64_t>(Below(kMaxSequences));
    if (texts_.count(child)) {
      if (child == parent) return;
      table_.Remove(child);
      texts_.erase(child);
    }
    Text text = texts_.at(parent);
    text.resize(Below(text.size() + 1));
    table_.Fork(parent, child, static_cast<int64_t>(text.size()));
    num_further_back += table_.At(child).first_pages[0] < table_.At(parent).first_pages[0];
    texts_[child] = std::move(text);
  }

  void Pop(int64_t id) {
    Text& text = texts_.at(id);
    const uint64_t count = Below(text.size() + 1);
    const int64_t first = table_.At(id).first_pages[0];
    table_.Pop(id, static_cast<int64_t>(count));
    num_further_back += table_.At(id).first_pages[0] < first;
    text.resize(text.size() - count);
  }

  void Overwrite(int64_t id) {
    Sequence& sequence = table_.At(id);
    int64_t begin = 0;
    for (int32_t g : {0, 2}) begin = std::max(begin, table_.geometry().FirstPosition(sequence, g));
    if (begin >= sequence.length) return;
    begin += static_cast<int64_t>(Below(sequence.length - begin));
    CopyOnWrite copies(&table_);
    copies.Acquire(&sequence, begin, sequence.length);
    Copy(copies.copies());
    copies.Commit();
    copies.Overwrite(sequence, begin, sequence.length);
    for (int64_t position = begin; position < sequence.length; ++position) {
      texts_.at(id)[position] = ++last_token_;
      for (int32_t g = 0; g < 3; ++g) slots_[g][SlotOf(sequence, g, position)] = last_token_;
    }
  }

  void Step(int64_t id) {
    std::vector<int64_t> ids, lengths;
    for (const auto& [other, text] : texts_) {
      if (other != id && Below(2)) continue;
      const auto room = kMaxLength - static_cast<int64_t>(text.size());
      if (room < 1) continue;
      ids.push_back(other);
      lengths.push_back(1 + static_cast<int64_t>(Below(std::min<int64_t>(room, 12))));
    }
    if (ids.empty()) return;
    plan_.Prepare({ids.data(), ids.size()}, {lengths.data(), lengths.size()});
    plan_.Acquire();
    Copy(plan_.copies());
    if (Below(8) == 0) return plan_.Release();
    std::vector<std::vector<int32_t>> slots(3, std::vector<int32_t>(plan_.num_rows()));
    for (int32_t g = 0; g < 3; ++g) PlanArrays(plan_).FillSlots(g, slots[g].data());
    plan_.Commit();
    const bool is_aborted = Below(8) == 0;
    size_t row = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      for (int64_t n = 0; n < lengths[i]; ++n, ++row) {
        ++last_token_;
        if (!is_aborted) texts_.at(ids[i]).push_back(last_token_);
        for (int32_t g = 0; g < 3; ++g) slots_[g][slots[g][row]] = last_token_;
      }
    }
    is_aborted ? plan_.Abort() : plan_.Finish();
  }

  void Copy(const std::vector<PageCopy>& copies) {
    for (const PageCopy& copy : copies) {
      auto source = slots_[copy.group].begin() + copy.source * kPageSize;
      std::copy_n(source, copy.length, slots_[copy.group].begin() + copy.destination * kPageSize);
    }
  }

  int32_t SlotOf(const Sequence& sequence, int32_t group, int64_t position) const {
    const int64_t index = position / kPageSize - sequence.first_pages[group];
    return static_cast<int32_t>(sequence.pages[group][index] * kPageSize + position % kPageSize);
  }

  void Check() const {
    for (const auto& [id, text] : texts_) {
      const Sequence& sequence = table_.At(id);
      REQUIRE_EQ(sequence.length, static_cast<int64_t>(text.size()));
      for (int32_t g = 0; g < 3; ++g) {
        const int64_t first = table_.geometry().FirstPosition(sequence, g);
        Text held;
        for (int64_t i = first; i < sequence.length; ++i) {
          held.push_back(slots_[g][SlotOf(sequence, g, i)]);
        }
        REQUIRE_EQ(held, Text(text.begin() + first, text.end()));
      }
    }
  }

  std::mt19937_64 engine_;
  SequenceTable table_;
  ForwardPlan plan_;
  std::map<int64_t, Text> texts_;
  std::vector<std::vector<int32_t>> slots_;  // tokens by group and slot
  int32_t last_token_ = 0;
};

TEST_CASE("sequence history random: random texts") {
  for (const int32_t num_pages : {17, 20, 24, 40, 5000}) {
    int num_further_back = 0, num_reclaimed_errors = 0;
    const int num_seeds = num_pages < 5000 ? 30 : 2;
    for (int seed = 0; seed < num_seeds; ++seed) {
      CAPTURE(seed);
      CAPTURE(num_pages);
      World world(seed, num_pages, 4 * num_pages);
      for (int i = 0; i < 500; ++i) world.Do();
      num_further_back += world.num_further_back;
      num_reclaimed_errors += world.num_reclaimed_errors;
    }
    REQUIRE(num_further_back > num_seeds);
    REQUIRE_EQ(num_reclaimed_errors > num_seeds, num_pages < 5000);
    REQUIRE((num_reclaimed_errors == 0 || num_pages < 5000));
  }
}

}  // namespace

}  // namespace pagedkv::sequence_history_random_test
