// SPDX-License-Identifier: Apache-2.0
/*!
 * \file checksum.cc
 * \brief A 64-bit checksum.
 */
#include "base/checksum.h"

#define XXH_INLINE_ALL  // nothing of it is visible outside
#include "third_party/xxhash/xxhash.h"

namespace pagedkv {

uint64_t Checksum(const void* bytes, size_t num_bytes, uint64_t seed) noexcept {
  return XXH3_64bits_withSeed(bytes, num_bytes, seed);
}

}  // namespace pagedkv
