// SPDX-License-Identifier: Apache-2.0
/*!
 * \file fuzz_sequence_table.cc
 * \brief Operations on sequences, steps, token trees and windows, decoded from bytes, against a
 * list of tokens for each sequence.
 *
 * Slots of pages hold tokens here, so that a page that was not copied, was copied too late or was
 * given away twice shows as a wrong token of some sequence. No token is written twice, so what a
 * lookup by tokens reuses must hold just these. Some steps end without some of their layers: such
 * rows, and what was computed from them, must never be found.
 *
 * Some worlds have recurrent layers, whose states are hashes of the tokens before a position.
 *
 * Two worlds do the same. In one, steps advance where they can; in the other each step is planned
 * anew. All arrays and all of the state must be equal.
 */
#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bytes.h"
#include "drawn_step.h"
#include "expected_tokens.h"
#include "hashed_states.h"
#include "paged_tokens.h"
#include "state/plans/commit_plan.h"
#include "state/plans/forward_plan.h"
#include "state/sequences/sequence_table.h"
#include "step_arrays_copy.h"
#include "table_state.h"

namespace pagedkv {

namespace {

constexpr int64_t kMaxSequences = 6, kMaxId = 8, kChunk = 12;
constexpr int64_t kMaxNewPages = 8;  // until the arrays of a batch are written anew

class World {
 public:
  World(const Sizes& sizes, bool advances)
      : table_(kMaxSequences, sizes.page_size, sizes.num_pages, sizes.windows, sizes.state_groups,
               sizes.num_states),
        plan_(&table_, kChunk),
        advances_(advances),
        pages_(&table_, sizes),
        states_(&table_, sizes) {
    for (int32_t g = 0; g < table_.num_groups(); ++g) {
      // Caches share no pages in groups with a window.
      if (sizes.num_pages[g] % 2 && !table_.geometry().HasWindow(g))
        plan_.SharePrefixes(g, /*min_saved_positions=*/2);
    }
  }

  bool operator==(const World& other) const {
    return StateOf(table_) == StateOf(other.table_) && arrays_ == other.arrays_;
  }

  void Apply(Bytes* bytes) {
    const TableState before = StateOf(table_);
    const auto expected = expected_;
    try {
      Draw(bytes);
    } catch (const Error& error) {
      FUZZ_CHECK(StateOf(table_) == before);
      const bool is_reclaimed = std::string(error.what()).find("reclaimed") != std::string::npos;
      FUZZ_CHECK(!is_reclaimed || HasReclaimed() || states_.is_used());  // a hit takes few states
      expected_ = expected;
    }
    Check();
  }

 private:
  bool HasReclaimed() const {
    for (int32_t p = 0; p < table_.geometry().num_pools(); ++p) {
      if (table_.pool(p).num_reclaimed() > 0) return true;
    }
    return false;
  }

  void Draw(Bytes* bytes) {
    const int64_t id = bytes->Around(0, kMaxId);
    switch (bytes->Between(0, 17)) {
      case 0:
        table_.Add(id);
        expected_[id] = {};
        break;
      case 1:
        table_.Remove(id);
        expected_.erase(id);
        break;
      case 2:
        Fork(id, bytes);
        break;
      case 3:
        Pop(id, bytes);
        break;
      case 4:
        Overwrite(id, bytes);
        break;
      case 5:
        if (bytes->Next() % 8 == 0) {
          table_.Clear();
          expected_.clear();
        } else {
          for (int32_t p = 0; p < table_.geometry().num_pools(); ++p)
            table_.pool(p).ShuffleFree(id);
        }
        break;
      case 6:
        Commit(bytes);
        break;
      case 7:
      case 8:
        Record(id, bytes);
        break;
      case 9:
        AddLike(id, bytes);
        break;
      case 10:
        EnableWindow(id, bytes);
        break;
      case 11:
      case 12:
        Step(bytes);
        break;
      case 16:
        Hint(bytes);
        break;
      default:
        StepAgain(bytes);
    }
  }

  int64_t LengthOf(int64_t id) const {
    auto it = expected_.find(id);
    return it == expected_.end() ? 0 : static_cast<int64_t>(it->second.all.size());
  }
  int64_t NumNodesOf(int64_t id) const {
    auto it = expected_.find(id);
    return it == expected_.end() ? 0 : static_cast<int64_t>(it->second.parents.size());
  }

