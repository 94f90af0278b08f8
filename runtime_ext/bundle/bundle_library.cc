// SPDX-License-Identifier: Apache-2.0
/*!
 * \file bundle_library.cc
 * \brief Loads each library of a bundle once, and keeps it.
 */
#include "bundle/bundle_library.h"

#include <filesystem>
#include <map>
#include <mutex>

#include "base/error.h"

namespace pagedkv {

namespace {

struct LoadedLibrary {
  std::string digest;
  ffi::Module module;
};

}  // namespace

ffi::Module LoadBundleLibrary(const std::string& path, const std::string& digest) {
  static std::mutex mutex;
  // Never freed: kernels may run until the process ends.
  static auto* const loaded = new std::map<std::string, LoadedLibrary>();
  // A link to another version of a bundle is another library.
  const std::string file = std::filesystem::canonical(path).string();
  std::lock_guard<std::mutex> lock(mutex);
  auto it = loaded->find(file);
  if (it == loaded->end()) {
    it = loaded->emplace(file, LoadedLibrary{digest, ffi::Module::LoadFromFile(file)}).first;
  }
  if (it->second.digest != digest) {
    Raise(kRuntimeError, file, " has changed since this process loaded it: load the new bundle ",
          "from another folder, or in a new process");
  }
  return it->second.module;
}

}  // namespace pagedkv
