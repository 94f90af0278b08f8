// SPDX-License-Identifier: Apache-2.0
/*!
 * \file recurrent_world.h
 * \brief Random sequences of a model with recurrent layers, and what their states should be.
 *
 * A token's ingredients are the token, and a state is a hash of all tokens up to its position, so
 * one that is computed from a wrong state, or from wrong slots, differs. The recurrence is carried
 * out as kernels do it, from the arrays of the step, with the pages of a step written as it goes.
 */
#ifndef TVM_PAGEDKV_TESTS_RECURRENT_WORLD_H_
#define TVM_PAGEDKV_TESTS_RECURRENT_WORLD_H_

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "random_text.h"
#include "recurrent_text.h"
#include "state/plans/commit_plan.h"
#include "state/plans/forward_plan.h"
#include "state/plans/plan_arrays.h"
#include "state/table/sequence_table.h"
#include "tier_fixture.h"

namespace pagedkv::recurrent_states_test {

constexpr int64_t kMaxSequences = 5, kMaxLength = 90, kInterval = 8;
constexpr int32_t kPageSize = 4, kAttention = 0, kIngredients = 1, kConv = 2, kNumGroups = 3;
constexpr int64_t kNumTaps = 3;

class World {
 public:
  World(uint64_t seed, int32_t num_pages, int32_t num_ingredients, int32_t num_states,
        TierSetup setup = {}, bool has_windows = false)
      : engine_(seed),
        table_(kMaxSequences, kPageSize, {num_pages, num_ingredients, num_ingredients},
               {0, 0, kNumTaps + 1}, {{kIngredients, kInterval}}, {num_states}),
        plan_(&table_, 1 << 20),
        slots_(kNumGroups + 1,
               Contents(std::max({num_pages, num_ingredients, num_states}) * kPageSize, 7)),
        tier_(setup, kPageSize, &slots_, &engine_),
        has_windows_(has_windows),
        has_tier_(setup.num_slots > 0),
        has_store_(setup.has_store) {
    if (has_tier_) table_.prefixes().SetHostMemory(tier_.tier(), &tier_, setup.policy, "a model");
  }

  void Do() {
    if (has_store_) tier_.Work(static_cast<int>(Below(4)));
    try {
      const auto id = static_cast<int64_t>(Below(kMaxSequences));
      if (!texts_.count(id)) {
        Add(id);
      } else if (has_windows_ && Below(12) == 0) {
        SetWindow(id);
      } else {
        switch (Below(12)) {
          case 0:
            Remove(id);
            break;
          case 1:
          case 2:
            Fork(id);
            break;
          case 3:
          case 4:
            Pop(id);
            break;
          case 5:
          case 6:
            StepTree(id);
            break;
          case 7:
            Commit(id);
            break;
          default:
            StepMany();
        }
      }
    } catch (const Error& error) {
      const std::string message = error.what();
      if (message.find("have been reclaimed") != std::string::npos) {
        ++num_refused_;
      } else {
        REQUIRE_NE(message.find("are available"), std::string::npos);
        if (!texts_.empty()) Remove(texts_.begin()->first);  // make room
      }
    }
    table_.CheckIntegrity();
  }

  void Clear() {
    table_.Clear();
    table_.CheckIntegrity();
    for (int32_t p = 0; p < kNumGroups + 1; ++p) {
      REQUIRE_EQ(table_.pool(p).num_free(), table_.pool(p).num_pages());
    }
  }

  int64_t num_replayed() const { return num_replayed_; }
  int64_t num_rows() const { return num_rows_; }
  int64_t num_refused() const { return num_refused_; }
  int64_t num_dropped() const { return num_dropped_; }
  int64_t num_reused() const { return table_.prefixes().counts().reused_tokens; }
  const PrefixCache::Counts& counts() const { return table_.prefixes().counts(); }
  int64_t num_reclaimed() const { return table_.pool(kIngredients).num_reclaimed(); }
  bool HasReclaimedState() const { return table_.pool(kNumGroups).num_reclaimed() > 0; }

 private:
  uint64_t Below(uint64_t limit) { return engine_() % limit; }
  uint32_t& StateIn(int32_t page) { return slots_[kNumGroups][page * kPageSize]; }
  int32_t RandomToken() { return static_cast<int32_t>(Below(3)); }

