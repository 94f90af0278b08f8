// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_pool.h
 * \brief Pages with reference counts: who uses how much of a layer group's memory.
 *
 * A pool knows page ids and nothing of their content. No call allocates after construction.
 */
#ifndef TVM_PAGEDKV_PAGE_POOL_H_
#define TVM_PAGEDKV_PAGE_POOL_H_

#include <cstdint>
#include <vector>

namespace pagedkv {

class PagePool {
 public:
  explicit PagePool(int32_t num_pages);

  int32_t num_pages() const { return static_cast<int32_t>(ref_counts_.size()); }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t num_used() const { return num_pages() - num_free(); }
  /*! \brief Pages with more than one owner. */
  int32_t num_shared() const { return num_shared_; }
  int32_t RefCount(int32_t page) const { return ref_counts_[page]; }
  const std::vector<int32_t>& free_pages() const { return free_; }

  /*!
   * \brief Takes a free page, with one owner.
   *
   * The page freed last comes first (its lines may still be in a cache); a new pool hands out
   * ascending ids, so that a sequence that grows alone lies in one piece.
   * \note There must be one: callers compare with num_free() before they change anything.
   */
  int32_t Allocate();

  /*! \brief Adds an owner to a page in use. */
  void AddOwner(int32_t page);

  /*! \brief Takes an owner away; a page without owners becomes free. Undoes Allocate exactly. */
  void Release(int32_t page);

  /*! \brief Puts the free pages in a random order, so that tests see page tables in no order. */
  void ShuffleFree(uint64_t seed);

  /*!
   * \brief Compares the state with the owners that a caller has counted, one entry a page.
   * \throws Error (RuntimeError) that says what is broken.
   */
  void CheckIntegrity(const std::vector<int32_t>& num_owners) const;

 private:
  std::vector<int32_t> ref_counts_;
  std::vector<int32_t> free_;  // a stack
  int32_t num_shared_ = 0;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_PAGE_POOL_H_
