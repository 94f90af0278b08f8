// SPDX-License-Identifier: Apache-2.0
/*!
 * \file eviction_hints.h
 * \brief What callers know of texts that will be needed again: hints, each with a handle.
 *
 * A hint covers the full pages of a text that a prompt which begins with it reuses: all pages in a
 * layer group without a window, those of the window before its end in others, and the last states.
 * It stays with the text, so pages that are computed or loaded later are covered, too.
 *
 *     root --[ system prompt ]--+--[ agent 1 ]   retain, priority 50
 *               pin             '--[ agent 2 ]
 *
 * A page has the largest priority of the hints that cover it, and pools and host memory evict pages
 * of a smaller one first. A pin is an owner of the pages besides: they count as used. Hints change
 * what is evicted and when, and no result.
 */
#ifndef TVM_PAGEDKV_STATE_PREFIX_CACHE_EVICTION_HINTS_H_
#define TVM_PAGEDKV_STATE_PREFIX_CACHE_EVICTION_HINTS_H_

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "state/host_memory/host_memory.h"
#include "state/pages/page_pins.h"
#include "state/prefix_tree/prefix_tree.h"
#include "state/sequences/page_geometry.h"

namespace pagedkv {

class EvictionHints {
 public:
  static constexpr int64_t kMaxPriority = 100;
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  /*! \brief All must outlive this. */
  EvictionHints(const PageGeometry* geometry, std::vector<PagePool>* pools, PagePins* pins,
                PrefixTree* tree)
      : geometry_(geometry),
        pools_(pools),
        pins_(pins),
        tree_(tree),
        num_pinned_texts_(pools->size(), 0) {}
  EvictionHints(const EvictionHints&) = delete;
  EvictionHints& operator=(const EvictionHints&) = delete;

  void SetHostMemory(HostMemory* host_memory) { host_memory_ = host_memory; }

  // Those that are not noexcept may throw std::bad_alloc; then nothing has changed.
  /*!
   * \brief Lets other pages be evicted before those of a text.
   * \param priority From 1 to kMaxPriority.
   * \param expiry_us The time at which the hint ends; kNever for none.
   * \return The handle.
   * \throws Error (ValueError).
   */
  int64_t Retain(const std::string& salt, TokenSpan tokens, int64_t priority, int64_t expiry_us);
  /*!
   * \brief Keeps the pages of a text in the pools.
   * \throws Error (CacheFullError) where pins would hold more than half of a pool.
   */
  int64_t Pin(const std::string& salt, TokenSpan tokens, int64_t expiry_us);
  /*!
   * \brief Ends a hint.
   * \return False for one that has ended already.
   * \throws Error (KeyError) for a handle that was never given out.
   */
  bool Release(int64_t id);
  /*!
   * \brief Lets the pages that only this text has be evicted before all others.
   *
   * Pages that another text, a running sequence or a hint needs stay as they are.
   * \param from_host Also from host memory.
   * \param pages Gets them, the end of the text first.
   * \return How many pages of the text are its own.
   */
  int64_t Demote(const std::string& salt, TokenSpan tokens, bool from_host,
                 std::vector<PrefixTree::TextPage>* pages);
  /*! \brief Ends the hints whose time is over. */
  void Expire(int64_t now_us) noexcept;
  /*! \brief No hint has to be ended before this time. */
  int64_t next_expiry() const { return next_expiry_; }
  /*! \brief Ends all hints. */
  void Clear() noexcept;
  /*! \brief A page of a pool may have been stored for this text. */
  void NoteStored(const PrefixTree::TextPage& text, int32_t pool) noexcept;

  int64_t num_hints() const { return static_cast<int64_t>(hints_.size()); }
  /*! \brief Pins of pages, one for each page and hint. */
  int64_t num_pins() const { return num_pins_; }

  /*! \brief Adds the cursors at each node. */
  void CountCursors(std::map<const PrefixNode*, int64_t>* num_cursors) const;
  /*! \throws Error (RuntimeError) that names the broken invariant. */
  void CheckIntegrity() const;

 private:
  struct PlacedHint : EvictionHint {
    PrefixTree::Cursor cursor{nullptr, 0};  // behind the last page
  };
  using Hints = std::map<int64_t, std::unique_ptr<PlacedHint>>;

  int64_t Add(const std::string& salt, TokenSpan tokens, std::unique_ptr<PlacedHint> hint);
  void FindFirstPages(EvictionHint* hint) const;
  void RequireRoomForPins(const PlacedHint& hint) const;
  /*! \brief Adds to [pool] the pages of text that this pin covers, and no other one. */
  void CountPinned(const PlacedHint& hint, int64_t sign, std::vector<int64_t>* counts) const;
  /*! \brief Calls visit(node, index) for each page of a hint's text, the last one first. */
  template <typename Visit>
  void ForEachPage(const PlacedHint& hint, Visit visit) const;
  /*! \brief The largest priority of hints that cover a page of text; in any pool for -1. */
  static uint8_t PriorityOf(const PrefixNode& node, int64_t index, int32_t pool);
  /*! \brief Whether a pin, other than this one, covers a page of text that the pool may have. */
  bool IsPinned(const PrefixNode& node, int64_t index, int32_t pool,
                const EvictionHint* except) const;
  /*! \brief The page of the pool for a page of text; -1 where it is not there. */
  int32_t PageOf(const PrefixNode& node, int64_t index, int32_t pool) const;
  /*! \brief Gives pools and host memory the priorities of a text's pages. */
  void Apply(const PlacedHint& hint) noexcept;
  Hints::iterator End(Hints::iterator hint) noexcept;
  void FindNextExpiry() noexcept;

  const PageGeometry* geometry_;
  std::vector<PagePool>* pools_;
  PagePins* pins_;
  PrefixTree* tree_;
  HostMemory* host_memory_ = nullptr;
  Hints hints_;
  int64_t last_id_ = 0;
  int64_t next_expiry_ = kNever;
  std::vector<int64_t> num_pinned_texts_;  // [pool] pages of text that pins cover
  int64_t num_pins_ = 0;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_PREFIX_CACHE_EVICTION_HINTS_H_
