// SPDX-License-Identifier: Apache-2.0
/*!
 * \file libraries.h
 * \brief Loads the libraries of a folder in their order, for both examples.
 */
#ifndef TVM_PAGEDKV_EXAMPLE_LIBRARIES_H_
#define TVM_PAGEDKV_EXAMPLE_LIBRARIES_H_

#include <dlfcn.h>
#include <tvm/ffi/function.h>

#include <cstdio>
#include <string>

/*! \brief Returns where a folder has the libraries of this machine. */
inline std::string Libraries(const std::string& folder) {
#if defined(__x86_64__)
  return folder + "/lib/x86_64/";
#else
  return folder + "/lib/aarch64/";
#endif
}

/*! \brief Load TVM's runtime and the cache; false, and a line on stderr, where one is missing. */
inline bool LoadLibraries(const std::string& folder) {
  // The runtime first: the cache takes over functions that it registers.
  for (const char* name : {"libtvm_runtime.so", "libtvm_pagedkv.so"}) {
    if (dlopen((Libraries(folder) + name).c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      std::fprintf(stderr, "cannot load %s\n", dlerror());
      return false;
    }
  }
  return true;
}

/*! \brief A global function, which must be there. */
inline tvm::ffi::Function Find(const std::string& name) {
  return tvm::ffi::Function::GetGlobalRequired(name);
}

#endif  // TVM_PAGEDKV_EXAMPLE_LIBRARIES_H_