  void Add(int64_t id) {
    RecurrentText text;
    if (Below(3) == 0) {
      table_.Add(id);
    } else {
      Tokens tokens;
      if (!removed_.empty() && Below(5)) {
        tokens = removed_[Below(removed_.size())];
        tokens.resize(Below(tokens.size() + 1));
      }
      for (uint64_t n = Below(4); n > 0; --n) tokens.push_back(RandomToken());
      if (has_store_ && Below(2)) {
        const int64_t ticket = table_.prefixes().Prefetch("", Span(tokens));
        tier_.Work(1 << 20);
        REQUIRE(tier_.tier()->Wait(ticket, 0));
      }
      std::vector<PageLoad> loads;
      const int64_t length = table_.AddWithPrefix(id, "", Span(tokens), &loads);
      REQUIRE(tier_.Load(loads));
      table_.FinishLoads(id, loads);
      tokens.resize(static_cast<size_t>(length));
      text.tokens = tokens;
      text.is_recorded = true;
      text.num_recorded = length;
    }
    texts_[id] = text;
  }

  void Remove(int64_t id) {
    table_.Remove(id);
    removed_.push_back(texts_.at(id).tokens);
    if (removed_.size() > 20) removed_.erase(removed_.begin());
    texts_.erase(id);
  }

  void Fork(int64_t id) {
    const auto child = static_cast<int64_t>(Below(kMaxSequences));
    if (texts_.count(child)) return;
    const RecurrentText& text = texts_.at(id);
    const bool is_end = Below(3) == 0;
    const int64_t position =
        is_end ? text.length() : static_cast<int64_t>(Below(text.length() + 1));
    table_.Fork(id, child, position);
    texts_[child] = text.Fork(position);
  }

  void Pop(int64_t id) {
    RecurrentText& text = texts_.at(id);
    const uint64_t size = text.length() + text.nodes.size();
    const auto count =
        static_cast<int64_t>(Below(2) ? Below(std::min<uint64_t>(size, 16) + 1) : Below(size + 1));
    table_.Pop(id, count);
    text.Pop(count);
  }

  void SetWindow(int64_t id) {
    RecurrentText& text = texts_.at(id);
    SequenceWindow& window = text.window;
    if (window.size > 0 || !text.nodes.empty()) return;
    const auto num_sinks =
        window.num_dropped > 0 ? window.num_sinks : static_cast<int64_t>(Below(8));
    const auto size = num_sinks + 2 + static_cast<int64_t>(Below(20));
    const bool includes_self = Below(2) == 0;
    table_.EnableWindow(id, size, num_sinks, includes_self);
    window = {size, includes_self, num_sinks, window.num_dropped};
    text.is_recorded = false;
    text.num_recorded = 0;
    num_dropped_ += text.Slide();
  }

  void StepMany() {
    std::vector<int64_t> ids, lengths;
    Tokens tokens;
    for (const auto& [id, text] : texts_) {
      if (!text.nodes.empty() || text.tokens.size() >= kMaxLength || Below(3) == 0) continue;
      ids.push_back(id);
      lengths.push_back(static_cast<int64_t>(Below(3) ? 1 : 1 + Below(20)));
      for (int64_t n = 0; n < lengths.back(); ++n) tokens.push_back(RandomToken());
    }
    if (!ids.empty()) Step(ids, lengths, tokens, std::nullopt);
  }

  void StepTree(int64_t id) {
    const RecurrentText& text = texts_.at(id);
    if (text.nodes.size() > 12 || text.window.IsSet()) return;
    std::vector<int64_t> parents;
    Tokens tokens;
    for (uint64_t n = 1 + Below(6); n > 0; --n) {
      const auto num_nodes = static_cast<int64_t>(text.nodes.size() + parents.size());
      parents.push_back(Below(3) ? num_nodes - 1 : static_cast<int64_t>(Below(num_nodes + 1)) - 1);
      tokens.push_back(RandomToken());
    }
    Step({id}, {static_cast<int64_t>(tokens.size())}, tokens, parents);
  }

