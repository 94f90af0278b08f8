// SPDX-License-Identifier: Apache-2.0
/*!
 * \file prefix_tree.h
 * \brief A radix tree over token ids with page granularity: which pages hold the K and V of a text.
 *
 *     root --[ a b c d | e f g h | i j k l ]--+--[ m n o p ]        page_size 4
 *                 node of three pages         '--[ m n q r | s t u v ]--[ w x ]
 *
 * A node is a run of pages without a branch. Texts branch at page boundaries, so siblings may begin
 * with the same tokens, but none is the beginning of another. A page with fewer tokens than
 * page_size is a leaf of its own. Token ids are compared, not hashes. Each namespace (salt) has a
 * root.
 *
 * For each page of text and each layer group the tree stores a page of the pool with its
 * generation, and it is a keeper of that page (see page_pool.h). It owns no page: pools reclaim
 * pages without asking, and the generation tells. A page of the pool is stored once. When it is
 * stored for another text, the end of a leaf that has lost all its pages is erased.
 */
#ifndef TVM_PAGEDKV_STATE_PREFIX_TREE_PREFIX_TREE_H_
#define TVM_PAGEDKV_STATE_PREFIX_TREE_PREFIX_TREE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "state/pages/page_pool.h"
#include "state/prefix_tree/prefix_node.h"

namespace pagedkv {

class PrefixTree {
 public:
  /*! \brief A page boundary of a text that goes through `node`, or ends above it. It keeps the
   * text.
   */
  struct Cursor {
    PrefixNode* node;
    int64_t num_pages;  // of text before it
  };
  /*! \brief One page of text. */
  struct TextPage {
    PrefixNode* node;
    int64_t index;  // in the text
  };
  /*! \brief The part of a text that the tree has; valid until the tree changes. */
  struct Path {
    PrefixNode* node = nullptr;            // the root, or the node of the last whole page
    std::vector<const StoredPage*> pages;  // [page] -> [group], whole pages
    std::vector<PageKey> keys;             // [page] in a tree with keys
    const StoredPage* partial = nullptr;   // [group] a page that begins with the next tokens
    int64_t num_partial = 0;               // how many of them
  };

  /*! \brief The pools must outlive the tree. */
  PrefixTree(int32_t page_size, std::vector<PagePool>* pools);
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;
  ~PrefixTree() { Clear(); }

  /*!
   * \brief Keeps a key for each full page of text from now on.
   * \param space See RootKey.
   * \throws Error (ValueError) when the tree has texts.
   */
  void EnableKeys(std::string space);
  bool has_keys() const { return has_keys_; }
  const std::string& key_space() const { return key_space_; }

  /*! \brief Finds the longest beginning of a text. Its pages may have been reclaimed. */
  void Find(const std::string& salt, TokenSpan tokens, Path* path) const;

  // What is not noexcept may throw std::bad_alloc; then texts and cursors are as before.
  /*! \brief A cursor at the beginning of the texts of a namespace. */
  Cursor Enter(const std::string& salt);
  /*! \brief A cursor within the text that ends with `node`. */
  Cursor EnterAt(PrefixNode* node, int64_t num_pages) noexcept;
  void Leave(const Cursor& cursor) noexcept;
  void MoveBack(Cursor* cursor, int64_t num_pages) noexcept;
  /*! \brief The tokens of a page of text before the cursor. */
  TokenSpan TokensBefore(const Cursor& cursor, int64_t index) const noexcept;
  /*! \brief A page of text before the cursor. */
  TextPage At(const Cursor& cursor, int64_t index) const noexcept;
  /*! \brief Returns the text that the key of a full page stands for. The tree must have keys. */
  PageText TextOf(const TextPage& text) const noexcept;
  /*! \brief The text that a known page of the pool is stored for. \return Whether there is one. */
  bool FindTextOf(int32_t group, int32_t page, TextPage* text) const noexcept;
  /*! \brief Counts a hit of a full page. \return How many it has. */
  int64_t CountHit(const TextPage& text) noexcept {
    return ++text.node->keyed[text.index - text.node->begin].num_hits;
  }
  /*! \brief Moves a cursor over a whole page of text, which is added where the tree lacks it. */
  TextPage Advance(Cursor* cursor, TokenSpan tokens);
  /*!
   * \brief Adds a page that is not full behind the cursor.
   * \return Its node is null where a longer page begins with these tokens: then nothing is added.
   */
  TextPage AddPartial(Cursor* cursor, TokenSpan tokens);
  /*! \brief Stores a page of the pool, unless the one that is stored is still known. */
  void Store(const TextPage& text, int32_t group, int32_t page) noexcept;
  /*! \brief Erases all texts; no cursor is valid any more. */
  void Clear() noexcept;

  /*! \brief Whether the page has the content that it had when it was stored. */
  bool IsKnown(size_t group, const StoredPage& stored) const {
    return stored.page >= 0 && (*pools_)[group].Generation(stored.page) == stored.generation;
  }
  int64_t num_nodes() const { return num_nodes_; }
  int64_t num_tokens() const { return num_tokens_; }

  /*!
   * \brief Checks the tree and adds its keepers to [group][page].
   * \param num_cursors The cursors that the caller has at each node.
   * \throws Error (RuntimeError) that names the broken invariant.
   */
  void CheckIntegrity(std::map<const PrefixNode*, int64_t> num_cursors,
                      std::vector<std::vector<int32_t>>* num_keepers) const;

 private:
  size_t num_groups() const { return pools_->size(); }
  /*! \brief The child whose first page has the most tokens in common. \return How many. */
  int64_t FindChild(const PrefixNode& node, TokenSpan tokens, PrefixNode** child) const;
  std::unique_ptr<PrefixNode> MakeNode(PrefixNode* parent, int64_t begin) const;
  PrefixNode* AddChild(PrefixNode* parent, TokenSpan tokens);
  /*! \brief Splits a node before its page `offset`. \return The new node above it. */
  PrefixNode* Split(PrefixNode* node, int64_t offset);
  /*! \brief Lets a cursor refer to the node that has the page before it. */
  void MoveUp(Cursor* cursor) noexcept;
  void MoveTo(Cursor* cursor, PrefixNode* node, int64_t num_pages) noexcept;
  bool IsKnown(const PrefixNode& node, int64_t offset) const;
  /*! \brief Removes what is stored for the pages from `offset` on. */
  void Forget(PrefixNode* node, int64_t offset) noexcept;
  void Erase(PrefixNode* node) noexcept;
  /*! \brief Erases text without pages from the end of a leaf that no cursor keeps. */
  void Trim(PrefixNode* node) noexcept;
  void CheckNode(const PrefixNode& node) const;

  int64_t page_size_;
  std::vector<PagePool>* pools_;
  bool has_keys_ = false;
  std::string key_space_;
  std::map<std::string, std::unique_ptr<PrefixNode>> roots_;
  std::vector<std::vector<TextPage>> texts_;  // [group][page] the text that it is stored for
  int64_t num_nodes_ = 0;                     // without roots
  int64_t num_tokens_ = 0;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_PREFIX_TREE_PREFIX_TREE_H_
