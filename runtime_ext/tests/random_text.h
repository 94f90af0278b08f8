// SPDX-License-Identifier: Apache-2.0
/*!
 * \file random_text.h
 * \brief Texts of random tests, and the content that their tokens stand for.
 */
#ifndef TVM_PAGEDKV_TESTS_RANDOM_TEXT_H_
#define TVM_PAGEDKV_TESTS_RANDOM_TEXT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "state/host_memory/page_key.h"

namespace pagedkv {

using Tokens = std::vector<int32_t>;
using Contents = std::vector<uint32_t>;

inline TokenSpan Span(const Tokens& tokens) {
  return {tokens.data(), static_cast<int64_t>(tokens.size())};
}

inline uint32_t Next(uint32_t content, int32_t token) {
  return (content ^ static_cast<uint32_t>(token + 1)) * 16777619u + 12345u;
}

/*! \brief A sequence as it should be. */
struct Text {
  std::string salt;
  Tokens tokens;      // of all positions
  Contents contents;  // of all positions
  size_t num_recorded = 0;
  bool is_altered = false;  // by debug_set_kv: no tokens stand for its contents

  uint32_t last() const { return contents.empty() ? (salt.empty() ? 1 : 2) : contents.back(); }
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_TESTS_RANDOM_TEXT_H_
