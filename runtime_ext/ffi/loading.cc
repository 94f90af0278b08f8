// SPDX-License-Identifier: Apache-2.0
/*!
 * \file loading.cc
 * \brief Whether this copy of the library fits the process that it was loaded into.
 */
#include "ffi/loading.h"

#include <dlfcn.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>
#include <tvm/runtime/base.h>
#include <tvm/runtime/c_backend_api.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>

#include "base/version.h"

namespace pagedkv {

namespace ffi = tvm::ffi;

namespace {

template <typename F>
std::string PathOf(F* function) {
  Dl_info info = {};
  const bool is_known = dladdr(reinterpret_cast<void*>(function), &info) != 0;
  return is_known && info.dli_fname != nullptr ? info.dli_fname : "";
}

/*! \brief The version in the _version.py of a wheel; empty where there is none. */
std::string WheelVersion(const std::string& library) {
  const std::filesystem::path folder = std::filesystem::path(library).parent_path().parent_path();
  std::ifstream file(folder / "_version.py");
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const std::string before = "version = '";
  const size_t begin = text.find(before);
  if (begin == std::string::npos) return "";
  const size_t end = text.find('\'', begin + before.size());
  return text.substr(begin + before.size(), end - begin - before.size());
}

}  // namespace

std::string LibraryPath() { return PathOf(&LibraryPath); }

std::string RuntimeMismatch() {
  auto mismatch = [](const std::string& package, const std::string& needed,
                     const std::string& present, const std::string& where) {
    return "tvm_pagedkv " TVM_PAGEDKV_VERSION " was built for " + package + " " + needed +
           ", but the process has loaded " + present + where + "; install " + package + " " +
           needed + ", or a tvm-pagedkv that was built for " + present;
  };
  TVMFFIVersion ffi;
  TVMFFIGetVersion(&ffi);
  if (ffi.major != TVM_FFI_VERSION_MAJOR || ffi.minor != TVM_FFI_VERSION_MINOR) {
    auto series = [](int major, int minor) {
      return std::to_string(major) + "." + std::to_string(minor);
    };
    return mismatch("apache-tvm-ffi", series(TVM_FFI_VERSION_MAJOR, TVM_FFI_VERSION_MINOR),
                    series(ffi.major, ffi.minor), "");
  }
  const std::string runtime = PathOf(&TVMBackendParallelLaunch);
  const std::string present = WheelVersion(runtime);
  if (present.empty() || Series(present) == Series(TVM_VERSION)) return "";
  return mismatch("apache-tvm", Series(TVM_VERSION), present, " from " + runtime);
}

std::string OtherCopy() {
  if (!ffi::Function::GetGlobal("pagedkv.create")) return "";
  std::optional<ffi::Function> describe = ffi::Function::GetGlobal("pagedkv.library");
  if (!describe) return "another version of tvm_pagedkv";
  auto other = (*describe)().cast<ffi::Map<ffi::String, ffi::String>>();
  return "tvm_pagedkv " + std::string(other["version"]) + " from " + std::string(other["path"]);
}

}  // namespace pagedkv
