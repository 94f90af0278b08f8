// SPDX-License-Identifier: Apache-2.0
/*!
 * \file token_tree.h
 * \brief The uncommitted token tree nodes of a sequence: a forest that grows in rounds.
 *
 * A node is a position of the sequence behind the committed ones. Nodes count in the order in which
 * they were appended, so a parent has a lower index. A node without a parent is a root; roots may
 * come in any round. The RoPE position of a node is the number of committed positions plus its
 * depth.
 */
#ifndef TVM_PAGEDKV_STATE_SEQUENCES_TOKEN_TREE_H_
#define TVM_PAGEDKV_STATE_SEQUENCES_TOKEN_TREE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pagedkv {

/*! \brief A view of integers. */
struct IntSpan {
  const int64_t* data;
  size_t size;
};

class TokenTree {
 public:
  /*! \brief The parent of a root. */
  static constexpr int32_t kNoParent = -1;

  bool empty() const { return parents_.empty(); }
  int64_t size() const { return static_cast<int64_t>(parents_.size()); }
  /*! \brief The parent of each node. */
  const std::vector<int32_t>& parents() const { return parents_; }
  /*! \brief Number of ancestors. */
  int32_t depth(int64_t node) const { return depths_[node]; }
  /*! \brief Whether the first node is a root and every other one the child of its predecessor. */
  bool is_chain() const { return chain_length_ == size(); }

  /*!
   * \brief Whether the tree would still be a chain with nodes of these parents appended.
   * \param sequence_id For error messages.
   * \throws Error (ValueError) where a parent is neither an earlier node nor kNoParent.
   */
  bool CheckParents(IntSpan parents, int64_t sequence_id) const;
  /*! \brief Makes room for `count` more nodes, so that appending them cannot fail. */
  void Reserve(int64_t count);
  /*! \brief Appends nodes with parents that CheckParents has accepted. */
  void Append(IntSpan parents);
  /*! \brief Drops the nodes from `size` on; there may be fewer. */
  void Truncate(int64_t size) noexcept;

  /*! \brief The nodes from the root above `leaf` down to it. */
  std::vector<int32_t> PathTo(int64_t leaf) const;
  /*!
   * \brief Every node's depth-first number and the end of its subtree, [size, 2].
   *
   * Node j is an ancestor of node i, or i itself, where out[j][0] <= out[i][0] < out[j][1].
   */
  void FillOrder(int32_t* out) const noexcept;

  /*! \throws Error (RuntimeError) that says what is broken. */
  void CheckIntegrity(int64_t sequence_id) const;

 private:
  std::vector<int32_t> parents_;
  std::vector<int32_t> depths_;
  int64_t chain_length_ = 0;  // nodes before the first one that is not the child of its predecessor
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_SEQUENCES_TOKEN_TREE_H_
