// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_pool.h
 * \brief Pages with reference counts: who uses how much of a layer group's memory.
 *
 * A page is *held* while it has owners, *cached* when it has none but its content is still known,
 * and *free* otherwise. Free and cached pages are available: Allocate takes free ones first, then
 * reclaims the cached page that was used least recently. The *generation* of a page changes
 * whenever its content is given up, so that who notes both can tell later whether it is still
 * there.
 *
 * *Keepers* note a page without owning it. Their number decides only whether the content is worth
 * keeping: a page with keepers becomes cached, not free, and is copied before its owner overwrites
 * it, if there is room.
 *
 * A pool knows page ids and nothing of their content. No call allocates after construction.
 */
#ifndef TVM_PAGEDKV_STATE_PAGE_POOL_H_
#define TVM_PAGEDKV_STATE_PAGE_POOL_H_

#include <cstdint>
#include <vector>

#include "state/cached_pages.h"

namespace pagedkv {

class PagePool {
 public:
  explicit PagePool(int32_t num_pages);

  int32_t num_pages() const { return static_cast<int32_t>(ref_counts_.size()); }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t num_cached() const { return cached_.size(); }
  /*! \brief Pages that Allocate can hand out. */
  int32_t num_available() const { return num_free() + num_cached(); }
  /*! \brief Pages with owners. */
  int32_t num_used() const { return num_pages() - num_available(); }
  /*! \brief Pages with more than one owner. */
  int32_t num_shared() const { return num_shared_; }
  /*! \brief Pages with owners and keepers. */
  int32_t num_held_and_kept() const { return num_held_and_kept_; }
  /*! \brief How often content that was cached or kept has been given up for other content. */
  int64_t num_reclaimed() const { return num_reclaimed_; }
  int32_t RefCount(int32_t page) const { return ref_counts_[page]; }
  int32_t NumKeepers(int32_t page) const { return contents_[page].num_keepers; }
  uint64_t Generation(int32_t page) const { return contents_[page].generation; }
  const std::vector<int32_t>& free_pages() const { return free_; }
  const CachedPages& cached_pages() const { return cached_; }

  /*!
   * \brief Takes an available page, with one owner.
   *
   * The page freed last comes first (its lines may still be in a cache); a new pool hands out
   * ascending ids, so that a sequence that grows alone lies in one piece.
   * \note There must be one: callers compare with num_available() before they change anything.
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

  /*! \brief Takes an owner away who has no use for the content; it stays for keepers only. */
  void Release(int32_t page);
  /*! \brief Takes an owner away; a page without owners becomes cached. */
  void Retire(int32_t page);

  void AddKeeper(int32_t page);
  /*! \brief Takes a keeper away who has noted the page's present generation. */
  void DropKeeper(int32_t page);
  /*! \brief Gives up what keepers have noted of a held page: its owner will overwrite it. */
  void Overwrite(int32_t page);
  /*! \brief Makes all cached pages free; none may have keepers. */
  void FreeCached();

  /*! \brief Puts the free pages in a random order, so that tests see page tables in no order. */
  void ShuffleFree(uint64_t seed);

  /*!
   * \brief Compares the state with the owners and keepers that a caller has counted for each page.
   * \throws Error (RuntimeError) that says what is broken.
   */
  void CheckIntegrity(const std::vector<int32_t>& num_owners,
                      const std::vector<int32_t>& num_keepers) const;

 private:
  static constexpr int32_t kNotReclaimed = -1;
  struct Content {
    uint64_t generation = 0;
    int32_t num_keepers = 0;
    int32_t reclaimed_keepers = kNotReclaimed;  // how many lost it when the owner got the page
  };

  int32_t Reclaim();
  void Free(int32_t page);
  /*! \brief Takes an owner away. \return Whether it was the last one. */
  bool DropOwner(int32_t page);
  void CheckLists(const std::vector<int32_t>& num_owners) const;

  std::vector<int32_t> ref_counts_;
  std::vector<Content> contents_;
  std::vector<int32_t> free_;  // a stack
  CachedPages cached_;
  int32_t num_shared_ = 0;
  int32_t num_held_and_kept_ = 0;
  int64_t num_reclaimed_ = 0;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_PAGE_POOL_H_
