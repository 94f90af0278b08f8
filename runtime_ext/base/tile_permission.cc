// SPDX-License-Identifier: Apache-2.0
/*!
 * \file tile_permission.cc
 * \brief Asks by arch_prctl, which Linux has for tiles since 5.16.
 */
#include "base/tile_permission.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pagedkv {

namespace {

std::mutex mutex;
std::string refusal;   // guarded by mutex
bool is_told = false;  // guarded by mutex

bool IsOfAMX(const std::string& feature) { return feature.rfind("amx_", 0) == 0; }

}  // namespace

int AskForTiles() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : errno;
#else
  return ENOSYS;
#endif
}

std::set<std::string> PermittedFeatures(std::set<std::string> features, int (*ask)()) {
  bool is_permitted = features.count("amx_tile") != 0;
  if (is_permitted) {
    const int error = ask();
    is_permitted = error == 0;
    const std::lock_guard<std::mutex> lock(mutex);
    refusal = is_permitted ? "" : std::strerror(error);
    if (!is_permitted && !is_told) {
      is_told = true;
      std::fprintf(stderr,
                   "tvm_pagedkv: warning: this CPU has AMX, but Linux refuses it to this process "
                   "(%s), so kernels use AVX-512; a kernel from 5.16 on, and a seccomp filter that "
                   "lets arch_prctl pass, permit it\n",
                   refusal.c_str());
    }
  }
  for (auto it = features.begin(); !is_permitted && it != features.end();) {
    it = IsOfAMX(*it) ? features.erase(it) : std::next(it);
  }
  return features;
}

std::string TileRefusal() {
  const std::lock_guard<std::mutex> lock(mutex);
  return refusal;
}

}  // namespace pagedkv