  void Fork(int64_t parent, Bytes* bytes) {
    const int64_t child = bytes->Around(0, kMaxId);
    const int64_t position = bytes->Around(-1, std::min<int64_t>(LengthOf(parent), 200));
    table_.Fork(parent, child, position);
    Tokens tokens = expected_.at(parent);
    if (position != -1) tokens.Truncate(position);
    FUZZ_CHECK(tokens.parents.empty());
    tokens.num_held = 0;
    expected_[child] = std::move(tokens);
  }

  void EnableWindow(int64_t id, Bytes* bytes) {
    const int64_t size = bytes->Around(1, 24), num_sinks = bytes->Around(0, 6);
    const bool includes_self = bytes->Next() % 2;
    if (states_.is_used()) return;  // caches do not allow both
    table_.EnableWindow(id, size, num_sinks, includes_self);
    Tokens& tokens = expected_.at(id);
    tokens.num_held = size - (includes_self ? 1 : 0);
    tokens.num_sinks = num_sinks;
    tokens.Slide();
  }

  void Pop(int64_t id, Bytes* bytes) {
    const int64_t count = bytes->Around(0, std::min<int64_t>(LengthOf(id), 24));
    table_.Pop(id, count);
    Tokens& tokens = expected_.at(id);
    tokens.Truncate(tokens.all.size() - count);
  }

  void Commit(Bytes* bytes) {
    std::vector<int64_t> ids, leaves;
    const int64_t batch = bytes->Between(0, 3);
    for (int64_t i = 0; i < batch; ++i) {
      ids.push_back(bytes->Around(0, kMaxId));
      leaves.push_back(bytes->Around(-1, std::min<int64_t>(NumNodesOf(ids.back()) - 1, 200)));
    }
    const bool fails = bytes->Next() % 4 == 0;
    CommitPlan plan(&table_);
    plan.Prepare({ids.data(), ids.size()}, {leaves.data(), leaves.size()});
    plan.Acquire();
    pages_.Copy(plan.copies());
    if (fails) return plan.Release();
    for (int32_t g = 0; g < table_.num_groups(); ++g) {
      std::vector<int32_t> moves(2 * static_cast<size_t>(plan.num_moves()));
      plan.FillMoves(g, moves.data());
      pages_.Move(g, moves);
    }
    plan.Commit();
    for (size_t i = 0; i < ids.size(); ++i) expected_.at(ids[i]).Commit(leaves[i]);
  }

  /*! \brief Does what debug_set_kv does; the copies may fail. */
  void Overwrite(int64_t id, Bytes* bytes) {
    Sequence& sequence = table_.At(id);
    if (sequence.length == 0 || states_.is_used()) return;  // states would not follow
    const int64_t begin = bytes->Next() % sequence.length;
    const int64_t end = begin + 1 + bytes->Next() % (sequence.length - begin);
    const bool fails = bytes->Next() % 4 == 0;
    table_.RequireKept(sequence, begin);
    CopyOnWrite copies(&table_);
    copies.Acquire(&sequence, begin, end);
    pages_.Copy(copies.copies());
    if (fails) return copies.Release(/*were_made=*/true);
    copies.Commit();
    copies.Overwrite(sequence, begin, end);
    table_.prefixes().Drop(&sequence);
    table_.NoteWritten(&sequence, begin, end);
    for (int64_t position = begin; position < end; ++position) {
      expected_.at(id).all[position] = ++last_token_;
      for (int32_t g = 0; g < table_.num_groups(); ++g) {
        pages_.Of(sequence, g, position) = last_token_;
      }
    }
  }

  /*! \brief Records tokens, sometimes more than there are. */
  void Record(int64_t id, Bytes* bytes) {
    Sequence& sequence = table_.At(id);
    std::vector<int32_t> tokens = expected_.at(id).all;
    tokens.erase(tokens.begin(), tokens.begin() + table_.prefixes().NumRecorded(sequence));
    tokens.resize(std::min<size_t>(tokens.size() + 1, bytes->Next()));
    table_.prefixes().Record(&sequence, {tokens.data(), static_cast<int64_t>(tokens.size())});
    table_.prefixes().AddPages(&sequence);
    texts_.push_back(expected_.at(id).all);
  }

  /*! \brief A text that begins like one that was there once. */
  std::vector<int32_t> DrawText(Bytes* bytes) {
    std::vector<int32_t> tokens = texts_[bytes->Next() % texts_.size()];
    tokens.resize(std::min<size_t>(tokens.size(), bytes->Next()));
    for (int64_t n = bytes->Between(0, 2); n > 0; --n) tokens.push_back(0);
    return tokens;
  }

