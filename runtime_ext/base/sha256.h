// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sha256.h
 * \brief SHA-256, as FIPS 180-4 defines it.
 */
#ifndef TVM_PAGEDKV_BASE_SHA256_H_
#define TVM_PAGEDKV_BASE_SHA256_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace pagedkv {

/*! \brief The digest of bytes that come in chunks. */
class Sha256Stream {
 public:
  Sha256Stream();

  void Add(std::string_view bytes);
  /*! \return The digest in 64 hexadecimal digits. Nothing can be added after it. */
  std::string Finish();

 private:
  std::array<uint32_t, 8> state_;
  uint64_t num_bytes_ = 0;
  std::string pending_;  // bytes of a block that is not full
};

/*! \brief The digest of bytes in 64 hexadecimal digits. */
std::string Sha256(std::string_view bytes);

using Sha256Digest = std::array<uint8_t, 32>;

/*! \brief The digest of bytes, as bytes; it allocates nothing. */
Sha256Digest Sha256Bytes(const void* bytes, size_t size) noexcept;

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_BASE_SHA256_H_
