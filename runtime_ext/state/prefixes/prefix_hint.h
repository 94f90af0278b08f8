// SPDX-License-Identifier: Apache-2.0
/*!
 * \file prefix_hint.h
 * \brief What a caller knows of the pages of a text; see prefix_hints.h.
 */
#ifndef TVM_PAGEDKV_STATE_PREFIXES_PREFIX_HINT_H_
#define TVM_PAGEDKV_STATE_PREFIXES_PREFIX_HINT_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pagedkv {

struct PrefixHint {
  int64_t num_pages = 0;  // of text
  uint8_t priority = 0;
  bool is_pin = false;
  int64_t expiry_us = 0;
  std::vector<int64_t> first_pages;       // [pool] the first page of text
  std::vector<std::vector<bool>> pinned;  // [pool][page of text] of a pin

  bool Covers(int32_t pool, int64_t index) const {
    return index >= first_pages[static_cast<size_t>(pool)] && index < num_pages;
  }
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_PREFIXES_PREFIX_HINT_H_
