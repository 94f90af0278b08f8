// SPDX-License-Identifier: Apache-2.0
/*!
 * \file token_tree.h
 * \brief The nodes of a sequence that no commit has decided about: a forest that grows in rounds.
 *
 * A node is a position of the sequence, after all that is committed, and has the index by which it
 * was appended. Its parent has a lower index; a node without one is a root, whenever it comes. The
 * RoPE position of a node is the number of committed positions plus its depth.
 */
#ifndef TVM_PAGEDKV_STATE_TOKEN_TREE_H_
#define TVM_PAGEDKV_STATE_TOKEN_TREE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pagedkv {

/*! \brief Integers that someone else owns. */
struct IntSpan {
  const int64_t* data;
  size_t size;
};

class TokenTree {
 public:
  /*! \brief What stands for the parent of a root. */
  static constexpr int32_t kNoParent = -1;

  bool empty() const { return parents_.empty(); }
  int64_t size() const { return static_cast<int64_t>(parents_.size()); }
  /*! \brief Ancestors of a node. */
  int32_t depth(int64_t node) const { return depths_[node]; }
  /*! \brief Whether every node is the child of the one before it, and the first one a root. */
  bool is_chain() const { return chain_length_ == size(); }

  /*!
   * \brief Whether the tree with these parents after its nodes would still be a chain.
   * \param sequence_id For messages.
   * \throws Error (ValueError) where a parent is neither an earlier node nor kNoParent.
   */
  bool CheckParents(IntSpan parents, int64_t sequence_id) const;
  /*! \brief Makes room for so many nodes more: to append them then cannot fail. */
  void Reserve(int64_t count);
  /*! \brief Appends nodes with parents that CheckParents has seen. */
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

#endif  // TVM_PAGEDKV_STATE_TOKEN_TREE_H_
