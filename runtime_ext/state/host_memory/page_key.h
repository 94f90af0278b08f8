// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_key.h
 * \brief Keys of full pages of text: a chain of SHA-256 digests.
 *
 *     root = H(format, value revision, space, salt)    key(page) = H(key of the page before, its
 * token ids)
 *
 * So a key stands for all tokens up to the end of its page, and for what K and V depend on besides.
 */
#ifndef TVM_PAGEDKV_STATE_HOST_MEMORY_PAGE_KEY_H_
#define TVM_PAGEDKV_STATE_HOST_MEMORY_PAGE_KEY_H_

#include <cstdint>
#include <string>

#include "base/sha256.h"

namespace pagedkv {

/*! \brief A view of token ids. */
struct TokenSpan {
  const int32_t* data;
  int64_t size;

  TokenSpan From(int64_t begin) const { return {data + begin, size - begin}; }
};

using PageKey = Sha256Digest;

/*! \brief The text that a key stands for: the page behind `parent` with these tokens. */
struct PageText {
  PageKey key;
  PageKey parent;
  TokenSpan tokens;
};

/*! \brief Add 1 whenever the layout of values changes (page_value.h): old values are misses. */
inline constexpr uint32_t kValueRevision = 2;

/*!
 * \brief The key before the first page of a text.
 * \param space What all texts of a cache have in common: the model and the layout of its pages.
 */
PageKey RootKey(const std::string& space, const std::string& salt,
                uint32_t value_revision = kValueRevision);
PageKey NextKey(const PageKey& parent, TokenSpan page) noexcept;
/*! \brief The key under which stores have the value of a page in a layer group. */
PageKey ValueKey(const PageKey& page, int32_t group) noexcept;

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_HOST_MEMORY_PAGE_KEY_H_
