// SPDX-License-Identifier: Apache-2.0
/*!
 * \file forward_plan_spans.cc
 * \brief Spans of a step whose rows see to the end of their span, not to themselves only.
 */
#include <algorithm>

#include "base/error.h"
#include "state/plans/forward_plan.h"

namespace pagedkv {

void ForwardPlan::PrepareSpans(IntSpan spans) {
  constexpr size_t kNumbers = 3;
  if (spans.size % kNumbers != 0) {
    Raise(kValueError, "spans need three numbers each: a sequence, the position where the span ",
          "begins and where it ends; got ", spans.size, " numbers");
  }
  constexpr int32_t kNone = -1;
  row_reach_.assign(static_cast<size_t>(num_rows_), kNone);
  int32_t max_reach = 0;
  for (size_t i = 0; i < spans.size; i += kNumbers) {
    const int64_t begin = spans.data[i + 1], end = spans.data[i + 2];
    const Item& item = ItemOfSpan(spans.data[i], begin, end);
    const auto first = row_reach_.begin() + item.first_row + (begin - item.past_length);
    if (!std::all_of(first, first + (end - begin), [](int32_t reach) { return reach == kNone; })) {
      Raise(kValueError, "spans of sequence ", item.sequence->id, " overlap: ", begin, " to ", end,
            " has positions of another one");
    }
    for (int64_t left = end - begin; left > 0; --left) {
      *(first + (end - begin - left)) = static_cast<int32_t>(left - 1);
    }
    max_reach = std::max(max_reach, static_cast<int32_t>(end - begin - 1));
  }
  std::replace(row_reach_.begin(), row_reach_.end(), kNone, 0);
  has_spans_ = max_reach > 0;
}

const ForwardPlan::Item& ForwardPlan::ItemOfSpan(int64_t id, int64_t begin, int64_t end) const {
  const auto item = std::find_if(items_.begin(), items_.end(),
                                 [id](const Item& each) { return each.sequence->id == id; });
  if (item == items_.end()) {
    Raise(kValueError, "a span is of sequence ", id, ", which is not in the step");
  }
  const int64_t step_end = item->past_length + item->num_append;
  if (begin < item->past_length || begin >= end || end > step_end) {
    Raise(kValueError, "a span must lie within the rows of its step, which for sequence ", id,
          " are positions ", item->past_length, " to ", step_end, ", and have a row; got ", begin,
          " to ", end);
  }
  return *item;
}

void ForwardPlan::MarkSpans() noexcept {
  if (!has_spans_) return;
  for (const Item& item : items_) {
    const auto first = row_reach_.begin() + item.first_row, end = first + item.num_append;
    const auto row = std::find_if(first, end, [](int32_t reach) { return reach > 0; });
    if (row == end) continue;
    const int64_t begin = item.sequence->window.TextPosition(item.past_length + (row - first));
    item.sequence->first_span = std::min(item.sequence->first_span, begin);
  }
}

}  // namespace pagedkv
