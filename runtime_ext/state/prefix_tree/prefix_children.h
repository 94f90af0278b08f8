// SPDX-License-Identifier: Apache-2.0
/*!
 * \file prefix_children.h
 * \brief The children of a node of a prefix tree, in the order of their first pages.
 *
 *     skip 2: all children begin with (a b), heads are the next two tokens
 *
 *     blocks  [ c d | c e | f f ]  [ g a | g g | h x | k b ]  ...
 *
 * A lookup among hundreds of thousands of siblings costs as much as the cache lines that it
 * touches. So children are a sorted list in blocks, and each has the two tokens that follow what
 * all siblings share as a number beside its pointer. Only children with equal heads are compared
 * by the tokens in their nodes.
 */
#ifndef TVM_PAGEDKV_STATE_PREFIX_TREE_PREFIX_CHILDREN_H_
#define TVM_PAGEDKV_STATE_PREFIX_TREE_PREFIX_CHILDREN_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "state/host_memory/page_key.h"

namespace pagedkv {

struct PrefixNode;

class PrefixChildren {
 public:
  PrefixChildren();
  ~PrefixChildren();
  PrefixChildren(const PrefixChildren&) = delete;
  PrefixChildren& operator=(const PrefixChildren&) = delete;

  int64_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  /*! \brief The first child. There must be one. */
  PrefixNode* front() const { return blocks_.front().children.front().node.get(); }

  /*!
   * \brief Finds the child whose first page has the most tokens in common with a page.
   * \param child Unchanged when no child has one.
   * \return How many.
   */
  int64_t Find(TokenSpan page, PrefixNode** child) const;
  /*! \brief Makes room for a first child, which Insert then adds without fail. May throw. */
  void Reserve();
  /*! \brief Adds a child whose first page no other begins with. May throw std::bad_alloc. */
  PrefixNode* Insert(std::unique_ptr<PrefixNode> node);
  std::unique_ptr<PrefixNode> Remove(const PrefixNode* node) noexcept;
  /*! \brief Puts a node in the place of another one with the same first page. */
  std::unique_ptr<PrefixNode> Replace(const PrefixNode* node,
                                      std::unique_ptr<PrefixNode> other) noexcept;

  /*! \brief Calls visit(const PrefixNode&) for each child in order. */
  template <typename Visit>
  void ForEach(Visit visit) const {
    for (const Block& block : blocks_) {
      for (const Child& child : block.children) visit(*child.node);
    }
  }
  /*! \throws Error (RuntimeError) when heads, sizes or blocks are wrong. */
  void CheckIntegrity() const;

 private:
  static constexpr size_t kMaxBlock = 128;
  struct Child {
    uint64_t head;
    std::unique_ptr<PrefixNode> node;
  };
  struct Block {
    uint64_t first_head;
    std::vector<Child> children;
  };
  struct Place {
    size_t block, index;
  };

  uint64_t HeadOf(TokenSpan page) const;
  /*! \brief The first child behind the page or equal to it; it may be the end of a block. */
  Place LowerBound(uint64_t head, TokenSpan page) const;
  int64_t NumCommonWith(uint64_t head, TokenSpan page, const Child& child) const;
  /*! \brief The location of a child. */
  Place PlaceOf(const PrefixNode* node) const;
  void SetSkip(int64_t skip) noexcept;

  int64_t skip_ = 0;  // tokens that all first pages begin with, or fewer
  int64_t size_ = 0;
  std::vector<Block> blocks_;    // none is empty
  std::vector<Child> reserved_;  // memory for a first child
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_PREFIX_TREE_PREFIX_CHILDREN_H_
