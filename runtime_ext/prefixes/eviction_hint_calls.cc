// SPDX-License-Identifier: Apache-2.0
/*!
 * \file eviction_hint_calls.cc
 * \brief Hints about prompts that will come again, as callers give them.
 */
#include <chrono>
#include <cmath>
#include <limits>
#include <string>

#include "base/error.h"
#include "prefixes/prefix_calls.h"

namespace pagedkv {

namespace {

constexpr double kMaxSeconds = 1e9;  // 30 years

}  // namespace

int64_t PrefixCalls::NowUs() const {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count() + clock_offset_us_;
}

int64_t PrefixCalls::ExpiryAfter(double seconds) const {
  if (!(seconds > 0)) Raise(kValueError, "ttl must be more than 0 seconds, got ", seconds);
  if (seconds > kMaxSeconds) return EvictionHints::kNever;
  return NowUs() + static_cast<int64_t>(std::ceil(seconds * 1e6));
}

int64_t PrefixCalls::Retain(const TokenIds& tokens, const ffi::Bytes& salt, int64_t priority,
                            double seconds) {
  step_->phase().RequireIdle("prefix_retain");
  const int64_t expiry = ExpiryAfter(seconds);
  return table_->prefixes().hints().Retain(salt, Convert(tokens), priority, expiry);
}

int64_t PrefixCalls::Pin(const TokenIds& tokens, const ffi::Bytes& salt, double seconds) {
  step_->phase().RequireIdle("prefix_pin");
  const int64_t expiry = ExpiryAfter(seconds);
  return table_->prefixes().hints().Pin(salt, Convert(tokens), expiry);
}

bool PrefixCalls::Release(int64_t hint) {
  step_->phase().RequireIdle("prefix_release");
  return table_->prefixes().hints().Release(hint);
}

int64_t PrefixCalls::Demote(const TokenIds& tokens, const ffi::Bytes& salt,
                            const ffi::String& tier) {
  step_->phase().RequireIdle("prefix_demote");
  const bool is_store = tier == "store";
  if (!is_store && tier != "host" && !tier.empty()) {
    Raise(kValueError, "tier must be one of host, store; got ", std::string(tier));
  }
  const HostMemory* below = table_->prefixes().host_memory();
  if (below == nullptr && !tier.empty()) {
    Raise(kValueError, "the cache has no tier ", std::string(tier),
          ": it was made without a prefix cache below its pages");
  }
  if (is_store && !below->has_store()) {
    Raise(kValueError, "the cache has no tier store: its prefix cache has host memory only");
  }
  tiers_->Settle();
  return table_->prefixes().Demote(salt, Convert(tokens), is_store);
}

int64_t PrefixCalls::Load(const TokenIds& tokens, const ffi::Bytes& salt) {
  step_->phase().RequireIdle("prefix_load");
  int64_t id = std::numeric_limits<int64_t>::min();
  while (table_->Find(id) != nullptr) ++id;
  const int64_t length = AddWithin(id, tokens, salt, 0);
  table_->prefixes().UncountLookup();
  table_->Remove(id);
  return length;
}

void PrefixCalls::AdvanceClock(double seconds) {
  step_->phase().RequireIdle("prefix_advance_clock");
  if (!(seconds >= 0 && seconds <= kMaxSeconds)) {
    Raise(kValueError, "seconds must be between 0 and ", kMaxSeconds, ", got ", seconds);
  }
  clock_offset_us_ += static_cast<int64_t>(seconds * 1e6);
  ExpireHints();
}

void PrefixCalls::ExpireHints() noexcept {
  EvictionHints& hints = table_->prefixes().hints();
  if (hints.next_expiry() == EvictionHints::kNever || !step_->phase().is_idle()) return;
  hints.Expire(NowUs());
}

}  // namespace pagedkv
