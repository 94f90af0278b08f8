// SPDX-License-Identifier: Apache-2.0
/*!
 * \file prefix_index.h
 * \brief Finds the pages of earlier texts: by which tokens they were computed, and for which salt.
 *
 * A sequence whose tokens are recorded adds its full pages to the prefix tree as soon as their rows
 * are committed, and its last page when it is removed. Others find them, also while the sequence is
 * in progress. A hit must be complete in every layer group; a group with a window needs only the
 * window of the next row. A hit in the middle of a page shares that page, which the next write
 * copies.
 *
 * Recorded tokens are those of the first positions of a sequence, without gaps. Only committed
 * positions have any: not nodes of a token tree, and not what a receive is still bringing. A
 * sequence with a window of its own has none.
 */
#ifndef TVM_PAGEDKV_STATE_SEQUENCES_PREFIX_INDEX_H_
#define TVM_PAGEDKV_STATE_SEQUENCES_PREFIX_INDEX_H_

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "state/pages/page_pool.h"
#include "state/prefixes/prefix_tree.h"
#include "state/sequences/page_geometry.h"
#include "state/sequences/sequence.h"
#include "state/sequences/window_histories.h"

namespace pagedkv {

class PrefixIndex {
 public:
  struct Counts {
    int64_t lookups = 0;        // sequences added with tokens
    int64_t hits = 0;           // those that reuse a position at least
    int64_t tokens = 0;         // that were looked up
    int64_t reused_tokens = 0;  // that need not be computed
  };

  /*! \brief All must outlive this. */
  PrefixIndex(const PageGeometry* geometry, std::vector<PagePool>* pools,
              const WindowHistories* histories)
      : geometry_(geometry),
        pools_(pools),
        histories_(histories),
        tree_(geometry->page_size(), pools) {}

  /*!
   * \brief How many positions of a text a new sequence would reuse.
   *
   * Never all of them: the last token must be computed, for what the model says next.
   */
  int64_t Match(const std::string& salt, TokenSpan tokens) const;
  /*!
   * \brief Gives a new, empty sequence the pages that Match finds, and records their tokens.
   * \return The length that the caller gives the sequence. May throw std::bad_alloc.
   */
  int64_t Begin(Sequence* sequence, const std::string& salt, TokenSpan tokens);
  /*!
   * \brief Records the tokens of the positions behind those that are recorded.
   * \throws Error (ValueError) when there are no such positions.
   */
  void Record(Sequence* sequence, TokenSpan tokens);
  /*! \brief Positions whose tokens are recorded. */
  int64_t NumRecorded(const Sequence& sequence) const {
    return sequence.tokens == nullptr ? 0 : NumRecorded(*sequence.tokens);
  }

  // What happens to a sequence. None does anything for one without tokens.
  /*! \brief Adds the full pages that are recorded: their rows are there. */
  void AddPages(Sequence* sequence) noexcept {
    if (sequence->tokens != nullptr) AddRecordedPages(sequence);
  }
  /*! \brief Drops the tokens of the positions from `length` on. */
  void Truncate(Sequence* sequence, int64_t length) noexcept {
    if (sequence->tokens != nullptr) TruncateRecord(sequence->tokens.get(), length);
  }
  /*! \brief Memory for the tokens of a fork; null when there are none. May throw std::bad_alloc. */
  std::unique_ptr<TokenRecord> ReserveFork(const Sequence& source) const;
  /*! \brief Gives a fork the tokens of the positions that it shares. */
  void Fork(const Sequence& source, std::unique_ptr<TokenRecord> record, Sequence* target) noexcept;
  /*! \brief Adds the last page as well; nothing is recorded from now on. */
  void Finish(Sequence* sequence) noexcept;
  /*! \brief Forgets the tokens: the pages no longer have what they stand for. */
  void Drop(Sequence* sequence) noexcept;
  /*! \brief Forgets all texts. There must be no sequences with tokens. */
  void Clear() noexcept { tree_.Clear(); }

  const PrefixTree& tree() const { return tree_; }
  const Counts& counts() const { return counts_; }

  /*! \brief Checks the tree and adds its keepers to [group][page]. \throws Error (RuntimeError). */
  void CheckIntegrity(const std::unordered_map<int64_t, Sequence>& sequences,
                      std::vector<std::vector<int32_t>>* num_keepers) const;

 private:
  int64_t NumRecorded(const TokenRecord& record) const {
    return record.cursor.num_pages * geometry_->page_size() +
           static_cast<int64_t>(record.tail.size());
  }
  /*! \brief Positions that may have tokens. */
  static int64_t NumRecordable(const Sequence& sequence) {
    return sequence.receive ? sequence.receive->begin : sequence.committed_length();
  }
  std::unique_ptr<TokenRecord> ReserveRecord(int64_t num_tokens) const;
  /*! \brief A page of the text that Match has looked up. */
  const StoredPage& StoredAt(int64_t index, int32_t group) const;
  bool IsKnown(int64_t index, int32_t group) const;
  /*! \brief The longest text, up to `length`, that every group still has for its next row. */
  int64_t LongestKnown(int64_t length) const;
  void AddRecordedPages(Sequence* sequence) noexcept;
  void TruncateRecord(TokenRecord* record, int64_t length) noexcept;
  void StorePages(const Sequence& sequence, const PrefixTree::TextPage& text) noexcept;

  const PageGeometry* geometry_;
  std::vector<PagePool>* pools_;
  const WindowHistories* histories_;
  PrefixTree tree_;
  Counts counts_;
  mutable PrefixTree::Path path_;  // scratch
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_SEQUENCES_PREFIX_INDEX_H_
