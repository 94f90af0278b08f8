// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_pool.h
 * \brief The page pool of a layer group: reference counts, and a cache of pages without owners.
 *
 *     free --Allocate--> held --Release--> free
 *       ^                 | ^
 *       |   Release, with | | AddOwner
 *       |   keepers       v |
 *       '---DropKeeper-- cached --Allocate--> held
 *
 * A page is *held* while it has owners, *cached* when it has none but keepers, and *free*
 * otherwise. Free and cached pages are available: Allocate takes free pages first, then
 * reclaims a cached page. The *generation* of a page changes whenever its content is given up, so a
 * pair (page, generation) tells later whether the content is still there.
 *
 * *Keepers* can find a page without owning it: histories of sequences and the prefix tree. A page
 * with keepers becomes cached instead of free, and it is copied before its owner overwrites it, if
 * there is room. Pages that running sequences may return to are reclaimed last, those of a higher
 * priority after those of a lower one, and else those that were used last.
 *
 * A pool knows page ids and not their content. No call allocates memory after construction.
 */
#ifndef TVM_PAGEDKV_STATE_PAGES_PAGE_POOL_H_
#define TVM_PAGEDKV_STATE_PAGES_PAGE_POOL_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "state/pages/cached_pages.h"

namespace pagedkv {

/*! \brief Hears of content that a pool is about to give up. */
class PageObserver {
 public:
  virtual ~PageObserver() = default;
  /*! \brief A cached page is handed out next; its content and generation are still as they were. */
  virtual void BeforeReclaim(int32_t page) noexcept = 0;
};

/*! \brief Why a keeper wants to find a page. */
enum class Keeper : uint8_t {
  kLookup,  // a text, or a history that the pool has no room for
  kReturn,  // a fork or pop of a running sequence may need it
};

class PagePool {
 public:
  explicit PagePool(int32_t num_pages);

  int32_t num_pages() const { return static_cast<int32_t>(ref_counts_.size()); }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t num_cached() const { return cached_.size(); }
  /*! \brief Pages that Allocate can hand out. */
  int32_t num_available() const { return num_free() + num_cached(); }
  /*! \brief Those of them that no running sequence may return to. */
  int32_t num_spare() const { return num_available() - num_cached_for_return_; }
  /*! \brief Pages with owners. */
  int32_t num_used() const { return num_pages() - num_available(); }
  /*! \brief Pages with more than one owner. */
  int32_t num_shared() const { return num_shared_; }
  /*! \brief Pages with owners and keepers. */
  int32_t num_held_and_kept() const { return num_held_and_kept_; }
  /*! \brief Pages with a priority. */
  int32_t num_retained() const { return num_retained_; }
  /*! \brief The number of times that known content was overwritten or reclaimed. */
  int64_t num_reclaimed() const { return num_reclaimed_; }
  int32_t RefCount(int32_t page) const { return ref_counts_[page]; }
  int32_t NumKeepers(int32_t page) const { return contents_[page].num_keepers; }
  /*! \brief Whether a running sequence may return to the page. */
  bool IsForReturn(int32_t page) const { return contents_[page].num_returns > 0; }
  /*! \brief The pages that may be taken to copy this page, which has keepers. */
  int32_t NumForCopyOf(int32_t page) const {
    return IsForReturn(page) ? num_available() : num_spare();
  }
  uint64_t Generation(int32_t page) const { return contents_[page].generation; }
  const std::vector<int32_t>& free_pages() const { return free_; }
  const CachedPages& cached_pages() const { return cached_; }

  /*!
   * \brief Takes an available page, with one owner.
   *
   * The page freed last comes first, because it may still be in a CPU cache. A new pool hands out
   * ascending ids, so a sequence that grows alone has consecutive pages.
   * \note Callers check num_available() before they change anything: there must be one.
   */
  int32_t Allocate() {
    if (free_.empty()) return Reclaim();
    const int32_t page = free_.back();
    free_.pop_back();
    ref_counts_[page] = 1;
    return page;
  }
  /*! \brief Undoes the last Allocate exactly: nothing has been written to the page. */
  void Unallocate(int32_t page);

