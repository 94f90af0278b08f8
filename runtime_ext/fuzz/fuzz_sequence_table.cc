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
 */
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bytes.h"
#include "expected_tokens.h"
#include "operation_count.h"
#include "state/plans/commit_plan.h"
#include "state/table/copy_on_write.h"
#include "state/table/sequence_table.h"
#include "stepped_tokens.h"
#include "table_state.h"

namespace pagedkv {

namespace {

class World : public SteppedTokens {
 public:
  using SteppedTokens::SteppedTokens;

  /*! \return Whether the operation was done; else it was refused. */
  bool Apply(Bytes* bytes) {
    bool was_done = true;
    const TableState before = StateOf(table_);
    const auto expected = expected_;
    try {
      Draw(bytes);
    } catch (const Error& error) {
      was_done = false;
      FUZZ_CHECK(StateOf(table_) == before);
      const bool is_reclaimed = std::string(error.what()).find("reclaimed") != std::string::npos;
      FUZZ_CHECK(!is_reclaimed || HasReclaimed() || states_.is_used());  // a hit takes few states
      expected_ = expected;
    }
    Check();
    return was_done;
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
    EvictionHints& hints = table_.prefixes().hints();
    const int64_t what = bytes->Between(0, 7), number = bytes->Around(0, 100);
    if (what == 0) {
      hints.Release(number);
    } else if (what == 1) {
      hints.Expire(now_ += bytes->Next());
    } else if (!texts_.empty()) {
      const std::vector<int32_t> tokens = DrawText(bytes);
      const TokenSpan text{tokens.data(), static_cast<int64_t>(tokens.size())};
      const int64_t expiry = bytes->Next() % 2 ? now_ + 1 + bytes->Next() : EvictionHints::kNever;
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

  int64_t now_ = 0;  // the clock of hints
};

}  // namespace

}  // namespace pagedkv

pagedkv::OperationCount operations;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  pagedkv::Bytes bytes(data, size);
  const pagedkv::Sizes sizes(&bytes);
  pagedkv::World world(sizes);
  while (!bytes.empty()) operations.Add(world.Apply(&bytes));
  return 0;
}
