// SPDX-License-Identifier: Apache-2.0
/*!
 * \file prefix_cache.h
 * \brief The prefix cache: keeps the pages of earlier texts by tokens and salt, for later
 * sequences.
 *
 *     PrefixCalls       calls from outside: token ids are checked, phases and waits (prefixes/)
 *       |
 *     SequenceTable     adds and removes sequences, which call ..
 *       |
 *     PrefixCache       .. this: records tokens, hands out pages, saves pages that are reclaimed
 *       |-- PrefixTree      which page of a pool each page of text is on (state/prefix_tree)
 *       |-- PrefixLookup    finds the longest beginning of a text in the tree and in host memory
 *       |-- EvictionHints   what callers know of texts: priorities, pins
 *       |-- PageSaver       copies pages to host memory: PageTransfers (prefixes/)
 *       '-- HostMemory      pages that left the pools, and jobs for a store (state/host_memory)
 *             |-- HostSlots     where they lie, and which one goes first
 *             '-- StoreQueue    values and lookups that wait for a worker
 *
 * LowerTiers (prefixes/) opens host memory and fills pages from it.
 *
 * A sequence whose tokens are recorded adds its full pages to the prefix tree as soon as their rows
 * are committed, and its last page when it is removed. Others find them, also while the sequence is
 * in progress. A hit must be complete in every layer group; a group with a window needs only the
 * window of the next row. A hit in the middle of a page shares that page, which the next write
 * copies.
 *
 * Recorded tokens are those of the first positions of a sequence, without gaps. Only publishable
 * positions have any: not nodes of a token tree, not what a receive is still bringing, and not rows
 * that a layer left out. A sequence with a window of its own has none.
 */
#ifndef TVM_PAGEDKV_STATE_PREFIX_CACHE_PREFIX_CACHE_H_
#define TVM_PAGEDKV_STATE_PREFIX_CACHE_PREFIX_CACHE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "state/pages/page_pool.h"
#include "state/prefix_cache/eviction_hints.h"
#include "state/prefix_cache/prefix_lookup.h"
#include "state/prefix_tree/prefix_tree.h"
#include "state/sequences/page_geometry.h"
#include "state/sequences/sequence.h"
#include "state/sequences/window_histories.h"

namespace pagedkv {

/*! \brief A page that host memory should have. */
struct PageSave {
  int32_t group;
  int32_t page;
  PageText text;
};

/*! \brief Copies pages of the pools to host memory, if it lacks them. */
class PageSaver {
 public:
  virtual ~PageSaver() = default;
  /*! \brief The copies are in the order of what is done with the pages before and after the call.
   */
  virtual void Save(const std::vector<PageSave>& saves) noexcept = 0;
};

/*! \brief When full pages are copied to host memory. */
enum class TierWrites {
  kThrough,    // as soon as they can be found
  kBack,       // when the pool reclaims them
  kSelective,  // when they have been found `min_hits` times
};

struct TierPolicy {
  TierWrites writes = TierWrites::kBack;
  int64_t min_hits = 1;
};

class PrefixCache {
 public:
  struct Counts {
    int64_t lookups = 0;        // sequences added with tokens
    int64_t hits = 0;           // those that reuse a position at least
    int64_t tokens = 0;         // that were looked up
    int64_t reused_tokens = 0;  // that need not be computed
    int64_t host_tokens = 0;    // of these, on pages that came from host memory
    int64_t store_tokens = 0;   // of these, on pages that had come there from a store
    int64_t failed_loads = 0;   // hits whose values were gone or damaged when they were to be read
  };

  /*! \brief All must outlive this. */
  PrefixCache(const PageGeometry* geometry, std::vector<PagePool>* pools, PagePins* pins,
              const WindowHistories* histories, const RecurrentStates* states)
      : geometry_(geometry),
        pools_(pools),
        histories_(histories),
        states_(states),
        tree_(geometry->page_size(), pools),
        hints_(geometry, pools, pins, &tree_),
        lookup_(geometry, pools, &tree_) {}
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  /*!
   * \brief Keeps pages in host memory from now on. Both must outlive this.
   * \param space What all texts have in common; see RootKey.
   * \throws Error (ValueError) when tokens have been recorded, or there is host memory.
   */
  void SetHostMemory(HostMemory* host_memory, PageSaver* saver, TierPolicy policy,
                     std::string space);
  HostMemory* host_memory() const { return host_memory_; }

