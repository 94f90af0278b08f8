// SPDX-License-Identifier: Apache-2.0
/*!
 * \file checksum.h
 * \brief A 64-bit checksum of large values that detects damage, at the speed of memory.
 *
 * Eight lanes take one word of each block of 64 bytes. Every operation is a bijection of the lane,
 * so damage within one word always changes the result; other damage goes unnoticed about once in
 * 2^64. It is no defence against an attacker.
 */
#ifndef TVM_PAGEDKV_BASE_CHECKSUM_H_
#define TVM_PAGEDKV_BASE_CHECKSUM_H_

#include <cstddef>
#include <cstdint>

namespace pagedkv {

/*! \brief The checksum of `num_bytes`, a multiple of 8. */
uint64_t Checksum(const void* bytes, size_t num_bytes) noexcept;

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_BASE_CHECKSUM_H_
