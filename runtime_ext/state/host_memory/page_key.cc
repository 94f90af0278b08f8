// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_key.cc
 * \brief Keys of full pages of text.
 */
#include "state/host_memory/page_key.h"

#include <cstring>

namespace pagedkv {

namespace {

constexpr const char* kFormat = "tvm_pagedkv page key 1";
constexpr size_t kMaxPageTokens = 1024;

/*! \brief Adds text with its size, so that no two lists of texts have the same bytes. */
void AddText(const std::string& text, std::string* bytes) {
  *bytes += std::to_string(text.size()) + ":" + text;
}

}  // namespace

PageKey RootKey(const std::string& space, const std::string& salt, uint32_t value_revision) {
  std::string bytes;
  AddText(kFormat, &bytes);
  AddText(std::to_string(value_revision), &bytes);
  AddText(space, &bytes);
  AddText(salt, &bytes);
  return Sha256Bytes(bytes.data(), bytes.size());
}

PageKey NextKey(const PageKey& parent, TokenSpan page) noexcept {
  // Longer pages are hashed in parts, each with the digest of those before it.
  unsigned char bytes[sizeof(PageKey) + kMaxPageTokens * sizeof(int32_t)];
  PageKey key = parent;
  do {
    const auto count = static_cast<size_t>(page.size) < kMaxPageTokens
                           ? static_cast<size_t>(page.size)
                           : kMaxPageTokens;
    std::memcpy(bytes, key.data(), key.size());
    std::memcpy(bytes + key.size(), page.data, count * sizeof(int32_t));
    key = Sha256Bytes(bytes, key.size() + count * sizeof(int32_t));
    page = page.From(static_cast<int64_t>(count));
  } while (page.size > 0);
  return key;
}

PageKey ValueKey(const PageKey& page, int32_t group) noexcept {
  unsigned char bytes[sizeof(PageKey) + sizeof(group)];
  std::memcpy(bytes, page.data(), page.size());
  std::memcpy(bytes + page.size(), &group, sizeof(group));
  return Sha256Bytes(bytes, sizeof(bytes));
}

}  // namespace pagedkv
