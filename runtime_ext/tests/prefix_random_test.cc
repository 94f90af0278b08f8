// SPDX-License-Identifier: Apache-2.0
/*!
 * \file prefix_random_test.cc
 * \brief Random sequences with tokens: what a hit reuses is what its tokens would have computed.
 *
 * The content of a slot stands for K and V: a number that depends on the salt and on all tokens up
 * to its position. While nothing is reclaimed, a hit is as long as the longest text that was added.
 * With tiers, pages come and go in host memory that is too small, and in a store that fails.
 */
#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "random_text.h"
#include "state/plans/forward_plan.h"
#include "state/plans/plan_arrays.h"
#include "state/table/copy_on_write.h"
#include "state/table/sequence_table.h"
#include "tier_fixture.h"

namespace pagedkv::prefix_random_test {

namespace {

constexpr int64_t kMaxSequences = 6, kMaxLength = 60;
constexpr int32_t kPageSize = 4;

class World {
 public:
  World(uint64_t seed, int32_t num_windowed, int32_t num_whole, TierSetup setup = {})
      : setup_(setup),
        engine_(seed),
        table_(kMaxSequences, kPageSize, {num_windowed, num_whole, num_windowed},
               seed % 2 == 0 ? std::vector<int64_t>{3, 0, 9} : std::vector<int64_t>{-6, 0, 9}),
        plan_(&table_, 1 << 20),
        slots_(3, Contents(std::max(num_windowed, num_whole) * kPageSize, 0)),
        tier_(setup, kPageSize, &slots_, &engine_) {
    if (setup_.num_slots > 0) {
      table_.prefixes().SetHostMemory(tier_.tier(), &tier_, setup.policy, "a model");
    }
  }

  void Do() {
    const auto id = static_cast<int64_t>(Below(kMaxSequences));
    if (setup_.has_store) tier_.Work(static_cast<int>(Below(4)));
    if (setup_.has_faults && Below(4) == 0) tier_.Damage();
    try {
      if (!texts_.count(id)) {
        Add(id);
      } else {
        switch (Below(14)) {
          case 0:
          case 1:
          case 2:
            Remove(id);
            break;
          case 3:
            Fork(id);
            break;
          case 4:
            Pop(id);
            break;
          case 5:
            Overwrite(id);
            break;
          case 6:
          case 7:
            Record(id);
            break;
          default:
            Step(id);
        }
      }
    } catch (const Error& error) {
      const std::string message = error.what();
      if (message.find("have been reclaimed") == std::string::npos) {
        REQUIRE_NE(message.find("are available"), std::string::npos);
        Remove(id);  // make room
      }
    }
    table_.CheckIntegrity();
    if (!setup_.has_faults) tier_.tier()->CheckIntegrity();  // damaged keys are no wrong state
    Check();
  }

  void Clear() {
    table_.Clear();
    texts_.clear();
    added_.clear();
    table_.CheckIntegrity();
    for (int32_t g = 0; g < 3; ++g) {
      REQUIRE_EQ(table_.pool(g).num_free(), table_.pool(g).num_pages());
    }
    REQUIRE_EQ(table_.prefixes().tree().num_tokens(), 0);
    table_.ForgetTexts();
    if (setup_.has_store) tier_.Work(1 << 20);
    REQUIRE_EQ(tier_.tier()->counts().num_values, 0);
    REQUIRE_EQ(tier_.tier()->counts().pending_stores, 0);
    tier_.tier()->CheckIntegrity();
  }
  const TestTier& tier() const { return tier_; }
  HostMemory::Counts tier_counts() { return tier_.tier()->counts(); }

  bool HasReclaimed() const {
    bool has = false;
    for (int32_t g = 0; g < 3; ++g) has = has || table_.pool(g).num_reclaimed() > 0;
    return has;
  }
  const PrefixCache::Counts& counts() const { return table_.prefixes().counts(); }

 private:
  uint64_t Below(uint64_t limit) { return engine_() % limit; }

  /*! \brief A text that often begins like another. */
  Tokens RandomTokens() {
    Tokens tokens;
    if (!added_.empty() && Below(4)) {
      tokens = added_[Below(added_.size())].second;
      tokens.resize(Below(tokens.size() + 1));
    }
    for (uint64_t n = Below(12); n > 0; --n) tokens.push_back(static_cast<int32_t>(Below(3)));
    return tokens;
  }

