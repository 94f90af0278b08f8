// SPDX-License-Identifier: Apache-2.0
/*!
 * \file expected_tokens.h
 * \brief The pools of a sequence table that is fuzzed, and what each of its sequences must hold.
 */
#ifndef TVM_PAGEDKV_FUZZ_EXPECTED_TOKENS_H_
#define TVM_PAGEDKV_FUZZ_EXPECTED_TOKENS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

#include "bytes.h"
#include "state/sequences/page_geometry.h"

namespace pagedkv {

struct Sizes {
  int32_t page_size;
  std::vector<int32_t> num_pages;
  std::vector<int64_t> windows;
  std::vector<StateGroup> state_groups;
  std::vector<int32_t> num_states;

  explicit Sizes(Bytes* bytes) {
    page_size = 1 << bytes->Between(0, 3);
    const int64_t num_groups = bytes->Between(0, 3);  // a stage may have no layers
    for (int64_t g = 0; g < num_groups; ++g) {
      num_pages.push_back(static_cast<int32_t>(bytes->Between(1, 40)));
      windows.push_back(bytes->Next() % 2 ? bytes->Between(-20, 20) : 0);
    }
    if (num_groups == 0 || bytes->Next() % 2) return;
    windows.back() = 0;  // of ingredients
    state_groups.push_back(
        {static_cast<int32_t>(num_groups) - 1, page_size << bytes->Between(0, 2)});
    num_states.push_back(static_cast<int32_t>(bytes->Between(1, 24)));
  }
};

/*! \brief The rows that a sequence must hold. */
struct Tokens {
  std::vector<int32_t> all;      // those of tree nodes last
  std::vector<int64_t> parents;  // of each node; -1: none
  size_t num_held = 0;           // positions that the window leaves between steps; 0: all
  size_t num_sinks = 0;
  bool has_dropped = false;

  size_t num_committed() const { return all.size() - parents.size(); }
  void Truncate(size_t length) {
    parents.resize(length > num_committed() ? length - num_committed() : 0);
    all.resize(length);
    has_dropped = has_dropped && length > num_sinks;
  }
  /*! \brief The token before a new row behind a node, or behind all rows (-1); 0: none. In a tree,
   * -1 is the last committed row. */
  int32_t Before(int64_t parent, bool is_node) const {
    if (parent >= 0) return all[num_committed() + parent];
    const size_t end = is_node ? num_committed() : all.size();
    return end > 0 ? all[end - 1] : 0;
  }
  void Slide() {
    if (num_held == 0 || all.size() <= num_held) return;
    const auto first = all.begin() + static_cast<ptrdiff_t>(num_sinks);
    all.erase(first, first + static_cast<ptrdiff_t>(all.size() - num_held));
    has_dropped = true;
  }
  void Commit(int64_t leaf) {
    std::vector<int32_t> path;
    for (; leaf >= 0; leaf = parents[leaf]) path.push_back(all[num_committed() + leaf]);
    Truncate(num_committed());
    all.insert(all.end(), path.rbegin(), path.rend());
  }
};

/*! \brief Tokens of rows that a layer left out, and of rows computed from them. */
class AbsentRows {
 public:
  /*! \brief Notes the token of a new row, before it joins its sequence or tree. */
  void Add(int32_t token, bool is_written, const Tokens& tokens, int64_t parent) {
    if (!is_written) unwritten_.insert(token);
    if (!is_written || DependsOnTainted(tokens, parent)) tainted_.insert(token);
  }
  bool IsUnwritten(int32_t token) const { return unwritten_.count(token) > 0; }
  bool IsTainted(int32_t token) const { return tainted_.count(token) > 0; }

 private:
  bool DependsOnTainted(const Tokens& tokens, int64_t parent) const {
    const auto end = tokens.all.begin() + static_cast<ptrdiff_t>(tokens.num_committed());
    if (parent >= 0 && IsTainted(end[parent])) return true;
    return std::any_of(tokens.all.begin(), end, [this](int32_t token) { return IsTainted(token); });
  }

  std::set<int32_t> unwritten_;
  std::set<int32_t> tainted_;  // these, and those computed from them
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_FUZZ_EXPECTED_TOKENS_H_
