// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_pins.h
 * \brief Owners of pages that are not sequences: blocks to send, receives, and the step.
 */
#ifndef TVM_PAGEDKV_STATE_PAGES_PAGE_PINS_H_
#define TVM_PAGEDKV_STATE_PAGES_PAGE_PINS_H_

#include <cstdint>
#include <vector>

#include "state/pages/page_pool.h"

namespace pagedkv {

class PagePins {
 public:
  /*! \brief The pools must outlive this. */
  explicit PagePins(std::vector<PagePool>* pools) : pools_(pools) {
    for (const PagePool& pool : *pools) counts_.emplace_back(pool.num_pages(), 0);
  }

  bool IsPinned(int32_t group, int32_t page) const { return counts_[group][page] > 0; }
  /*! \brief All pins. */
  int64_t num_pins() const { return num_pins_; }
  /*! \brief [page] pins of each page of a group. */
  const std::vector<int32_t>& counts(int32_t group) const { return counts_[group]; }

  void Pin(int32_t group, int32_t page) noexcept {
    (*pools_)[group].AddOwner(page);
    PinInPlaceOfOwner(group, page);
  }
  /*! \brief Removes a pin; see PagePool::Release. */
  void Unpin(int32_t group, int32_t page) noexcept {
    OwnInPlaceOfPin(group, page);
    (*pools_)[group].Release(page);
  }
  /*! \brief Moves the ownership of a page from a sequence to a pin. */
  void PinInPlaceOfOwner(int32_t group, int32_t page) noexcept {
    ++counts_[group][page];
    ++num_pins_;
  }
  /*! \brief The reverse; the caller puts the page back into the page table. */
  void OwnInPlaceOfPin(int32_t group, int32_t page) noexcept {
    --counts_[group][page];
    --num_pins_;
  }

 private:
  std::vector<PagePool>* pools_;
  std::vector<std::vector<int32_t>> counts_;  // [group][page]
  int64_t num_pins_ = 0;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_PAGES_PAGE_PINS_H_
