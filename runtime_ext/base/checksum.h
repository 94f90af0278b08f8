// SPDX-License-Identifier: Apache-2.0
/*!
 * \file checksum.h
 * \brief A 64-bit checksum of large values that detects damage, at the speed of memory.
 *
 * It is XXH3. Damage goes unnoticed about once in 2^64; it is no defence against an attacker.
 */
#ifndef TVM_PAGEDKV_BASE_CHECKSUM_H_
#define TVM_PAGEDKV_BASE_CHECKSUM_H_

#include <cstddef>
#include <cstdint>

namespace pagedkv {

/*! \brief The checksum of some bytes; another seed gives another one. */
uint64_t Checksum(const void* bytes, size_t num_bytes, uint64_t seed = 0) noexcept;

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_BASE_CHECKSUM_H_
