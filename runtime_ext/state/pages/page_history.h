// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_history.h
 * \brief The pages of one sequence that the window of a layer group has moved past.
 *
 * A history owns no page. It stores page ids with their generation and is a keeper of each page, so
 * it can tell which pages were reclaimed. It holds the pages right before the first page of the
 * sequence, without gaps, and is never longer than the pool.
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

  /*! \brief Adds a page that the sequence still owns and is about to retire. */
  void Append(int32_t page, PagePool* pool) noexcept;
  /*! \brief Forgets the last `count` pages, or all. */
  void DropLast(int64_t count, PagePool* pool) noexcept;
  void Clear(PagePool* pool) noexcept { DropLast(size(), pool); }
  /*! \brief Copies all but the last `count` pages of another history; this one must be empty. */
  void CopyWithoutLast(const PageHistory& other, int64_t count, PagePool* pool) noexcept;

  /*! \brief Adds this history to the keepers of each page. \throws Error (RuntimeError). */
  void CountKeepers(const PagePool& pool, std::vector<int32_t>* num_keepers) const;

 private:
  static bool IsKnown(const Entry& entry, const PagePool& pool) {
    return pool.Generation(entry.page) == entry.generation;
  }
  void DropFirst(PagePool* pool) noexcept;

  std::vector<Entry> entries_;
  size_t begin_ = 0;  // entries before it are dropped; they are erased now and then
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_PAGES_PAGE_HISTORY_H_
