// SPDX-License-Identifier: Apache-2.0
/*!
 * \file stepped_tokens.h
 * \brief A sequence table, the tokens that its sequences must hold, and the steps that add them.
 */
#ifndef TVM_PAGEDKV_FUZZ_STEPPED_TOKENS_H_
#define TVM_PAGEDKV_FUZZ_STEPPED_TOKENS_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "base/error.h"
#include "bytes.h"
#include "drawn_step.h"
#include "expected_tokens.h"
#include "hashed_states.h"
#include "paged_tokens.h"
#include "state/plans/forward_plan.h"
#include "state/table/sequence_table.h"
#include "step_arrays_copy.h"

namespace pagedkv {

class SteppedTokens {
 public:
  explicit SteppedTokens(const Sizes& sizes)
      : table_(kMaxSequences, sizes.page_size, sizes.num_pages, sizes.windows, sizes.state_groups,
               sizes.num_states),
        plan_(&table_, kChunk),
        pages_(&table_, sizes),
        states_(&table_, sizes) {
    for (int32_t g = 0; g < table_.num_groups(); ++g) {
      // Caches share no pages in groups with a window.
      if (sizes.num_pages[g] % 2 && !table_.geometry().HasWindow(g))
        plan_.SharePrefixes(g, /*min_saved_positions=*/2);
    }
  }

 protected:
  static constexpr int64_t kMaxSequences = 6, kMaxId = 8, kChunk = 12;

  int64_t LengthOf(int64_t id) const {
    auto it = expected_.find(id);
    return it == expected_.end() ? 0 : static_cast<int64_t>(it->second.all.size());
  }
  int64_t NumNodesOf(int64_t id) const {
    auto it = expected_.find(id);
    return it == expected_.end() ? 0 : static_cast<int64_t>(it->second.parents.size());
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
    } else {
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
  StepArraysCopy arrays_;               // of the last step
  std::vector<int64_t> last_ids_;       // of its sequences
  std::map<int64_t, Tokens> expected_;  // by sequence
  PagedTokens pages_;
  HashedStates states_;
  std::vector<std::vector<int32_t>> texts_;  // whose pages may be found
  AbsentRows absent_;
  int32_t last_token_ = 0;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_FUZZ_STEPPED_TOKENS_H_