  void Add(int64_t id) {
    Text text;
    if (Below(3) == 0) text.salt = "salt";
    const Tokens tokens = RandomTokens();
    if (setup_.has_store && Below(2)) {
      const int64_t ticket = table_.prefixes().Prefetch(text.salt, Span(tokens));
      if (Below(2)) {
        tier_.Work(1 << 20);
        REQUIRE(tier_.tier()->Wait(ticket, 0));
      }
    }
    const int64_t matched = table_.prefixes().Match(text.salt, Span(tokens));
    if (!setup_.has_faults) CheckPlaces(text.salt, tokens, matched);
    std::vector<PageLoad> loads;
    int64_t length;
    for (;;) {
      length = table_.AddWithPrefix(id, text.salt, Span(tokens), &loads);
      if (!setup_.has_faults) REQUIRE_EQ(length, matched);
      const bool gives_up = Below(16) == 0;
      if (!gives_up && tier_.Load(loads)) break;
      const PrefixCache::Counts before = table_.prefixes().counts();
      table_.CancelLoads(id, loads);
      REQUIRE_EQ(table_.prefixes().counts().lookups, before.lookups - 1);
      REQUIRE_EQ(table_.prefixes().counts().reused_tokens, before.reused_tokens - length);
      if (gives_up) return;
    }
    table_.FinishLoads(id, loads);
    int64_t longest = 0;
    for (const auto& [salt, added] : added_) {
      if (salt != text.salt) continue;
      const size_t size = std::min(added.size(), tokens.size());
      const auto end = std::mismatch(added.begin(), added.begin() + size, tokens.begin()).first;
      longest = std::max<int64_t>(longest, end - added.begin());
    }
    longest = std::max<int64_t>(std::min<int64_t>(longest, tokens.size() - 1), 0);
    REQUIRE(length <= longest);
    if (!HasReclaimed()) REQUIRE_EQ(length, longest);
    for (int64_t i = 0; i < length; ++i) {
      text.contents.push_back(Next(text.last(), tokens[i]));
      text.tokens.push_back(tokens[i]);
    }
    text.num_recorded = static_cast<size_t>(length);
    texts_[id] = text;
  }

  /*! \brief Locate names places of the pages of a hit, and changes nothing. */
  void CheckPlaces(const std::string& salt, const Tokens& tokens, int64_t matched) {
    const auto places = table_.prefixes().Locate(salt, Span(tokens), [](int64_t) { return false; });
    REQUIRE_EQ(places.size(), 3 * (tokens.size() / kPageSize));
    for (int64_t page = 0; page < matched / kPageSize; ++page) {
      const PagePlace place = places[3 * page + 1];  // the group without a window needs every page
      REQUIRE((place == PagePlace::kPool || place == PagePlace::kHost));
      if (setup_.num_slots == 0) REQUIRE(place == PagePlace::kPool);
    }
    REQUIRE_EQ(table_.prefixes().Match(salt, Span(tokens)), matched);
  }

  void Remove(int64_t id) {
    NoteAdded(texts_.at(id), texts_.at(id).num_recorded);
    table_.Remove(id);
    texts_.erase(id);
  }

  void NoteAdded(const Text& text, size_t num_tokens) {
    if (num_tokens == 0) return;
    added_.emplace_back(text.salt, Tokens(text.tokens.begin(), text.tokens.begin() + num_tokens));
  }
  void NotePages(const Text& text) { NoteAdded(text, text.num_recorded / kPageSize * kPageSize); }

  void Fork(int64_t parent) {
    const auto child = static_cast<int64_t>(Below(kMaxSequences));
    if (texts_.count(child)) return;
    Text text = texts_.at(parent);
    const size_t length = Below(text.tokens.size() + 1);
    table_.Fork(parent, child, static_cast<int64_t>(length));
    text.tokens.resize(length);
    text.contents.resize(length);
    text.num_recorded = std::min(text.num_recorded, length);
    texts_[child] = std::move(text);
  }

  void Pop(int64_t id) {
    Text& text = texts_.at(id);
    const size_t length = Below(text.tokens.size() + 1);
    table_.Pop(id, static_cast<int64_t>(text.tokens.size() - length));
    text.tokens.resize(length);
    text.contents.resize(length);
    text.num_recorded = std::min(text.num_recorded, length);
  }

  /*! \brief Does what debug_set_kv does. */
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
    table_.prefixes().Drop(&sequence);
    Text& text = texts_.at(id);
    text.num_recorded = 0;
    text.is_altered = true;
    for (int64_t position = begin; position < sequence.length; ++position) {
      text.contents[position] = static_cast<uint32_t>(engine_());
      for (int32_t g = 0; g < 3; ++g)
        slots_[g][SlotOf(sequence, g, position)] = text.contents[position];
    }
  }

  /*! \brief Records some of the tokens that are not yet recorded; more is an error. */
  void Record(int64_t id) {
    Text& text = texts_.at(id);
    if (text.is_altered || (text.num_recorded == 0 && !text.salt.empty())) return;
    Sequence* sequence = &table_.At(id);
    Tokens more(text.tokens.begin() + text.num_recorded, text.tokens.end());
    more.push_back(1);
    REQUIRE_RAISES("ValueError", "so it takes at most",
                   table_.prefixes().Record(sequence, Span(more)));
    more.resize(Below(more.size()));
    table_.prefixes().Record(sequence, Span(more));
    table_.prefixes().AddPages(sequence);
    text.num_recorded += more.size();
    NotePages(text);
  }

