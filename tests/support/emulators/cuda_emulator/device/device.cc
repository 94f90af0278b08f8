// SPDX-License-Identifier: Apache-2.0
// What Python and generated launchers call of the emulated device.
#include "device.h"

#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <exception>
#include <functional>
#include <utility>
#include <vector>

namespace emulator {

namespace {

// A tensor on the host over memory of the device, for what may touch it.
struct Alias {
  void* data;
  void AllocData(DLTensor* tensor) { tensor->data = data; }
  void FreeData(DLTensor*) {}
};

// Queues a call of a function that does what a kernel does: it takes tensors on the host.
template <bool writes_int32>
void LaunchFunction(ffi::PackedArgs args, ffi::Any*) {
  auto function = args[0].cast<ffi::Function>();
  std::vector<Access> accesses;
  std::vector<ffi::Any> passed;
  for (int i = 1; i < args.size(); ++i) {
    auto tensor = args[i].try_cast<ffi::Tensor>();
    if (!tensor || tensor->device().device_type != kDLCUDA) {
      passed.push_back(args[i]);
      continue;
    }
    void* data = static_cast<char*>(tensor->data_ptr()) + tensor->byte_offset();
    const bool writes = writes_int32 || tensor->dtype() != DLDataType{kDLInt, 32, 1};
    if (tensor->numel() > 0) accesses.push_back({data, writes});
    const DLDevice host{kDLCPU, 0};
    passed.push_back(ffi::Tensor::FromNDAlloc(Alias{data}, tensor->shape(), tensor->dtype(), host));
  }
  void* stream = TVMFFIEnvGetStream(kDLCUDA, 0);
  Device::Get()->Queue(stream, "a kernel", accesses, [function, passed = std::move(passed)] {
    std::vector<ffi::AnyView> views(passed.begin(), passed.end());
    ffi::Any result;
    function.CallPacked(views.data(), static_cast<int32_t>(views.size()), &result);
  });
}

bool LaunchHere(void* stream, const Launch& launch, const std::vector<Access>& accesses,
                std::function<void()> kernel) {
  try {
    Device::Get()->Queue(stream, "a kernel", accesses, [launch, kernel = std::move(kernel)] {
      if (!RunGrid(launch, kernel)) TVM_FFI_THROW(RuntimeError) << machine().fault;
    });
  } catch (const std::exception& error) {
    machine().fault = error.what();
    return false;
  }
  return true;
}

}  // namespace

}  // namespace emulator

TVM_FFI_STATIC_INIT_BLOCK() {
  using emulator::Device;
  namespace ffi = tvm::ffi;
  emulator::machine().launch_on_device = emulator::LaunchHere;
  emulator::machine().take_on_device = [](void*, size_t num_bytes) {
    return Device::Get()->Allocate({kDLCUDA, 0}, num_bytes);
  };
  emulator::machine().give_back_on_device = [](void* stream, void* memory) {
    Device::Get()->GiveBack(stream, memory);
  };
  auto define = [](const char* name, auto function) {
    ffi::Function::SetGlobal(name, ffi::Function::FromTyped(function), /*override=*/true);
  };
  auto get = []() -> void* { return static_cast<tvm::runtime::DeviceAPI*>(Device::Get()); };
  for (const char* name : {"device_api.cuda", "device_api.cuda_host"}) define(name, get);
  define("emulated_device.plug_in", [](bool is_in) { Device::Get()->is_plugged_in = is_in; });
  define("emulated_device.num_pending", [] { return Device::Get()->NumPending(); });
  define("emulated_device.num_events", [] { return Device::Get()->counts["events"]; });
  define("emulated_device.counts", [] {
    ffi::Map<ffi::String, int64_t> counts;
    for (const auto& [what, count] : Device::Get()->counts) counts.Set(what, count);
    return counts;
  });
  define("emulated_device.set_room", [](int64_t bytes) { Device::Get()->room = bytes; });
  define("emulated_device.room", [] { return Device::Get()->room; });
  ffi::Function::SetGlobal("emulated_device.launch",
                           ffi::Function::FromPacked(emulator::LaunchFunction<true>), true);
  ffi::Function::SetGlobal("emulated_device.launch_kernel",
                           ffi::Function::FromPacked(emulator::LaunchFunction<false>), true);
  define("emulated_device.drop_event", [](int64_t event) { Device::Get()->dropped_event = event; });
  define("emulated_device.retire_stream",
         [](int64_t stream) { Device::Get()->RetireStream(reinterpret_cast<void*>(stream)); });
  define("emulated_device.let_host_wait", [](bool waits) { Device::Get()->host_waits = waits; });
  define("emulated_device.wait_for_all", [] {
    Device::Get()->WaitForAll();
    Device::Get()->RaiseFault();
  });
}
