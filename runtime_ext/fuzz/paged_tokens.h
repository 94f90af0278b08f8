// SPDX-License-Identifier: Apache-2.0
/*!
 * \file paged_tokens.h
 * \brief Pages whose slots hold tokens in the place of rows of K and V.
 */
#ifndef TVM_PAGEDKV_FUZZ_PAGED_TOKENS_H_
#define TVM_PAGEDKV_FUZZ_PAGED_TOKENS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "expected_tokens.h"
#include "state/table/copy_on_write.h"
#include "state/table/sequence_table.h"

namespace pagedkv {

/*! \brief The pools of all layer groups of a sequence table. */
class PagedTokens {
 public:
  PagedTokens(const SequenceTable* table, const Sizes& sizes) : table_(table) {
    for (int32_t n : sizes.num_pages) slots_.emplace_back(n * sizes.page_size, 0);
  }

  int32_t& At(int32_t group, int32_t slot) { return slots_[group].at(slot); }
  int32_t& Of(const Sequence& sequence, int32_t group, int64_t position) {
    return slots_[group].at(SlotOf(sequence, group, position));
  }
  int32_t Of(const Sequence& sequence, int32_t group, int64_t position) const {
    return slots_[group].at(SlotOf(sequence, group, position));
  }

  void Copy(const std::vector<PageCopy>& copies) {
    const int64_t page_size = table_->page_size();
    for (const PageCopy& copy : copies) {
      auto source = slots_[copy.group].begin() + copy.source * page_size;
      std::copy_n(source, copy.length, slots_[copy.group].begin() + copy.destination * page_size);
    }
  }
  /*! \brief Copies slots one after the other: sources, then as many destinations. */
  void Move(int32_t group, const std::vector<int32_t>& moves) {
    const size_t count = moves.size() / 2;
    for (size_t i = 0; i < count; ++i) At(group, moves[count + i]) = At(group, moves[i]);
  }

 private:
  int64_t SlotOf(const Sequence& sequence, int32_t group, int64_t position) const {
    const PageGeometry& geometry = table_->geometry();
    return sequence.pages[group].at(geometry.PageIndex(sequence, group, position)) *
               table_->page_size() +
           geometry.OffsetInPage(sequence, position);
  }

  const SequenceTable* table_;
  std::vector<std::vector<int32_t>> slots_;  // by group
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_FUZZ_PAGED_TOKENS_H_
