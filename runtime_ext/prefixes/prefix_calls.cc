// SPDX-License-Identifier: Apache-2.0
/*!
 * \file prefix_calls.cc
 * \brief Prompts that begin like earlier ones.
 */
#include "prefixes/prefix_calls.h"

#include <tvm/ffi/dtype.h>

#include <limits>
#include <utility>

#include "base/error.h"
#include "device/tensor_checks.h"

namespace pagedkv {

namespace {

[[noreturn]] void RaiseNoToken(int64_t token, int64_t index) {
  Raise(kValueError, "token ids must be in [0, ", std::numeric_limits<int32_t>::max(), "], got ",
        token, " at index ", index);
}

}  // namespace

TokenSpan PrefixCalls::Convert(const int64_t* tokens, size_t size) {
  tokens_.resize(size);
  for (size_t i = 0; i < size; ++i) {
    if (tokens[i] < 0 || tokens[i] > std::numeric_limits<int32_t>::max()) {
      RaiseNoToken(tokens[i], static_cast<int64_t>(i));
    }
    tokens_[i] = static_cast<int32_t>(tokens[i]);
  }
  return {tokens_.data(), static_cast<int64_t>(size)};
}

TokenSpan PrefixCalls::Convert(const TokenIds& tokens) {
  if (const auto shape = tokens.as<ffi::Shape>()) return Convert(shape->data(), shape->size());
  const auto tensor = tokens.get<ffi::Tensor>();
  if (!tensor.defined()) Raise(kTypeError, "token ids must be a Shape or a tensor, got None");
  const DLDataType dtype = tensor.dtype();
  const bool is_int = dtype.code == kDLInt && dtype.lanes == 1;
  if (!is_int || (dtype.bits != 32 && dtype.bits != 64)) {
    Raise(kTypeError, "token ids must be int32 or int64, got ", ffi::DLDataTypeToString(dtype));
  }
  if (tensor.ndim() != 1 || !tensor.IsContiguous() || tensor.device().device_type != kDLCPU) {
    Raise(kValueError, "token ids must be a contiguous vector on the CPU, got shape ",
          ShapeText(tensor.shape()));
  }
  if (dtype.bits == 64) {
    return Convert(static_cast<const int64_t*>(tensor.data_ptr()), tensor.numel());
  }
  const auto* data = static_cast<const int32_t*>(tensor.data_ptr());
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    if (data[i] < 0) RaiseNoToken(data[i], i);
  }
  return {data, tensor.numel()};
}

int64_t PrefixCalls::Match(const TokenIds& tokens, const ffi::Bytes& salt) {
  step_->phase().RequireNotChanging("prefix_match");
  tiers_->Settle();
  return table_->prefixes().Match(salt, Convert(tokens));
}

int64_t PrefixCalls::Add(int64_t sequence_id, const TokenIds& tokens, const ffi::Bytes& salt) {
  return AddWithin(sequence_id, tokens, salt, tiers_->lookup_timeout());
}

int64_t PrefixCalls::AddWithin(int64_t sequence_id, const TokenIds& tokens, const ffi::Bytes& salt,
                               double seconds) {
  step_->phase().RequireIdle("prefix_add");
  if (!(seconds >= 0))
    Raise(kValueError, "lookup_timeout must be at least 0 seconds, got ", seconds);
  TokenSpan span = Convert(tokens);
  tiers_->Settle();
  if (seconds > 0 && table_->Find(sequence_id) == nullptr) {
    tiers_->Wait(table_->prefixes().Prefetch(salt, span), seconds);
    // Other threads may have used the cache and its scratch memory.
    step_->phase().RequireIdle("prefix_add");
    span = Convert(tokens);
    tiers_->Settle();
  }
  for (;;) {  // ends: there are fewer values after each damaged one
    std::vector<PageLoad> loads;
    const int64_t length = table_->AddWithPrefix(sequence_id, salt, span, &loads);
    if (tiers_->Load(sequence_id, loads)) return length;
  }
}

int64_t PrefixCalls::Prefetch(const TokenIds& tokens, const ffi::Bytes& salt) {
  step_->phase().RequireNotChanging("prefix_prefetch");
  tiers_->Settle();
  return table_->prefixes().Prefetch(salt, Convert(tokens));
}

ffi::Shape PrefixCalls::Locate(const TokenIds& tokens, const ffi::Bytes& salt, double seconds) {
  step_->phase().RequireIdle("prefix_locate");
  if (!(seconds >= 0)) Raise(kValueError, "timeout must be at least 0 seconds, got ", seconds);
  tiers_->Settle();
  auto wait = [&](int64_t ticket) { return tiers_->Wait(ticket, seconds); };
  const std::vector<PagePlace> places = table_->prefixes().Locate(salt, Convert(tokens), wait);
  std::vector<int64_t> numbers;
  for (PagePlace place : places) numbers.push_back(static_cast<int64_t>(place));
  return ffi::Shape(numbers);
}

void PrefixCalls::RequireNext(const Sequence& sequence, int64_t begin) const {
  const int64_t num_recorded = table_->prefixes().NumRecorded(sequence);
  if (begin == num_recorded) return;
  Raise(kValueError, "the tokens of sequence ", sequence.id, " are recorded up to position ",
        num_recorded, ", so those from there on come next, got those from position ", begin, " on");
}

void PrefixCalls::Record(int64_t sequence_id, int64_t begin, const TokenIds& tokens) {
  step_->phase().RequireNotChanging("prefix_record");
  Sequence& sequence = table_->At(sequence_id);
  RequireNext(sequence, begin);
  table_->prefixes().Record(&sequence, Convert(tokens));
  if (!step_->IsInForward()) table_->prefixes().AddPages(&sequence);
}

void PrefixCalls::RecordStep(const TokenIds& tokens) {
  step_->phase().RequireForward("prefix_record_step");
  const ForwardPlan& plan = step_->plan();
  if (plan.has_trees()) {
    Raise(kValueError,
          "the rows of this step are nodes of token trees; record the tokens of those "
          "that are accepted, when they are committed");
  }
  TokenSpan rest = Convert(tokens);
  if (rest.size != plan.num_rows()) {
    Raise(kValueError, "the step needs the tokens of its ", plan.num_rows(), " rows, got ",
          rest.size);
  }
  for (int64_t i = 0; i < plan.num_sequences(); ++i) {
    RequireNext(plan.SequenceAt(i), plan.PastLength(i));
    RequireNoWindow(plan.SequenceAt(i), "have its tokens recorded");
  }
  int64_t i = 0;
  try {
    for (; i < plan.num_sequences(); ++i) {
      table_->prefixes().Record(step_->SequenceToRecord(i), {rest.data, plan.NumAppend(i)});
      rest = rest.From(plan.NumAppend(i));
    }
  } catch (...) {
    while (i-- > 0) {
      table_->prefixes().Truncate(step_->SequenceToRecord(i), plan.PastLength(i));
    }
    throw;
  }
}

int64_t PrefixCalls::NumRecorded(int64_t sequence_id) const {
  return table_->prefixes().NumRecorded(std::as_const(*table_).At(sequence_id));
}

}  // namespace pagedkv
