// SPDX-License-Identifier: Apache-2.0
/*!
 * \file recurrent_text.h
 * \brief What a sequence of a model with recurrent layers should be, for random tests.
 */
#ifndef TVM_PAGEDKV_TESTS_RECURRENT_TEXT_H_
#define TVM_PAGEDKV_TESTS_RECURRENT_TEXT_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "random_text.h"
#include "state/sequences/sequence_window.h"

namespace pagedkv::recurrent_states_test {

struct RecurrentText {
  Tokens tokens;  // committed, those included that a window has dropped
  Tokens nodes;   // of a token tree
  std::vector<int64_t> parents;
  bool is_recorded = false;  // added with tokens
  int64_t num_recorded = 0;
  SequenceWindow window;

  /*! \brief Committed positions that the sequence has. */
  int64_t length() const { return static_cast<int64_t>(tokens.size()) - window.num_dropped; }

  /*! \brief The tokens of a node and of those above it. */
  Tokens PathTo(int64_t node) const {
    Tokens path;
    for (; node >= 0; node = parents[node]) path.insert(path.begin(), nodes[node]);
    return path;
  }

  /*! \brief Drops all nodes, and positions from `new_length` on. */
  void Truncate(int64_t new_length) {
    nodes.clear();
    parents.clear();
    tokens.resize(static_cast<size_t>(window.TextLength(new_length)));
    if (new_length <= window.num_sinks) {
      window.num_dropped = 0;
      if (window.size == 0) window.num_sinks = 0;
    }
    num_recorded = std::min(num_recorded, static_cast<int64_t>(tokens.size()));
  }

  void Pop(int64_t count) {
    const auto num_nodes = static_cast<int64_t>(nodes.size());
    if (count > num_nodes) return Truncate(length() - (count - num_nodes));
    nodes.resize(num_nodes - count);
    parents.resize(num_nodes - count);
  }

  /*! \brief The text of a fork, which has no window. */
  RecurrentText Fork(int64_t position) const {
    RecurrentText fork = *this;
    fork.Truncate(position);
    fork.window = window.Prefix(position);
    return fork;
  }

  /*! \brief Drops the positions that have left the window, and returns how many. */
  int64_t Slide() {
    if (window.size == 0) return 0;
    const int64_t count = std::max<int64_t>(length() - window.num_held(), 0);
    window.num_dropped += count;
    return count;
  }
};

}  // namespace pagedkv::recurrent_states_test

#endif  // TVM_PAGEDKV_TESTS_RECURRENT_TEXT_H_
