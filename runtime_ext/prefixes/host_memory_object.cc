// SPDX-License-Identifier: Apache-2.0
/*!
 * \file host_memory_object.cc
 * \brief Host memory as a store's worker holds it.
 */
#include "prefixes/host_memory_object.h"

#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "base/error.h"
#include "device/device_memory.h"

namespace pagedkv {

namespace {

constexpr int64_t kMinSlotsOfStore = 64;  // as many values as a job has
constexpr double kMaxWait = 3600;

template <typename T>
T FieldOf(const ffi::Map<ffi::String, ffi::Any>& map, const char* name) {
  auto it = map.find(name);
  if (it == map.end()) Raise(kValueError, "the prefix cache's options lack the field '", name, "'");
  std::optional<T> value = (*it).second.template try_cast<T>();
  if (!value) {
    Raise(kTypeError, "the prefix cache's option '", name,
          "' has the wrong type: ", (*it).second.GetTypeKey());
  }
  return *std::move(value);
}

int64_t Address(const ffi::Tensor& memory) { return reinterpret_cast<int64_t>(memory.data_ptr()); }

int64_t Padding(const ffi::Tensor& memory) {
  constexpr int64_t kBlock = HostSlots::kBlockAlignment;
  return (kBlock - Address(memory) % kBlock) % kBlock;
}

/*!
 * \brief Waits in slices, between which Python handles its signals.
 * \param wait Waits for some seconds. \return Whether it need not wait any more.
 * \throws ffi::EnvErrorAlreadySet when a handler has raised, such as KeyboardInterrupt.
 */
template <typename F>
bool WaitInSlices(double seconds, F wait) {
  constexpr double kSlice = 0.1;
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  for (;;) {
    const double left = seconds - std::chrono::duration<double>(Clock::now() - begin).count();
    if (wait(std::min(left, kSlice))) return true;
    if (!(left > kSlice)) return false;  // NaN, too
    if (TVMFFIEnvCheckSignals() != 0) throw ffi::EnvErrorAlreadySet();
  }
}

}  // namespace

LowerTierOptions LowerTierOptions::FromMap(const ffi::Map<ffi::String, ffi::Any>& map) {
  constexpr const char* kNames[] = {"host_bytes", "model_id",       "write_policy",
                                    "min_hits",   "lookup_timeout", "has_store"};
  for (const auto& [key, value] : map) {
    const bool is_known =
        std::any_of(std::begin(kNames), std::end(kNames), [&](const char* n) { return key == n; });
    if (!is_known) Raise(kValueError, "the prefix cache has no option '", std::string(key), "'");
  }
  LowerTierOptions options;
  options.host_bytes = FieldOf<int64_t>(map, "host_bytes");
  options.model_id = FieldOf<ffi::String>(map, "model_id");
  options.write_policy = FieldOf<ffi::String>(map, "write_policy");
  options.min_hits = FieldOf<int64_t>(map, "min_hits");
  options.lookup_timeout = FieldOf<double>(map, "lookup_timeout");
  options.has_store = FieldOf<bool>(map, "has_store");
  if (options.host_bytes < 0 || (options.host_bytes == 0 && !options.has_store)) {
    Raise(kValueError, "host_bytes must be at least 1 without a store, got ", options.host_bytes);
  }
  if (options.write_policy != "through" && options.write_policy != "back" &&
      options.write_policy != "selective") {
    Raise(kValueError, "write_policy must be 'through', 'back' or 'selective', got '",
          options.write_policy, "'");
  }
  if (options.min_hits < 1) Raise(kValueError, "min_hits must be at least 1");
  if (!(options.lookup_timeout >= 0 && options.lookup_timeout <= kMaxWait)) {
    Raise(kValueError, "lookup_timeout must be between 0 and ", kMaxWait, " seconds, got ",
          options.lookup_timeout);
  }
  if (options.has_store && options.model_id.empty()) {
    Raise(kValueError,
          "a prefix cache with a store needs the name of the model: the cache cannot "
          "know of which weights its pages are");
  }
  return options;
}

HostMemoryObj::HostMemoryObj(const LowerTierOptions& options, int32_t page_size,
                             const std::vector<ValueSize>& sizes, DLDevice device) {
  int64_t num_slots = HostSlots::NumSlotsIn(options.host_bytes, page_size, sizes);
  if (options.host_bytes == 0) num_slots = kMinSlotsOfStore;
  const bool has_pages = !sizes.empty();  // a stage without such layers has none
  if (num_slots == 0 && has_pages) {
    Raise(kValueError, "host_bytes is ", options.host_bytes, ", but a page of all layers takes ",
          HostSlots::BytesOf(1, page_size, sizes));
  }
  const int64_t num_bytes =
      HostSlots::BytesOf(num_slots, page_size, sizes) + HostSlots::kBlockAlignment;
  RequireHostMemory(static_cast<double>(num_bytes));
  memory_ = AllocateTensor({num_bytes}, kByte, StagingDevice(device), UncountedBytes());
  char* begin = static_cast<char*>(memory_.data_ptr()) + Padding(memory_);
  host_memory_ =
      std::make_unique<HostMemory>(begin, num_slots, page_size, sizes, options.has_store);
}

HostMemoryObj::~HostMemoryObj() {
  // Threads of the parent may have held the lock, or waited: then no destructor would return.
  if (!process_.IsThis()) host_memory_.release();
}

ffi::Map<ffi::String, ffi::Any> HostMemoryObj::NextJob(double seconds) {
  bool is_closed = false;
  const std::optional<StoreJob> job = host_memory_->NextJob(seconds, &is_closed);
  if (!job) return {{"kind", ffi::String(is_closed ? "closed" : "none")}};
  constexpr const char* kNames[] = {"exists", "get", "put"};
  ffi::Array<ffi::Any> keys;
  for (const PageKey& key : job->keys) {
    keys.push_back(ffi::Bytes(reinterpret_cast<const char*>(key.data()), key.size()));
  }
  return {{"kind", ffi::String(kNames[static_cast<int>(job->kind)])},
          {"id", job->id},
          {"keys", keys},
          {"addresses", ffi::Shape(job->addresses)},
          {"sizes", ffi::Shape(job->sizes)}};
}

ffi::Array<ffi::String> HostMemoryObj::FinishJob(int64_t id, const ffi::Bytes& results) {
  std::vector<bool> flags;
  bool are_verified = true;
  for (size_t i = 0; i < results.size(); ++i) {
    flags.push_back(results.data()[i] != 0);
    are_verified = are_verified && results.data()[i] != 1;
  }
  ffi::Array<ffi::String> lines;
  for (const std::string& line : host_memory_->FinishJob(id, flags, are_verified)) {
    lines.push_back(line);
  }
  return lines;
}

bool HostMemoryObj::Wait(int64_t ticket, double seconds) {
  return WaitInSlices(seconds, [&](double slice) { return host_memory_->Wait(ticket, slice); });
}

bool HostMemoryObj::Flush(double seconds) {
  return WaitInSlices(seconds, [&](double slice) { return host_memory_->Flush(slice); });
}

ffi::Shape HostMemoryObj::MemoryRange() {
  const int64_t padding = Padding(memory_);
  return ffi::Shape({Address(memory_) + padding, memory_.numel() - padding});
}

}  // namespace pagedkv
