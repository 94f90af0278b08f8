// SPDX-License-Identifier: Apache-2.0
/*!
 * \file copy_on_write.h
 * \brief Copies of shared pages, and of pages with keepers, before a write.
 *
 * Acquire takes the pages; the caller copies; then Commit, or Release when that failed.
 */
#ifndef TVM_PAGEDKV_STATE_TABLE_COPY_ON_WRITE_H_
#define TVM_PAGEDKV_STATE_TABLE_COPY_ON_WRITE_H_

#include <cstdint>
#include <vector>

#include "state/table/sequence_table.h"

namespace pagedkv {

/*! \brief A page to copy before a sequence writes to it. */
struct PageCopy {
  Sequence* sequence;
  int32_t group;
  int64_t index;  // in the page table
  int32_t source;
  int32_t destination;
  int32_t length;  // slots in use
};

/*! \brief Whether to copy a page before a write, when `num_others` pages are taken before it. */
inline bool ShouldCopy(const PagePool& pool, int32_t page, int64_t num_others) {
  return pool.RefCount(page) > 1 ||
         (pool.NumKeepers(page) > 0 && num_others < pool.NumForCopyOf(page));
}

class CopyOnWrite {
 public:
  /*! \brief Pages with several owners, or with keepers: see PagePool. */
  enum class Kind { kShared, kKept };

  /*! \brief The table must outlive this. */
  explicit CopyOnWrite(SequenceTable* table) : table_(table) {}

  const std::vector<PageCopy>& copies() const { return copies_; }

  /*!
   * \brief Takes copies of both kinds, shared pages first.
   * \throws Error (CacheFullError); then it has taken none.
   */
  void Acquire(Sequence* sequence, int64_t begin, int64_t end);
  /*!
   * \brief Takes a new page for every page of one kind with a position of [begin, end): for every
   *   shared one, or for those with keepers as long as there is room.
   * \throws Error (CacheFullError); then the caller releases those taken before.
   */
  void Acquire(Sequence* sequence, int64_t begin, int64_t end, Kind kind);
  /*! \param were_made Whether the new pages may have been written. */
  void Release(bool were_made) noexcept;
  /*! \brief Replaces the source pages by their copies in the page tables. */
  void Commit() noexcept;
  /*! \brief Drops the keepers of pages that the sequence writes without a copy: [begin, end). */
  void Overwrite(const Sequence& sequence, int64_t begin, int64_t end) const noexcept;

 private:
  SequenceTable* table_;
  std::vector<PageCopy> copies_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_TABLE_COPY_ON_WRITE_H_