  /*! \brief Gives or ends a hint, or lets time pass. */
  void Hint(Bytes* bytes) {
    PrefixHints& hints = table_.prefixes().hints();
    const int64_t what = bytes->Between(0, 7), number = bytes->Around(0, 100);
    if (what == 0) {
      hints.Release(number);
    } else if (what == 1) {
      hints.Expire(now_ += bytes->Next());
    } else if (!texts_.empty()) {
      const std::vector<int32_t> tokens = DrawText(bytes);
      const TokenSpan text{tokens.data(), static_cast<int64_t>(tokens.size())};
      const int64_t expiry = bytes->Next() % 2 ? now_ + 1 + bytes->Next() : PrefixHints::kNever;
      if (what == 2) {
        FUZZ_CHECK(table_.prefixes().Demote("", text, bytes->Next() % 2) >= 0);
      } else if (what < 5) {
        hints.Pin("", text, expiry);
      } else {
        hints.Retain("", text, number, expiry);
      }
    }
  }

  /*! \brief Adds a sequence whose prompt begins like a text that was there once. */
  void AddLike(int64_t id, Bytes* bytes) {
    if (texts_.empty()) return;
    std::vector<int32_t> tokens = DrawText(bytes);
    const std::string salt = bytes->Next() % 8 == 0 ? "salt" : "";
    const TokenSpan prompt{tokens.data(), static_cast<int64_t>(tokens.size())};
    const int64_t length = table_.AddWithPrefix(id, salt, prompt);
    FUZZ_CHECK(length <= std::max<int64_t>(prompt.size - 1, 0));
    tokens.resize(length);
    for (int32_t token : tokens) FUZZ_CHECK(!absent_.IsTainted(token));
    Tokens added;
    added.all = std::move(tokens);
    expected_[id] = std::move(added);
  }

  /*! \brief Records the tokens of the rows of a step, of sequences whose tokens are all known. */
  void RecordStep(const std::vector<int64_t>& ids, const std::vector<int64_t>& lengths) {
    int32_t token = last_token_;
    for (size_t i = 0; i < ids.size(); ++i) {
      std::vector<int32_t> tokens;
      for (int64_t n = 0; n < lengths[i]; ++n) tokens.push_back(++token);
      Sequence& sequence = *plan_.SequenceToRecord(static_cast<int64_t>(i));
      const bool is_next = table_.prefixes().NumRecorded(sequence) == plan_.PastLength(i);
      if (!is_next || sequence.window.IsSet()) continue;
      table_.prefixes().Record(&sequence, {tokens.data(), lengths[i]});
      texts_.push_back(expected_.at(ids[i]).all);
      texts_.back().insert(texts_.back().end(), tokens.begin(), tokens.end());
    }
  }

  void Step(Bytes* bytes) {
    const DrawnStep step(bytes, kMaxId, kChunk, [this](int64_t id) { return NumNodesOf(id); });
    RunStep(step.ids, step.lengths, step.parents, bytes);
  }

  /*! \brief Some steps of the sequences of the last one, with nothing in between. */
  void StepAgain(Bytes* bytes) {
    std::vector<int64_t> ids;
    for (int64_t id : last_ids_) {
      if (expected_.count(id)) ids.push_back(id);
    }
    if (ids.empty()) return AddBatch(bytes);
    const std::vector<int64_t> lengths(ids.size(), 1);
    RunStep(ids, lengths, std::nullopt, bytes);
    try {
      for (int64_t n = bytes->Between(0, 7); n > 0; --n) RunStep(ids, lengths, std::nullopt, bytes);
    } catch (const Error&) {  // it changes nothing: the state is that after the steps before
    }
  }

  void AddBatch(Bytes* bytes) {
    last_ids_.clear();
    for (int64_t id = bytes->Between(0, 4); id >= 0; --id) {
      last_ids_.push_back(id);
      if (expected_.count(id)) continue;
      table_.Add(id);
      expected_[id] = {};
    }
  }