  /*!
   * \brief Returns how many positions of a text a new sequence would reuse.
   *
   * Never all of them: the last token must be computed for its logits.
   */
  int64_t Match(const std::string& salt, TokenSpan tokens) const {
    return lookup_.Find(salt, tokens);
  }
  /*! \brief Begins to bring pages of a text from the store. \return The lookup's ticket, or 0. */
  int64_t Prefetch(const std::string& salt, TokenSpan tokens) const;
  /*!
   * \brief Returns the tier of each full page of a text. A store counts if it answers in time.
   * \param wait Waits for the lookup with a ticket; whether it has ended. The index may change
   *   meanwhile.
   * \return [page][group]; what has not been found in time is nowhere.
   */
  std::vector<PagePlace> Locate(const std::string& salt, TokenSpan tokens,
                                const std::function<bool(int64_t)>& wait) const;
  /*!
   * \brief Gives a new, empty sequence the pages that Match finds, and records their tokens.
   * \param loads Pages that the caller fills from slots of host memory, before FinishLoads.
   * \return The length that the caller gives the sequence. May throw std::bad_alloc.
   */
  int64_t Begin(Sequence* sequence, const std::string& salt, TokenSpan tokens,
                std::vector<PageLoad>* loads);
  /*! \brief The pages have their content: others find them. */
  void FinishLoads(Sequence* sequence, const std::vector<PageLoad>& loads) noexcept;
  /*! \brief Does not count the last Begin as a lookup. */
  void UncountLookup() noexcept {
    const int64_t failed_loads = counts_.failed_loads;
    counts_ = counts_before_;
    counts_.failed_loads = failed_loads;
  }
  /*! \brief Undoes Begin but for the pages, whose sequence is about to be removed. */
  void CancelLoads(Sequence* sequence, const std::vector<PageLoad>& loads) noexcept;
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
  void Clear() noexcept {
    hints_.Clear();
    tree_.Clear();
  }
  /*! \brief Copies what a pool is about to reclaim. */
  void SaveReclaimed(int32_t group, int32_t page) noexcept;

  const PrefixTree& tree() const { return tree_; }
  EvictionHints& hints() { return hints_; }
  const EvictionHints& hints() const { return hints_; }
  /*!
   * \brief Copies the pages that only this text has to host memory, and lets them be evicted first.
   * \return Their number; see EvictionHints::Demote.
   */
  int64_t Demote(const std::string& salt, TokenSpan tokens, bool from_host);
  const Counts& counts() const { return counts_; }

  /*! \brief Checks the tree and adds its keepers to [group][page]. \throws Error (RuntimeError). */
  void CheckIntegrity(const std::unordered_map<int64_t, Sequence>& sequences,
                      std::vector<std::vector<int32_t>>* num_keepers) const;

 private:
  int64_t NumRecorded(const TokenRecord& record) const {
    return record.cursor.num_pages * geometry_->page_size() +
           static_cast<int64_t>(record.tail.size());
  }
  std::unique_ptr<TokenRecord> ReserveRecord(int64_t num_tokens) const;
  /*! \brief Searches, and pins what is to be loaded. */
  int64_t FindAndPin(const std::string& salt, TokenSpan tokens, std::vector<PageLoad>* loads);
  void TakePages(Sequence* sequence, int64_t length, std::vector<PageLoad>* loads) noexcept;
  /*! \brief Notes pages of the pools before those of the hit, for forks and pops. */
  void TakeHistories(Sequence* sequence) noexcept;
  void CountLoads(int64_t length, const std::vector<PageLoad>& loads);
  void CountHits(const TokenRecord& record) noexcept;
  void Unpin(const std::vector<PageLoad>& loads) noexcept;
  bool Touch(const TokenRecord& record, int64_t index) noexcept;
  /*! \brief Marks the pages of a text that it has without a gap as used just now. */
  void TouchKept(TokenRecord* record, int64_t num_new) noexcept;
  void AddRecordedPages(Sequence* sequence) noexcept;
  void TruncateRecord(TokenRecord* record, int64_t length) noexcept;
  /*! \brief Copies pages of text, some of which are in the pools. */
  void SavePages(const std::vector<PrefixTree::TextPage>& texts) noexcept;
  void StorePages(const Sequence& sequence, const PrefixTree::TextPage& text) noexcept;
  void StorePage(const PrefixTree::TextPage& text, int32_t pool, int32_t page) noexcept {
    tree_.Store(text, pool, page);
    hints_.NoteStored(text, pool);
  }

  const PageGeometry* geometry_;
  std::vector<PagePool>* pools_;
  const WindowHistories* histories_;
  const RecurrentStates* states_;
  PrefixTree tree_;
  EvictionHints hints_;
  Counts counts_;
  Counts counts_before_;  // the last Begin
  mutable PrefixLookup lookup_;

  struct Observer final : PageObserver {
    PrefixCache* index;
    int32_t group;
    void BeforeReclaim(int32_t page) noexcept override { index->SaveReclaimed(group, page); }
  };
  HostMemory* host_memory_ = nullptr;
  PageSaver* saver_ = nullptr;
  TierPolicy policy_;
  std::vector<Observer> observers_;  // [group]
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_PREFIX_CACHE_PREFIX_CACHE_H_