  /*! \brief Adds an owner to a page that is held or cached. */
  void AddOwner(int32_t page);

  /*! \brief Removes an owner. A page without owners becomes cached if it has keepers, else free. */
  void Release(int32_t page);
  /*! \brief Releases the pages of a list from index `keep` on, the last one first. */
  void ReleaseFrom(size_t keep, std::vector<int32_t>* pages);

  void AddKeeper(int32_t page, Keeper keeper = Keeper::kLookup);
  /*!
   * \brief Removes a keeper of the page's current generation. A cached page without becomes free.
   *
   * A cached page that no sequence returns to any more was in use until now.
   */
  void DropKeeper(int32_t page, Keeper keeper = Keeper::kLookup);
  uint8_t Priority(int32_t page) const { return contents_[page].priority; }
  /*! \brief Lets cached pages of a smaller priority be reclaimed before this content. */
  void SetPriority(int32_t page, uint8_t priority);
  /*! \brief Lets a cached page without a priority, and for no return, be reclaimed next. */
  void ReclaimEarly(int32_t page);
  /*! \brief Drops all keepers of a held page, because its owner will overwrite it. */
  void Overwrite(int32_t page);

  /*! \brief The observer must outlive the pool; null for none. */
  void SetObserver(PageObserver* observer) { observer_ = observer; }

  /*! \brief Puts the free pages in a random order, so that tests get shuffled page tables. */
  void ShuffleFree(uint64_t seed);

  /*!
   * \brief Compares the state with the owners and keepers that a caller has counted for each page.
   * \param num_returns Of the keepers, those that are Keeper::kReturn.
   * \throws Error (RuntimeError) that says what is broken.
   */
  void CheckIntegrity(const std::vector<int32_t>& num_owners,
                      const std::vector<int32_t>& num_keepers,
                      const std::vector<int32_t>& num_returns) const;
  /*! \brief The same where no keeper is Keeper::kReturn. */
  void CheckIntegrity(const std::vector<int32_t>& num_owners,
                      const std::vector<int32_t>& num_keepers) const {
    CheckIntegrity(num_owners, num_keepers, std::vector<int32_t>(num_owners.size(), 0));
  }

 private:
  static constexpr int32_t kNotReclaimed = -1;
  static constexpr uint8_t kReturnRank = 255;
  struct Content {
    uint64_t generation = 0;
    int32_t num_keepers = 0;
    int32_t num_returns = 0;  // of the keepers
    uint8_t priority = 0;
    // What Allocate dropped, for Unallocate.
    int32_t reclaimed_keepers = kNotReclaimed;
    int32_t reclaimed_returns = 0;
    uint8_t reclaimed_priority = 0;
  };

  int32_t Reclaim();
  void Free(int32_t page);
  uint8_t RankOf(int32_t page) const { return IsForReturn(page) ? kReturnRank : Priority(page); }
  /*! \brief Takes a page out of the cached ones. */
  void Uncache(int32_t page) {
    cached_.Remove(page);
    num_cached_for_return_ -= IsForReturn(page);
  }
  /*! \brief Removes an owner. \return Whether it was the last one. */
  bool DropOwner(int32_t page);
  void CheckLists(const std::vector<int32_t>& num_owners) const;

  std::vector<int32_t> ref_counts_;
  std::vector<Content> contents_;
  std::vector<int32_t> free_;  // a stack
  CachedPages cached_;
  int32_t num_shared_ = 0;
  int32_t num_held_and_kept_ = 0;
  int32_t num_cached_for_return_ = 0;
  int32_t num_retained_ = 0;
  int64_t num_reclaimed_ = 0;
  PageObserver* observer_ = nullptr;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_PAGES_PAGE_POOL_H_