  void RunStep(const std::vector<int64_t>& ids, const std::vector<int64_t>& lengths,
               const std::optional<std::vector<int64_t>>& parents, Bytes* bytes) {
    const int64_t end = bytes->Between(0, 15);  // most steps end well
    const uint8_t skipping_groups = end == 2 ? bytes->Next() | 1 << bytes->Next() % 3 : 0;
    const bool has_trees = parents.has_value();
    const IntSpan all_ids{ids.data(), ids.size()}, all_lengths{lengths.data(), lengths.size()};
    if (has_trees) {
      plan_.Prepare(all_ids, all_lengths, IntSpan{parents->data(), parents->size()});
    } else if (!advances_ || !plan_.Advance(all_ids, all_lengths)) {
      plan_.Prepare(all_ids, all_lengths);
    }
    plan_.Acquire();
    pages_.Copy(plan_.copies());
    if (end == 0) return plan_.Release();  // as after a failed copy

    std::vector<uint32_t> found;  // the state behind each row, where the recurrent layer is called
    const bool is_left_out = skipping_groups >> std::max(table_.num_groups() - 1, 0) & 1;
    if (states_.is_used() && !is_left_out) found = states_.Scan(plan_, &pages_, last_token_ + 1);
    last_ids_ = ids;
    arrays_.Fill(plan_, table_.num_groups());
    if (!plan_.is_advanced()) plan_.AllowAdvance(kMaxNewPages);
    plan_.Commit();
    arrays_.FillPast(plan_, table_.num_groups());
    if (!has_trees && bytes->Next() % 2) RecordStep(ids, lengths);
    if (bytes->Next() % 2) table_.CheckIntegrity(/*has_slid=*/false);
    if (end == 1) {  // an aborted step, whose kernels have written their rows
      for (int32_t g = 0; g < table_.num_groups(); ++g) {
        for (int32_t slot : arrays_.slots(g)) pages_.At(g, slot) = -1;
      }
      return plan_.Abort();
    }
    const bool is_written = end != 2;  // else a layer of some groups, or of none, is left out
    size_t row = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      Tokens& tokens = expected_.at(ids[i]);
      for (int64_t n = 0; n < lengths[i]; ++n, ++row) {
        const int64_t parent = has_trees ? (*parents)[row] : -1;
        absent_.Add(++last_token_, is_written, tokens, parent);
        if (states_.is_used()) {
          states_.Add(last_token_, tokens.Before(parent, has_trees));
          const bool is_right = !found.empty() && found[row] == states_.Of(last_token_);
          FUZZ_CHECK(is_right || absent_.IsTainted(last_token_));
        }
        tokens.all.push_back(last_token_);
        if (has_trees) tokens.parents.push_back(parent);
        for (int32_t g = 0; g < table_.num_groups(); ++g) {
          const bool is_skipped = skipping_groups >> g & 1;
          pages_.At(g, arrays_.slots(g)[row]) = is_skipped ? -1 : last_token_;
        }
      }
      tokens.Slide();
    }
    plan_.Finish(is_written);
  }

  void Check() const {
    table_.CheckIntegrity();  // what it throws ends the process
    FUZZ_CHECK(table_.num_sequences() == static_cast<int64_t>(expected_.size()));
    for (const auto& [id, tokens] : expected_) {
      const Sequence& sequence = table_.At(id);
      FUZZ_CHECK(sequence.length == static_cast<int64_t>(tokens.all.size()));
      FUZZ_CHECK(sequence.tree.size() == static_cast<int64_t>(tokens.parents.size()));
      FUZZ_CHECK(tokens.has_dropped == (sequence.window.num_dropped > 0));
      for (int64_t i = 0; i < sequence.length; ++i) {
        const bool is_marked = sequence.window.TextPosition(i) >= sequence.first_unwritten;
        FUZZ_CHECK(is_marked || !absent_.IsTainted(tokens.all[i]));
      }
      states_.Visit(sequence, tokens.all, [this](int32_t token, uint32_t state) {
        FUZZ_CHECK(state == states_.Of(token) || absent_.IsTainted(token));
      });
      for (int32_t g = 0; g < table_.num_groups(); ++g) {
        for (int64_t i = table_.geometry().FirstPosition(sequence, g); i < sequence.length; ++i) {
          const int32_t held = pages_.Of(sequence, g, i);
          FUZZ_CHECK(held == tokens.all[i] || absent_.IsUnwritten(tokens.all[i]));
        }
      }
    }
  }

  SequenceTable table_;
  ForwardPlan plan_;
  bool advances_;
  StepArraysCopy arrays_;               // of the last step
  std::vector<int64_t> last_ids_;       // of its sequences
  std::map<int64_t, Tokens> expected_;  // by sequence
  PagedTokens pages_;
  HashedStates states_;
  std::vector<std::vector<int32_t>> texts_;  // whose pages may be found
  AbsentRows absent_;
  int32_t last_token_ = 0;
  int64_t now_ = 0;  // the clock of hints
};

}  // namespace

}  // namespace pagedkv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  pagedkv::Bytes bytes(data, size);
  const pagedkv::Sizes sizes(&bytes);
  pagedkv::World world(sizes, /*advances=*/true), planned(sizes, /*advances=*/false);
  while (!bytes.empty()) {
    pagedkv::Bytes same = bytes;
    world.Apply(&bytes);
    planned.Apply(&same);
    FUZZ_CHECK(world == planned);
  }
  return 0;
}
