// SPDX-License-Identifier: Apache-2.0
/*!
 * \file checksum.cc
 * \brief A 64-bit checksum.
 */
#include "base/checksum.h"

#include <cstring>

namespace pagedkv {

namespace {

constexpr size_t kNumLanes = 8;
// Odd, so that a product with it can be undone: the fractional part of the golden ratio.
constexpr uint64_t kFactor = 0x9e3779b97f4a7c15;
// The same of the square root of 2.
constexpr uint64_t kOtherFactor = 0x6a09e667f3bcc909;

// Two products: a difference in the highest bit passes one of them unchanged, so the next word of
// the lane could cancel it with a single bit.
uint64_t Mix(uint64_t state, uint64_t word) {
  state = (state ^ word) * kFactor;
  state ^= state >> 32;  // products move differences up only
  state *= kOtherFactor;
  return state ^ state >> 29;
}

}  // namespace

uint64_t Checksum(const void* bytes, size_t num_bytes) noexcept {
  constexpr size_t kWord = sizeof(uint64_t);
  const auto* next = static_cast<const unsigned char*>(bytes);
  uint64_t lanes[kNumLanes], words[kNumLanes];
  for (size_t i = 0; i < kNumLanes; ++i) lanes[i] = i + 1;
  size_t num_left = num_bytes;
  for (; num_left >= sizeof(words); num_left -= sizeof(words), next += sizeof(words)) {
    std::memcpy(words, next, sizeof(words));
    for (size_t i = 0; i < kNumLanes; ++i) lanes[i] = Mix(lanes[i], words[i]);
  }
  for (size_t i = 0; i < num_left / kWord; ++i, next += kWord) {
    std::memcpy(words, next, kWord);
    lanes[i] = Mix(lanes[i], words[0]);
  }
  uint64_t result = num_bytes;
  for (uint64_t lane : lanes) result = Mix(result, lane);
  return result;
}

}  // namespace pagedkv
