// SPDX-License-Identifier: Apache-2.0
/*!
 * \file huge_pages.cc
 * \brief Advice to the kernel of the system about large allocations.
 */
#include "device/huge_pages.h"

#ifdef __linux__
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#endif

namespace pagedkv {

#ifdef __linux__

namespace {

constexpr int kInterleave = 3;              // MPOL_INTERLEAVE
constexpr int kAllowed = 1 << 2;            // MPOL_F_MEMS_ALLOWED
constexpr unsigned long kMostNodes = 1024;  // NOLINT(runtime/int): the type of the system call

void Interleave(void* data, int64_t num_bytes) {
  constexpr int kBits = 8 * sizeof(unsigned long);        // NOLINT(runtime/int)
  std::array<unsigned long, kMostNodes / kBits> nodes{};  // NOLINT(runtime/int)
  int policy = 0, num_nodes = 0;
  if (syscall(SYS_get_mempolicy, &policy, nodes.data(), kMostNodes, nullptr, kAllowed) != 0) return;
  for (auto word : nodes) num_nodes += __builtin_popcountl(word);
  if (num_nodes < 2) return;
  // Of no consequence where it fails.
  static_cast<void>(syscall(SYS_mbind, data, num_bytes, kInterleave, nodes.data(), kMostNodes, 0));
}

}  // namespace

void PreferHugePages(void* data, int64_t num_bytes) {
  madvise(data, num_bytes / kHugePageBytes * kHugePageBytes, MADV_HUGEPAGE);
  Interleave(data, num_bytes / kHugePageBytes * kHugePageBytes);
}

#else

void PreferHugePages(void*, int64_t) {}

#endif

}  // namespace pagedkv
