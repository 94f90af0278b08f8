// SPDX-License-Identifier: Apache-2.0
/*!
 * \file hashed_states.h
 * \brief States of recurrent layers that are hashes of all tokens before a position.
 *
 * A state that is computed from a wrong one, or through wrong slots, has another hash. No token is
 * written twice, so a token stands for all of the text up to it.
 */
#ifndef TVM_PAGEDKV_FUZZ_HASHED_STATES_H_
#define TVM_PAGEDKV_FUZZ_HASHED_STATES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "paged_tokens.h"
#include "state/plans/plan_arrays.h"
#include "state/table/sequence_table.h"

namespace pagedkv {

class HashedStates {
 public:
  HashedStates(const SequenceTable* table, const Sizes& sizes) : table_(table) {
    for (int32_t n : sizes.num_states) states_.emplace_back(n, 0xdeadu);
  }

  bool is_used() const { return !states_.empty(); }

  /*! \brief Notes the token of a new row behind another one; 0 for the first of a text. */
  void Add(int32_t token, int32_t before) { hashes_[token] = Next(hashes_.at(before), token); }
  uint32_t Of(int32_t token) const { return hashes_.at(token); }

  /*!
   * \brief Does what a recurrent layer does within a step, between Acquire and Commit.
   * \param first_token The token of the first row; those of the others follow.
   * \return The state behind each row.
   */
  std::vector<uint32_t> Scan(const ForwardPlan& plan, PagedTokens* pages, int32_t first_token) {
    std::vector<uint32_t> outputs(plan.num_rows(), 0);
    const PlanArrays arrays(plan);
    for (size_t s = 0; s < states_.size(); ++s) {
      const auto group = static_cast<int32_t>(s);
      const int64_t num_segments = arrays.NumStateSegments(group);
      const int64_t num_rows = arrays.NumStateRows(group);
      std::vector<int32_t> segment_indptr(plan.num_sequences() + 1), row_indptr(num_segments + 1),
          slots(num_rows), rows(num_rows), read_pages(num_segments), write_pages(num_segments);
      arrays.FillStates(group, {segment_indptr.data(), row_indptr.data(), slots.data(), rows.data(),
                                read_pages.data(), write_pages.data()});
      FUZZ_CHECK(segment_indptr.back() == num_segments && row_indptr.back() == num_rows);
      std::vector<int> num_outputs(plan.num_rows(), 0);
      // Sequences run at the same time, and none may read what another one writes: any order.
      for (int64_t i = plan.num_sequences(); i-- > 0;) {
        for (int32_t n = segment_indptr[i]; n < segment_indptr[i + 1]; ++n) {
          uint32_t state = read_pages[n] < 0 ? 0 : states_[s].at(read_pages[n]);
          for (int32_t k = row_indptr[n]; k < row_indptr[n + 1]; ++k) {
            const int32_t row = rows[k];
            state = Next(
                state, row < 0
                           ? pages->At(table_->geometry().state_group(group).ingredients, slots[k])
                           : first_token + row);
            if (row < 0) continue;
            outputs.at(row) = state;
            ++num_outputs.at(row);
          }
          states_[s].at(write_pages[n]) = state;
        }
      }
      for (int count : num_outputs) FUZZ_CHECK(count == 1);
    }
    return outputs;
  }

  /*! \brief Calls check(token, state) for each state of a sequence with these tokens. */
  template <typename Visitor>
  void Visit(const Sequence& sequence, const std::vector<int32_t>& tokens, Visitor check) const {
    for (size_t s = 0; s < states_.size(); ++s) {
      const SequenceStates& states = sequence.states[s];
      const int64_t interval = table_->geometry().state_group(static_cast<int32_t>(s)).interval;
      for (size_t i = 0; i < states.pages.size(); ++i) {
        const int64_t page_end = (states.first_page + static_cast<int64_t>(i) + 1) * interval;
        check(tokens.at(std::min(page_end, states.length) - 1), states_[s].at(states.pages[i]));
      }
    }
  }

 private:
  static uint32_t Next(uint32_t state, int32_t token) {
    return (state ^ static_cast<uint32_t>(token)) * 2654435761u + 1;
  }

  const SequenceTable* table_;
  std::vector<std::vector<uint32_t>> states_;  // [state group][page]
  std::map<int32_t, uint32_t> hashes_{{0, 0}};
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_FUZZ_HASHED_STATES_H_
