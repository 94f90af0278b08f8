// SPDX-License-Identifier: Apache-2.0
// A CUDA device for TVM's runtime whose kernels run on the emulator.
//
// Its memory cannot be touched but by operations of the device, which are queued, and run when the
// host waits for them: as late as they may. Each carries a vector clock, so that an operation is
// refused, when it is queued, that touches what another stream touches without an event between,
// unless both only read.
#ifndef TESTS_CUDA_EMULATOR_DEVICE_H_
#define TESTS_CUDA_EMULATOR_DEVICE_H_

#include <sys/mman.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>
#include <tvm/runtime/device_api.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../runtime/machine.h"

namespace emulator {

namespace ffi = tvm::ffi;

constexpr size_t kPageBytes = 4096;
constexpr size_t kAlignment = 256;

inline size_t RoundUp(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

// Of each stream how many operations have come before.
using Clock = std::map<int, uint64_t>;

inline void Join(Clock* clock, const Clock& other) {
  for (auto [stream, time] : other) (*clock)[stream] = std::max((*clock)[stream], time);
}

struct Allocation {
  char* mapped;
  size_t mapped_bytes;
  char* begin;
  size_t num_bytes;
  bool on_device;
  Clock read, written;  // by each stream, the last time

  void Protect(int protection) const {
    if (on_device) mprotect(mapped, mapped_bytes - kPageBytes, protection);
  }
};

struct Stream;

struct Operation {
  std::function<void()> run;
  std::map<Allocation*, bool> touched;  // whether it is written
  char* given_back = nullptr;
  // An event of another stream, when there is nothing to run.
  Stream* source = nullptr;
  uint64_t until = 0;
};

struct Stream {
  int id = 0;
  Clock clock;
  uint64_t num_done = 0, num_queued = 0;
  std::deque<Operation> queue;
};

class Device : public tvm::runtime::DeviceAPI {
 public:
  static Device* Get() {
    static Device* device = new Device;
    return device;
  }

  void SetDevice(DLDevice) final {}
  void GetAttr(DLDevice device, tvm::runtime::DeviceAttrKind kind, ffi::Any* value) final {
    if (kind == tvm::runtime::kExist) *value = int64_t{is_plugged_in && device.device_id == 0};
    if (kind == tvm::runtime::kWarpSize) *value = int64_t{kWarpSize};
    if (kind == tvm::runtime::kComputeVersion) *value = ffi::String("8.0");
  }
  bool SupportsDevicePointerArithmeticsOnHost() final { return true; }

  void* AllocDataSpace(DLDevice device, size_t num_bytes, size_t, DLDataType) final {
    Count("allocations");
    return Allocate(device, num_bytes);
  }

  void* Allocate(DLDevice device, size_t num_bytes) {
    if (static_cast<int64_t>(num_bytes) > room)
      TVM_FFI_THROW(InternalError) << "CUDA: out of memory";
    room -= num_bytes;
    auto made = std::make_unique<Allocation>();
    made->on_device = device.device_type == kDLCUDA;
    made->num_bytes = num_bytes;
    // The data ends where the last page begins, which nobody may touch.
    const size_t data_bytes = RoundUp(std::max<size_t>(num_bytes, 1), kAlignment);
    made->mapped_bytes = RoundUp(data_bytes, kPageBytes) + kPageBytes;
    void* mapped = mmap(nullptr, made->mapped_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) TVM_FFI_THROW(MemoryError) << "out of emulated memory";
    made->mapped = static_cast<char*>(mapped);
    made->begin = made->mapped + made->mapped_bytes - kPageBytes - data_bytes;
    std::memset(made->begin, 0xff, data_bytes);  // NaN in every float type
    mprotect(made->begin + data_bytes, kPageBytes, PROT_NONE);
    made->Protect(PROT_NONE);
    char* begin = made->begin;
    allocations_[begin] = std::move(made);
    return begin;
  }

  void FreeDataSpace(DLDevice, void* data) final {
    Count("frees");
    HostWaits([this] { WaitForAll(); });  // as cudaFree does
    Release(static_cast<char*>(data));
  }

  // Frees memory when the stream comes to it.
  void GiveBack(TVMStreamHandle stream, void* data) {
    Queue(stream, "cudaFreeAsync", {{data}}, [] {});
    At(stream)->queue.back().given_back = static_cast<char*>(data);
  }

  TVMStreamHandle CreateStream(DLDevice) final {
    Count("streams made");
    if (spare_.empty()) return NewStream();
    return spare_.extract(spare_.begin()).value();
  }
  void FreeStream(DLDevice, TVMStreamHandle stream) final {
    Count("streams freed");
    Wait(At(stream));
    spare_.insert(At(stream));
  }
  void SetStream(DLDevice device, TVMStreamHandle stream) final {
    TVM_FFI_CHECK_SAFE_CALL(TVMFFIEnvSetStream(kDLCUDA, device.device_id, stream, nullptr));
  }
  TVMStreamHandle GetCurrentStream(DLDevice device) final {
    return TVMFFIEnvGetStream(kDLCUDA, device.device_id);
  }

  // From now on nobody may name the stream; unlike FreeStream this does not wait for its work.
  void RetireStream(TVMStreamHandle stream) { retired_.insert(At(stream)); }

  void SyncStreamFromTo(DLDevice, TVMStreamHandle from, TVMStreamHandle to) final {
    Stream *source = At(from), *destination = At(to);
    if (retired_.count(source) + retired_.count(destination) > 0) {
      TVM_FFI_THROW(RuntimeError) << "an event of a stream that was destroyed";
    }
    if (counts["events"]++ == dropped_event) return;
    Join(&destination->clock, source->clock);
    Push(destination, {nullptr, {}, nullptr, source, source->num_queued});
  }

  void StreamSync(DLDevice, TVMStreamHandle stream) final {
    Count("waits");
    if (!host_waits) return;
    HostWaits([&] { Wait(At(stream)); });
    RaiseFault();
  }

  // Queues what touches the allocations of these pointers.
  void Queue(TVMStreamHandle handle, const char* what, const std::vector<Access>& accesses,
             std::function<void()> run) {
    Stream* stream = At(handle);
    Join(&stream->clock, host_clock_);
    std::map<Allocation*, bool> touched;
    for (const Access& access : accesses) {
      if (access.pointer == nullptr) continue;  // a kernel may be given no memory, and touch none
      Allocation* allocation = Find(access.pointer);
      if (allocation == nullptr) {
        TVM_FFI_THROW(RuntimeError) << what << " is given memory that is not the device's";
      }
      touched[allocation] = touched[allocation] || access.writes;
    }
    for (auto [allocation, writes] : touched) {
      RequireOrder(stream, what, *allocation, allocation->written);
      if (writes) RequireOrder(stream, what, *allocation, allocation->read);
    }
    const uint64_t now = stream->num_queued + 1;
    for (auto [allocation, writes] : touched) {
      (writes ? allocation->written : allocation->read)[stream->id] = now;
    }
    stream->clock[stream->id] = now;
    Push(stream, {std::move(run), std::move(touched)});
  }

  uint64_t NumPending() const {
    uint64_t count = 0;
    for (const auto& stream : streams_) {
      for (const Operation& operation : stream->queue) count += operation.run != nullptr;
    }
    return count;
  }

  void WaitForAll() {
    for (const auto& stream : streams_) Wait(stream.get());
  }

  // As CUDA does, the device tells of what failed when the host waits the next time.
  void RaiseFault() {
    const std::string fault = std::exchange(fault_, "");
    if (!fault.empty()) TVM_FFI_THROW(RuntimeError) << fault;
  }

  void Count(const char* what) { ++counts[what]; }
  bool is_plugged_in = false;
  bool host_waits = true;
  int64_t dropped_event = -1;
  int64_t room = INT64_MAX;               // bytes that can be allocated
  std::map<std::string, int64_t> counts;  // of what the host has called

 protected:
  void CopyDataFromTo(const void* from, size_t from_offset, void* to, size_t to_offset,
                      size_t num_bytes, DLDevice from_device, DLDevice to_device, DLDataType,
                      TVMStreamHandle handle) final {
    const char* source = static_cast<const char*>(from) + from_offset;
    char* destination = static_cast<char*>(to) + to_offset;
    std::vector<Access> accesses;
    if (from_device.device_type != kDLCPU) accesses.push_back({source, false});
    if (to_device.device_type != kDLCPU) accesses.push_back({destination});
    // What the host's memory holds when the copy is queued: of memory that is not page-locked that
    // is what is copied, and the other must not change until then.
    std::vector<char> held;
    if (from_device.device_type != kDLCUDA) held.assign(source, source + num_bytes);
    if (to_device.device_type != kDLCUDA) {
      Count("copies to the host");
    } else {
      Count(from_device.device_type == kDLCUDA ? "copies on the device" : "copies to the device");
    }
    const bool is_pinned = from_device.device_type == kDLCUDAHost;
    Queue(handle, "a copy", accesses, [=, held = std::move(held)] {
      if (is_pinned && std::memcmp(held.data(), source, num_bytes) != 0) {
        TVM_FFI_THROW(RuntimeError) << "the host wrote what a queued copy was still to read";
      }
      std::memcpy(destination, held.empty() ? source : held.data(), num_bytes);
    });
    if (to_device.device_type != kDLCPU) return;
    HostWaits([&] { Wait(At(handle)); });
    RaiseFault();
  }

 private:
  Device() { NewStream(); }  // the default one

  Stream* NewStream() {
    streams_.push_back(std::make_unique<Stream>());
    streams_.back()->id = static_cast<int>(streams_.size()) - 1;
    return streams_.back().get();
  }

  Stream* At(TVMStreamHandle stream) {
    return stream == nullptr ? streams_.front().get() : static_cast<Stream*>(stream);
  }

  // Refuses an operation that is not behind what other streams did at these times.
  static void RequireOrder(Stream* stream, const char* what, const Allocation& allocation,
                           const Clock& times) {
    for (auto [other, time] : times) {
      if (other == stream->id || stream->clock[other] >= time) continue;
      TVM_FFI_THROW(RuntimeError) << what << " on stream " << stream->id << " touches "
                                  << allocation.num_bytes << " bytes that stream " << other
                                  << " touches, without an event between";
    }
  }

  Allocation* Find(const void* pointer) {
    auto next = allocations_.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
    if (next == allocations_.begin()) return nullptr;
    Allocation* found = std::prev(next)->second.get();
    const auto offset = static_cast<size_t>(static_cast<const char*>(pointer) - found->begin);
    return offset <= found->num_bytes ? found : nullptr;
  }

  // Counts a stop of the host where there is something left to wait for.
  void HostWaits(const std::function<void()>& wait) {
    const uint64_t before = NumPending();
    wait();
    if (NumPending() < before) Count("stops");
  }

  void Release(char* data) {
    auto found = allocations_.find(data);
    room += found->second->num_bytes;
    munmap(found->second->mapped, found->second->mapped_bytes);
    allocations_.erase(found);
  }

  static void Push(Stream* stream, Operation operation) {
    stream->queue.push_back(std::move(operation));
    ++stream->num_queued;
  }

  void Wait(Stream* stream) {
    Run(stream, stream->num_queued);
    Join(&host_clock_, stream->clock);
  }

  static void Admit(const Operation& operation) {
    for (auto [each, writes] : operation.touched) {
      each->Protect(writes ? PROT_READ | PROT_WRITE : PROT_READ);
    }
  }

  // Runs what a stream has queued up to its operation `until`, and what that waits for.
  void Run(Stream* stream, uint64_t until) {
    while (stream->num_done < until) {
      Operation operation = std::move(stream->queue.front());
      stream->queue.pop_front();
      ++stream->num_done;
      if (operation.run == nullptr) {
        Run(operation.source, operation.until);
        continue;
      }
      running_.push_back(&operation);
      Admit(operation);
      try {
        operation.run();
      } catch (const std::exception& error) {
        if (fault_.empty()) fault_ = error.what();
      }
      for (auto [each, writes] : operation.touched) each->Protect(PROT_NONE);
      running_.pop_back();
      for (const Operation* outer : running_) Admit(*outer);
      if (operation.given_back != nullptr) Release(operation.given_back);
    }
  }

  std::map<char*, std::unique_ptr<Allocation>> allocations_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::set<Stream*> spare_;    // that were freed
  std::set<Stream*> retired_;  // that were given up with work on them
  // More than one where a kernel in Python frees memory, for which the host waits for all work.
  std::vector<const Operation*> running_;
  std::string fault_;
  Clock host_clock_;  // what the host has waited for
};

}  // namespace emulator

#endif  // TESTS_CUDA_EMULATOR_DEVICE_H_
