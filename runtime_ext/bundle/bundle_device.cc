// SPDX-License-Identifier: Apache-2.0
/*!
 * \file bundle_device.cc
 * \brief GPUs: the driver, TVM's runtime for them, and their compute capability.
 */
#include "bundle/bundle_device.h"

#include <dlfcn.h>
#include <tvm/ffi/any.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>
#include <tvm/runtime/device_api.h>

#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "device/device_memory.h"

namespace pagedkv {

namespace {

namespace ffi = tvm::ffi;

constexpr const char* kDriver = "libcuda.so.1";
constexpr const char* kRuntime = "libtvm_runtime_cuda.so";

bool HasRuntime() { return ffi::Function::GetGlobal("device_api.cuda").has_value(); }

/*! \brief The CUDA version of the driver; 0 without a driver. */
int64_t DriverVersion() {
  void* driver = dlopen(kDriver, RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) {
    const std::string reason = dlerror();
    if (HasRuntime()) return 0;  // not NVIDIA's driver
    Raise(kRuntimeError, "kernels for GPUs need the driver of NVIDIA, and there is none: ", reason);
  }
  int version = 0;
  auto get = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuDriverGetVersion"));
  if (get == nullptr || get(&version) != 0) {
    Raise(kRuntimeError, kDriver, " reports no version: the driver does not work");
  }
  return version;
}

/*! \brief Loads a dependency of other libraries, from the system or from one of the paths. */
void LoadNeeded(const std::vector<std::string>& libraries, const std::string& prefix) {
  for (const std::string& path : libraries) {
    const std::string name = std::filesystem::path(path).filename().string();
    if (name.rfind(prefix, 0) != 0) continue;
    if (dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);  // a failure shows when the library is needed
    }
  }
}

/*! \brief TVM's GPU runtime, which is next to the runtime of the process. */
void LoadRuntime(const std::vector<std::string>& libraries) {
  if (HasRuntime()) return;
  LoadNeeded(libraries, "libcudart");
  Dl_info info = {};
  std::filesystem::path path = kRuntime;
  if (dladdr(reinterpret_cast<void*>(&tvm::runtime::DeviceAPI::Get), &info) != 0 &&
      info.dli_fname != nullptr) {
    path = std::filesystem::path(info.dli_fname).parent_path() / kRuntime;
  }
  if (dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr || !HasRuntime()) {
    const char* reason = dlerror();
    Raise(kRuntimeError, "kernels for GPUs need TVM's runtime for CUDA, which cannot be loaded: ",
          reason == nullptr ? path.string() : reason,
          "; it needs libcudart.so of the CUDA that it was built for");
  }
}

}  // namespace

std::string NameOfDevice(DLDevice device) {
  if (device.device_type == kDLCPU) return "cpu";
  return device.device_type == kDLCUDA ? "cuda" : "";
}

Machine MachineOf(DLDevice device, const std::vector<std::string>& libraries) {
  Machine machine = ThisCPU();
  machine.device = NameOfDevice(device);
  if (machine.device.empty()) {
    Raise(kValueError, "bundles are for CPUs and for GPUs with CUDA, not for devices of type ",
          static_cast<int>(device.device_type));
  }
  if (machine.device == "cpu") return machine;
  machine.driver = DriverVersion();
  LoadRuntime(libraries);
  if (!DeviceExists(device)) return machine;
  std::string version =
      DeviceAttribute(device, tvm::runtime::kComputeVersion).cast<ffi::String>();  // "9.0"
  version.erase(std::remove(version.begin(), version.end(), '.'), version.end());
  machine.compute_capability = std::stoll(version);
  return machine;
}

}  // namespace pagedkv
