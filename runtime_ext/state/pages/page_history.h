// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_history.h
 * \brief The pages of one sequence that the window of a layer group has moved past.
 *
 * A history owns no page. It stores page ids with their generation and is a keeper of each page, so
 * it can tell which pages were reclaimed. It holds the pages right before the first page of the
 * sequence, without gaps, and is never longer than the pool.
 *
 * Its pages are reclaimed after those that no running sequence may return to, in pools that have
 * room for whole texts. In others they would displace what is of more use.
 */
#ifndef TVM_PAGEDKV_STATE_PAGES_PAGE_HISTORY_H_
#define TVM_PAGEDKV_STATE_PAGES_PAGE_HISTORY_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "state/pages/page_pool.h"

namespace pagedkv {

class PageHistory {
 public:
  struct Entry {
    int32_t page;
    uint64_t generation;
  };

  int64_t size() const { return static_cast<int64_t>(entries_.size() - begin_); }
  /*!
   * \brief The page `distance` pages before the first one that the sequence holds.
   * \return -1 when its content has been reclaimed, or was never known.
   */
  int32_t Find(int64_t distance, const PagePool& pool) const {
    if (distance > size()) return -1;
    const Entry& entry = entries_[entries_.size() - static_cast<size_t>(distance)];
    return IsKnown(entry, pool) ? entry.page : -1;
  }

  Keeper keeper() const { return keeper_; }
  /*! \brief Keeps all pages as this. */
  void SetKeeper(Keeper keeper, PagePool* pool) noexcept;
  /*! \brief Adds a page that the sequence still owns and is about to retire, or that is cached. */
  void Append(int32_t page, PagePool* pool) noexcept;
  /*! \brief Forgets the last `count` pages, or all. */
  void DropLast(int64_t count, PagePool* pool) noexcept;
  void Clear(PagePool* pool) noexcept { DropLast(size(), pool); }
  /*! \brief Copies all but the last `count` pages of another history; this one must be empty. */
  void CopyWithoutLast(const PageHistory& other, int64_t count, PagePool* pool) noexcept;

  /*!
   * \brief Adds this history to the keepers of each page.
   * \param num_returns Of them, those that are Keeper::kReturn.
   * \throws Error (RuntimeError).
   */
  void CountKeepers(const PagePool& pool, std::vector<int32_t>* num_keepers,
                    std::vector<int32_t>* num_returns) const;

 private:
  static bool IsKnown(const Entry& entry, const PagePool& pool) {
    return pool.Generation(entry.page) == entry.generation;
  }
  void DropFirst(PagePool* pool) noexcept;

  std::vector<Entry> entries_;
  size_t begin_ = 0;  // entries before it are dropped; they are erased now and then
  Keeper keeper_ = Keeper::kReturn;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_PAGES_PAGE_HISTORY_H_
