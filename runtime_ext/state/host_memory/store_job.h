// SPDX-License-Identifier: Apache-2.0
/*!
 * \file store_job.h
 * \brief A job of a store's worker: one call of the store, with keys and addresses in host memory.
 *
 * A lookup finds the values of a text that a store has and brings them into host memory: jobs of
 * kind kExists, a choice of what is useful, then jobs of kind kGet.
 */
#ifndef TVM_PAGEDKV_STATE_HOST_MEMORY_STORE_JOB_H_
#define TVM_PAGEDKV_STATE_HOST_MEMORY_STORE_JOB_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "state/host_memory/page_key.h"

namespace pagedkv {

struct StoreLookup {
  struct Value {
    int64_t page;  // of `keys` and `tokens`
    int32_t group;
    bool is_required;  // without it, the values behind it are useless
  };

  /*! \brief The text of a page. */
  PageText TextOf(int64_t page) const {
    return {keys[page + 1], keys[page], {tokens.data() + page * page_size, page_size}};
  }

  int64_t page_size = 0;
  std::vector<PageKey> keys;    // that before the first page, then one for each
  std::vector<int32_t> tokens;  // of all pages
  std::vector<Value> values;    // in the order of pages
  /*! \brief [value] that the store has -> indices of values to get, in order. */
  std::function<std::vector<size_t>(const std::vector<bool>&)> choose;
  bool is_question = false;  // it only asks, and chooses nothing

  // The progress, which the tier keeps.
  int64_t ticket = 0;
  bool is_in_job = false;
  bool is_cancelled = false;
  bool has_chosen = false;
  std::vector<bool> is_there;  // [value] of those that were asked for so far
  std::vector<size_t> chosen;
  size_t num_gotten = 0;  // of `chosen`
};

struct StoreJob {
  enum class Kind { kExists, kGet, kPut };

  int64_t id = 0;
  Kind kind = Kind::kPut;
  std::vector<PageKey> keys;
  // Empty for kExists.
  std::vector<int64_t> addresses;
  std::vector<int64_t> sizes;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_HOST_MEMORY_STORE_JOB_H_
