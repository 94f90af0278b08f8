// SPDX-License-Identifier: Apache-2.0
/*!
 * \file token_tree.cc
 * \brief The uncommitted token tree nodes of a sequence.
 */
#include "state/sequences/token_tree.h"

#include <algorithm>

#include "base/error.h"

namespace pagedkv {

bool TokenTree::CheckParents(IntSpan parents, int64_t sequence_id) const {
  bool stays_chain = is_chain();
  for (size_t i = 0; i < parents.size; ++i) {
    const int64_t node = size() + static_cast<int64_t>(i), parent = parents.data[i];
    if (parent < kNoParent || parent >= node) {
      Raise(kValueError, "the parent of node ", node, " of sequence ", sequence_id, " (row ", i,
            " of its rows) must be an earlier node or ", kNoParent, ", in [-1, ", node, "), got ",
            parent);
    }
    stays_chain = stays_chain && parent == node - 1;
  }
  return stays_chain;
}

void TokenTree::Reserve(int64_t count) {
  for (std::vector<int32_t>* each : {&parents_, &depths_}) {
    const size_t needed = each->size() + count;
    if (needed > each->capacity()) each->reserve(std::max(needed, 2 * each->capacity()));
  }
}

void TokenTree::Append(IntSpan parents) {
  for (size_t i = 0; i < parents.size; ++i) {
    const auto parent = static_cast<int32_t>(parents.data[i]);
    if (is_chain() && parent == size() - 1) ++chain_length_;
    depths_.push_back(parent == kNoParent ? 0 : depths_[parent] + 1);
    parents_.push_back(parent);
  }
}

void TokenTree::Truncate(int64_t size) noexcept {
  if (size >= this->size()) return;
  parents_.resize(size);
  depths_.resize(size);
  chain_length_ = std::min(chain_length_, size);
}

std::vector<int32_t> TokenTree::PathTo(int64_t leaf) const {
  std::vector<int32_t> path(depths_[leaf] + 1);
  auto node = static_cast<int32_t>(leaf);
  for (auto it = path.rbegin(); it != path.rend(); ++it, node = parents_[node]) *it = node;
  return path;
}

void TokenTree::FillOrder(int32_t* out) const noexcept {
  // out[i][1] first holds the size of i's subtree, then where its next child begins, then its end.
  for (int64_t i = 0; i < size(); ++i) out[2 * i + 1] = 1;
  for (int64_t i = size() - 1; i >= 0; --i) {
    if (parents_[i] != kNoParent) out[2 * parents_[i] + 1] += out[2 * i + 1];
  }
  int32_t next_root = 0;
  for (int64_t i = 0; i < size(); ++i) {
    int32_t& begin = parents_[i] == kNoParent ? next_root : out[2 * parents_[i] + 1];
    const int32_t subtree_size = out[2 * i + 1];
    out[2 * i] = begin;
    out[2 * i + 1] = begin + 1;
    begin += subtree_size;
  }
}

void TokenTree::CheckIntegrity(int64_t sequence_id) const {
  TokenTree rebuilt;
  for (int64_t i = 0; i < size(); ++i) {
    const int64_t parent = parents_[i];
    rebuilt.CheckParents({&parent, 1}, sequence_id);
    rebuilt.Append({&parent, 1});
  }
  if (rebuilt.depths_ != depths_ || rebuilt.chain_length_ != chain_length_) {
    Raise(kRuntimeError, "the token tree of sequence ", sequence_id, " has ", size(),
          " nodes whose depths do not match their parents");
  }
}

}  // namespace pagedkv
