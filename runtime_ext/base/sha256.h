// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sha256.h
 * \brief SHA-256, as FIPS 180-4 defines it.
 */
#ifndef TVM_PAGEDKV_BASE_SHA256_H_
#define TVM_PAGEDKV_BASE_SHA256_H_

#include <string>
#include <string_view>

namespace pagedkv {

/*! \brief The digest of some bytes, in hexadecimal digits. */
std::string Sha256(std::string_view bytes);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_BASE_SHA256_H_