  void Step(int64_t id) {
    std::vector<int64_t> ids, lengths;
    for (const auto& [other, text] : texts_) {
      if (other != id && Below(2)) continue;
      const auto room = kMaxLength - static_cast<int64_t>(text.tokens.size());
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
      Text text = texts_.at(ids[i]);
      const bool is_recorded = text.num_recorded == text.tokens.size() && !text.is_altered &&
                               (text.num_recorded > 0 || text.salt.empty());
      Tokens tokens;
      for (int64_t n = 0; n < lengths[i]; ++n, ++row) {
        tokens.push_back(static_cast<int32_t>(Below(3)));
        text.contents.push_back(Next(text.last(), tokens.back()));
        for (int32_t g = 0; g < 3; ++g) slots_[g][slots[g][row]] = text.contents.back();
      }
      text.tokens.insert(text.tokens.end(), tokens.begin(), tokens.end());
      if (is_recorded) {
        table_.prefixes().Record(&table_.At(ids[i]), Span(tokens));
        text.num_recorded += tokens.size();
      }
      if (is_aborted) continue;
      texts_[ids[i]] = text;
      NotePages(text);
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
      REQUIRE_EQ(sequence.length, static_cast<int64_t>(text.contents.size()));
      REQUIRE_EQ(table_.prefixes().NumRecorded(sequence), static_cast<int64_t>(text.num_recorded));
      for (int32_t g = 0; g < 3; ++g) {
        const int64_t first = table_.geometry().FirstPosition(sequence, g);
        Contents held;
        for (int64_t i = first; i < sequence.length; ++i) {
          held.push_back(slots_[g][SlotOf(sequence, g, i)]);
        }
        REQUIRE_EQ(held, Contents(text.contents.begin() + first, text.contents.end()));
      }
    }
  }

  TierSetup setup_;
  std::mt19937_64 engine_;
  SequenceTable table_;
  ForwardPlan plan_;
  std::map<int64_t, Text> texts_;
  std::vector<std::pair<std::string, Tokens>> added_;  // texts whose pages others may find
  std::vector<Contents> slots_;                        // [group][slot]
  TestTier tier_;
};

TEST_CASE("prefix random: hits have the content of their tokens") {
  for (const int32_t num_pages : {17, 24, 40, 5000}) {
    int64_t num_hits = 0;
    bool has_reclaimed = false;
    const int num_seeds = num_pages < 5000 ? 30 : 8;
    for (int seed = 0; seed < num_seeds; ++seed) {
      CAPTURE(seed);
      CAPTURE(num_pages);
      World world(seed, num_pages, num_pages < 5000 ? 3 * num_pages : num_pages);
      for (int i = 0; i < 600; ++i) world.Do();
      num_hits += world.counts().hits;
      has_reclaimed = has_reclaimed || world.HasReclaimed();
      world.Clear();
    }
    REQUIRE(num_hits > 13 * num_seeds);
    REQUIRE_EQ(has_reclaimed, num_pages < 5000);
  }
}

TEST_CASE("prefix random: tiers") {
  for (const TierWrites writes :
       {TierWrites::kBack, TierWrites::kThrough, TierWrites::kSelective}) {
    for (const bool has_store : {false, true}) {
      for (const bool has_faults : {false, true}) {
        int64_t num_host = 0, num_store = 0, num_damaged = 0, num_evicted = 0;
        const int num_seeds = 12;
        for (int seed = 0; seed < num_seeds; ++seed) {
          CAPTURE(static_cast<int>(writes));
          CAPTURE(has_store);
          CAPTURE(has_faults);
          CAPTURE(seed);
          const TierSetup setup{seed % 2 ? 6 : 40, {writes, 1}, has_store, has_faults};
          const int32_t num_pages = seed % 3 ? 17 : 24;
          World world(seed, num_pages, 3 * num_pages, setup);
          for (int i = 0; i < 500; ++i) world.Do();
          num_host += world.counts().host_tokens;
          num_store += world.counts().store_tokens;
          num_damaged += world.tier_counts().damaged;
          num_evicted += world.tier_counts().evicted;
          world.Clear();
        }
        CAPTURE(static_cast<int>(writes));
        REQUIRE(num_host > 2 * num_seeds);
        REQUIRE(num_evicted > num_seeds + num_seeds / 2);
        REQUIRE_EQ(num_store > 0, has_store);
        REQUIRE_EQ(num_damaged > 0, has_faults);
      }
    }
  }
}

}  // namespace

}  // namespace pagedkv::prefix_random_test
