// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sha256.cc
 * \brief SHA-256.
 */
#include "base/sha256.h"

#include <cstddef>
#include <cstring>

namespace pagedkv {

namespace {

constexpr size_t kBlockBytes = 64, kLengthBytes = 8;

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// The same for the square roots of the first 8 primes.
constexpr std::array<uint32_t, 8> kInitial = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                              0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

uint32_t Rotate(uint32_t x, int count) { return (x >> count) | (x << (32 - count)); }

/*! \brief Adds a block of 64 bytes to the state. */
void Compress(const unsigned char* block, std::array<uint32_t, 8>* state) {
  uint32_t words[64];
  for (int i = 0; i < 16; ++i) {
    const unsigned char* p = block + 4 * i;
    words[i] = static_cast<uint32_t>(p[0]) << 24 | static_cast<uint32_t>(p[1]) << 16 |
               static_cast<uint32_t>(p[2]) << 8 | p[3];
  }
  for (int i = 16; i < 64; ++i) {
    const uint32_t a = words[i - 15], b = words[i - 2];
    words[i] = words[i - 16] + (Rotate(a, 7) ^ Rotate(a, 18) ^ (a >> 3)) + words[i - 7] +
               (Rotate(b, 17) ^ Rotate(b, 19) ^ (b >> 10));
  }
  auto [a, b, c, d, e, f, g, h] = *state;
  for (int i = 0; i < 64; ++i) {
    const uint32_t first = h + (Rotate(e, 6) ^ Rotate(e, 11) ^ Rotate(e, 25)) +
                           ((e & f) ^ (~e & g)) + kRound[i] + words[i];
    const uint32_t second =
        (Rotate(a, 2) ^ Rotate(a, 13) ^ Rotate(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + first;
    d = c, c = b, b = a, a = first + second;
  }
  const uint32_t added[8] = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; ++i) (*state)[i] += added[i];
}

}  // namespace

Sha256Stream::Sha256Stream() : state_(kInitial) {}

void Sha256Stream::Add(std::string_view bytes) {
  num_bytes_ += bytes.size();
  pending_.append(bytes);
  size_t begin = 0;
  for (; pending_.size() - begin >= kBlockBytes; begin += kBlockBytes) {
    Compress(reinterpret_cast<const unsigned char*>(pending_.data()) + begin, &state_);
  }
  pending_.erase(0, begin);
}

std::string Sha256Stream::Finish() {
  // Padding: a one bit, zeros, and the number of bits.
  const uint64_t num_bits = 8 * num_bytes_;
  std::string end(1, static_cast<char>(0x80));
  while ((pending_.size() + end.size()) % kBlockBytes != kBlockBytes - kLengthBytes) end += '\0';
  for (int shift = 56; shift >= 0; shift -= 8) end += static_cast<char>(num_bits >> shift);
  Add(end);

  std::string digits;
  for (uint32_t word : state_) {
    for (int shift = 28; shift >= 0; shift -= 4) digits += "0123456789abcdef"[word >> shift & 15];
  }
  return digits;
}

std::string Sha256(std::string_view bytes) {
  Sha256Stream stream;
  stream.Add(bytes);
  return stream.Finish();
}

Sha256Digest Sha256Bytes(const void* bytes, size_t size) noexcept {
  const auto* data = static_cast<const unsigned char*>(bytes);
  std::array<uint32_t, 8> state = kInitial;
  size_t begin = 0;
  for (; size - begin >= kBlockBytes; begin += kBlockBytes) Compress(data + begin, &state);
  const size_t num_left = size - begin;
  unsigned char end[2 * kBlockBytes] = {};
  if (num_left > 0) std::memcpy(end, data + begin, num_left);
  end[num_left] = 0x80;
  const size_t num_end = num_left < kBlockBytes - kLengthBytes ? kBlockBytes : 2 * kBlockBytes;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    end[num_end - 1 - i] = static_cast<unsigned char>(uint64_t{8} * size >> (8 * i));
  }
  for (size_t i = 0; i < num_end; i += kBlockBytes) Compress(end + i, &state);
  Sha256Digest digest;
  for (size_t i = 0; i < digest.size(); ++i) {
    digest[i] = static_cast<uint8_t>(state[i / 4] >> (24 - 8 * (i % 4)));
  }
  return digest;
}

}  // namespace pagedkv
