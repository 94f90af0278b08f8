// SPDX-License-Identifier: Apache-2.0
/*!
 * \file prefixes.cc
 * \brief Prompts that begin like earlier ones.
 */
#include "step/prefixes.h"

#include <limits>
#include <string>

#include "base/error.h"

namespace pagedkv {

TokenSpan Prefixes::Convert(IntSpan tokens) {
  constexpr int64_t kMaxToken = std::numeric_limits<int32_t>::max();
  tokens_.resize(tokens.size);
  for (size_t i = 0; i < tokens.size; ++i) {
    const int64_t token = tokens.data[i];
    if (token < 0 || token > kMaxToken) {
      Raise(kValueError, "token ids must be in [0, ", kMaxToken, "], got ", token, " at index ", i);
    }
    tokens_[i] = static_cast<int32_t>(token);
  }
  return {tokens_.data(), static_cast<int64_t>(tokens.size)};
}

int64_t Prefixes::Match(IntSpan tokens, const ffi::Bytes& salt) {
  step_->phase().RequireNotChanging("prefix_match");
  return table_->prefixes().Match(salt, Convert(tokens));
}

int64_t Prefixes::Add(int64_t sequence_id, IntSpan tokens, const ffi::Bytes& salt) {
  step_->phase().RequireIdle("prefix_add");
  return table_->AddWithPrefix(sequence_id, salt, Convert(tokens));
}

void Prefixes::RequireNext(const Sequence& sequence, int64_t begin) const {
  const int64_t num_recorded = table_->prefixes().NumRecorded(sequence);
  if (begin == num_recorded) return;
  Raise(kValueError, "the tokens of sequence ", sequence.id, " are recorded up to position ",
        num_recorded, ", so those from there on come next, got those from position ", begin, " on");
}

void Prefixes::Record(int64_t sequence_id, int64_t begin, IntSpan tokens) {
  step_->phase().RequireNotChanging("prefix_record");
  Sequence& sequence = table_->At(sequence_id);
  RequireNext(sequence, begin);
  table_->prefixes().Record(&sequence, Convert(tokens));
  if (!step_->IsInForward()) table_->prefixes().AddPages(&sequence);
}

void Prefixes::RecordStep(IntSpan tokens) {
  step_->phase().RequireForward("prefix_record_step");
  const ForwardPlan& plan = step_->plan();
  if (plan.has_trees()) {
    Raise(kValueError,
          "the rows of this step are nodes of token trees; record the tokens of those "
          "that are accepted, when they are committed");
  }
  if (static_cast<int64_t>(tokens.size) != plan.num_rows()) {
    Raise(kValueError, "the step needs the tokens of its ", plan.num_rows(), " rows, got ",
          tokens.size);
  }
  for (int64_t i = 0; i < plan.num_sequences(); ++i) {
    RequireNext(plan.SequenceAt(i), plan.PastLength(i));
    RequireNoWindow(plan.SequenceAt(i), "have its tokens recorded");
  }
  TokenSpan rest = Convert(tokens);
  int64_t i = 0;
  try {
    for (; i < plan.num_sequences(); ++i) {
      Sequence* sequence = table_->Find(plan.SequenceAt(i).id);
      table_->prefixes().Record(sequence, {rest.data, plan.NumAppend(i)});
      rest = rest.From(plan.NumAppend(i));
    }
  } catch (...) {
    while (i-- > 0) {
      table_->prefixes().Truncate(table_->Find(plan.SequenceAt(i).id), plan.PastLength(i));
    }
    throw;
  }
}

int64_t Prefixes::NumRecorded(int64_t sequence_id) const {
  return table_->prefixes().NumRecorded(table_->At(sequence_id));
}

}  // namespace pagedkv