  /*! \brief The state of a row of the sequence, of its node or of a position. */
  uint32_t Expected(const RecurrentText& text, const Tokens& own, int64_t row, bool is_tree) const {
    uint32_t state = 0;
    for (int32_t token : text.tokens) state = Next(state, token);
    const int64_t first_own = static_cast<int64_t>(text.nodes.size() - own.size());
    const Tokens path =
        is_tree ? text.PathTo(first_own + row) : Tokens(own.begin(), own.begin() + row + 1);
    for (int32_t token : path) state = Next(state, token);
    return state;
  }

  void Step(const std::vector<int64_t>& ids, const std::vector<int64_t>& lengths,
            const Tokens& tokens, const std::optional<std::vector<int64_t>>& parents) {
    std::optional<IntSpan> span;
    if (parents) span = IntSpan{parents->data(), parents->size()};
    plan_.Prepare({ids.data(), ids.size()}, {lengths.data(), lengths.size()}, span);
    plan_.Acquire();
    if (Below(12) == 0) return plan_.Release();
    for (const PageCopy& copy : plan_.copies()) {
      for (int32_t i = 0; i < copy.length; ++i) {
        slots_[copy.group][copy.destination * kPageSize + i] =
            slots_[copy.group][copy.source * kPageSize + i];
      }
    }
    const PlanArrays arrays(plan_);
    const auto num_rows = static_cast<size_t>(plan_.num_rows());
    for (int32_t g = 0; g < kNumGroups; ++g) {
      std::vector<int32_t> slots(num_rows);
      arrays.FillSlots(g, slots.data());
      for (size_t row = 0; row < num_rows; ++row)
        slots_[g][slots[row]] = static_cast<uint32_t>(tokens[row]);
    }
    // What the tokens should give, with those of the step.
    std::vector<uint32_t> expected;
    std::vector<Tokens> befores;  // of each row, the tokens before it
    size_t first = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      RecurrentText text = texts_.at(ids[i]);
      const Tokens own(tokens.begin() + first, tokens.begin() + first + lengths[i]);
      first += lengths[i];
      if (parents) {
        text.nodes.insert(text.nodes.end(), own.begin(), own.end());
        text.parents.insert(text.parents.end(), parents->begin(), parents->end());
      }
      for (int64_t row = 0; row < lengths[i]; ++row) {
        expected.push_back(Expected(text, own, row, parents.has_value()));
        Tokens before = text.tokens;
        if (parents) {
          const auto node = static_cast<int64_t>(text.nodes.size()) - lengths[i] + row;
          const Tokens path = text.PathTo(text.parents[node]);
          before.insert(before.end(), path.begin(), path.end());
        } else {
          before.insert(before.end(), own.begin(), own.begin() + row);
        }
        befores.push_back(before);
      }
    }
    CheckStates(arrays, ids.size(), expected);
    CheckTaps(arrays, befores);
    plan_.Commit();
    if (Below(6) == 0) {
      plan_.Abort();
      return;
    }
    first = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      RecurrentText& text = texts_.at(ids[i]);
      Tokens& list = parents ? text.nodes : text.tokens;
      list.insert(list.end(), tokens.begin() + first, tokens.begin() + first + lengths[i]);
      if (parents) text.parents.insert(text.parents.end(), parents->begin(), parents->end());
      first += lengths[i];
      num_dropped_ += text.Slide();
      if (!text.is_recorded || parents) continue;
      const Tokens fresh(text.tokens.begin() + text.num_recorded, text.tokens.end());
      table_.prefixes().Record(plan_.SequenceToRecord(static_cast<int64_t>(i)), Span(fresh));
      text.num_recorded = static_cast<int64_t>(text.tokens.size());
    }
    plan_.Finish();
  }

  void CheckStates(const PlanArrays& arrays, size_t num_sequences,
                   const std::vector<uint32_t>& expected) {
    std::vector<int32_t> segment_indptr(num_sequences + 1),
        row_indptr(arrays.NumStateSegments(0) + 1), slots(arrays.NumStateRows(0)),
        rows(slots.size()), read_pages(row_indptr.size() - 1), write_pages(read_pages.size());
    arrays.FillStates(0, {segment_indptr.data(), row_indptr.data(), slots.data(), rows.data(),
                          read_pages.data(), write_pages.data()});
    REQUIRE_EQ(segment_indptr.back(), static_cast<int32_t>(read_pages.size()));
    REQUIRE_EQ(row_indptr.back(), static_cast<int32_t>(rows.size()));
    // Sequences run at the same time, so none reads what another one writes: any order will do.
    std::vector<size_t> order(num_sequences);
    for (size_t i = 0; i < num_sequences; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), engine_);
    std::vector<int> num_outputs(expected.size(), 0);
    for (size_t i : order) {
      for (int32_t s = segment_indptr[i]; s < segment_indptr[i + 1]; ++s) {
        uint32_t state = read_pages[s] < 0 ? 0 : StateIn(read_pages[s]);
        for (int32_t n = row_indptr[s]; n < row_indptr[s + 1]; ++n) {
          state = Next(state, static_cast<int32_t>(slots_[kIngredients][slots[n]]));
          ++(rows[n] < 0 ? num_replayed_ : num_rows_);
          if (rows[n] < 0) continue;
          ++num_outputs[rows[n]];
          REQUIRE_EQ(state, expected[rows[n]]);
        }
        StateIn(write_pages[s]) = state;
      }
    }
    for (int count : num_outputs) REQUIRE_EQ(count, 1);
  }

  void CheckTaps(const PlanArrays& arrays, const std::vector<Tokens>& befores) const {
    std::vector<int32_t> taps(befores.size() * kNumTaps);
    arrays.FillTaps(kConv, kNumTaps, taps.data());
    for (size_t row = 0; row < befores.size(); ++row) {
      const Tokens& before = befores[row];
      for (int64_t tap = 0; tap < kNumTaps; ++tap) {
        const int32_t slot = taps[row * kNumTaps + tap];
        const int64_t at = static_cast<int64_t>(before.size()) - kNumTaps + tap;
        if (at < 0) {
          REQUIRE_EQ(slot, -1);
        } else {
          REQUIRE_EQ(slots_[kConv][slot], static_cast<uint32_t>(before[at]));
        }
      }
    }
  }

  void Commit(int64_t id) {
    RecurrentText& text = texts_.at(id);
    if (text.nodes.empty()) return;
    const int64_t leaf = static_cast<int64_t>(Below(text.nodes.size() + 1)) - 1;
    CommitPlan commit(&table_);
    commit.Prepare({&id, 1}, {&leaf, 1});
    commit.Acquire();
    for (const PageCopy& copy : commit.copies()) {
      for (int32_t i = 0; i < copy.length; ++i) {
        slots_[copy.group][copy.destination * kPageSize + i] =
            slots_[copy.group][copy.source * kPageSize + i];
      }
    }
    for (int32_t g = 0; g < kNumGroups; ++g) {
      std::vector<int32_t> moves(2 * commit.num_moves());
      commit.FillMoves(g, moves.data());
      for (int64_t i = 0; i < commit.num_moves(); ++i) {
        slots_[g][moves[commit.num_moves() + i]] = slots_[g][moves[i]];
      }
    }
    commit.Commit();
    const Tokens path = text.PathTo(leaf);
    text.tokens.insert(text.tokens.end(), path.begin(), path.end());
    text.nodes.clear();
    text.parents.clear();
    if (!text.is_recorded || Below(2)) return;
    // Before a step has computed the states of these positions.
    const Tokens fresh(text.tokens.begin() + text.num_recorded, text.tokens.end());
    table_.prefixes().Record(&table_.At(id), Span(fresh));
    table_.prefixes().AddPages(&table_.At(id));
    text.num_recorded = static_cast<int64_t>(text.tokens.size());
  }

  std::mt19937_64 engine_;
  SequenceTable table_;
  ForwardPlan plan_;
  std::vector<Contents> slots_;  // [pool][slot]; a state is in the first slot of its page
  TestTier tier_;
  std::map<int64_t, RecurrentText> texts_;
  std::vector<Tokens> removed_;
  bool has_windows_, has_tier_, has_store_;
  int64_t num_dropped_ = 0;  // by windows of sequences
  int64_t num_replayed_ = 0, num_rows_ = 0, num_refused_ = 0;
};

}  // namespace pagedkv::recurrent_states_test

#endif  // TVM_PAGEDKV_TESTS_RECURRENT_WORLD_H_
