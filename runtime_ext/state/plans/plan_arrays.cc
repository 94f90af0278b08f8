// SPDX-License-Identifier: Apache-2.0
/*!
 * \file plan_arrays.cc
 * \brief The arrays of a step, as kernels take them.
 */
#include "state/plans/plan_arrays.h"

#include <algorithm>
#include <limits>

namespace pagedkv {

int64_t PlanArrays::NumPagesOf(int32_t group, size_t item, PageRange range) const {
  const int64_t num_shared = NumSharedPagesOf(group, item);
  if (range == PageRange::kPast) {
    const Item& each = items_[item];
    return table_.geometry().NumPages(*each.sequence, group, each.past_length) - num_shared;
  }
  const GroupPages& pages = groups_[group];
  return pages.kept[item] + pages.offsets[item + 1] - pages.offsets[item] - num_shared;
}

int64_t PlanArrays::NumSharedPages(int32_t group) const {
  int64_t total = 0;
  if (shared_prefix(group).segments().empty()) return total;
  for (size_t i = 0; i < items_.size(); ++i) total += NumSharedPagesOf(group, i);
  return total;
}

int64_t PlanArrays::NumPages(int32_t group, PageRange range) const {
  int64_t total = 0;
  for (size_t i = 0; i < items_.size(); ++i) total += NumPagesOf(group, i, range);
  return total;
}

void PlanArrays::FillQueryIndptr(int32_t* out) const {
  *out = 0;
  for (const Item& item : items_) {
    out[1] = out[0] + static_cast<int32_t>(item.num_append);
    ++out;
  }
}

void PlanArrays::FillQueryPositions(int32_t* out) const {
  for (const Item& item : items_) {
    const int64_t num_committed = item.past_length - item.num_earlier_nodes;
    for (int64_t i = 0; i < item.num_append; ++i) {
      const int64_t depth =
          plan_.has_trees() ? item.sequence->tree.depth(item.num_earlier_nodes + i) : i;
      *out++ = static_cast<int32_t>(num_committed + depth);
    }
  }
}

void PlanArrays::FillTextPositions(int32_t* out) const {
  FillQueryPositions(out);
  for (const Item& item : items_) {
    const SequenceWindow& window = item.sequence->window;
    for (int64_t i = 0; i < item.num_append; ++i, ++out) {
      *out = static_cast<int32_t>(window.TextPosition(*out));
    }
  }
}

void PlanArrays::FillTreeOrderIndptr(int32_t* out) const {
  *out = 0;
  for (const Item& item : items_) {
    out[1] = out[0] + static_cast<int32_t>(item.num_earlier_nodes + item.num_append);
    ++out;
  }
}

void PlanArrays::FillTreeOrder(PageRange range, int32_t* out) const {
  for (const Item& item : items_) {
    const int64_t num_nodes = item.num_earlier_nodes + item.num_append;
    item.sequence->tree.FillOrder(out);
    for (int64_t i = item.num_earlier_nodes; range == PageRange::kPast && i < num_nodes; ++i) {
      out[2 * i + 1] = out[2 * i];  // an empty interval: the node sees others, but no node sees it
    }
    out += 2 * num_nodes;
  }
}

void PlanArrays::FillPastLengths(int32_t* out) const {
  for (const Item& item : items_) *out++ = static_cast<int32_t>(item.past_length);
}

void PlanArrays::FillPageIndptr(int32_t group, PageRange range, int32_t* out) const {
  *out = 0;
  for (size_t i = 0; i < items_.size(); ++i) {
    out[i + 1] = out[i] + static_cast<int32_t>(NumPagesOf(group, i, range));
  }
}

void PlanArrays::FillFirstPositions(int32_t group, int32_t* out) const {
  for (size_t i = 0; i < items_.size(); ++i) {
    const Sequence& sequence = *items_[i].sequence;
    int64_t first = NumSharedPagesOf(group, i) * table_.page_size();
    if (table_.geometry().HasWindow(group)) {
      first += sequence.first_pages[group] * table_.page_size() - sequence.window.num_dropped;
    }
    *out++ = static_cast<int32_t>(first);
  }
}

void PlanArrays::FillWindows(int32_t group, int32_t* out) const {
  const size_t size = items_.size();
  for (size_t i = 0; i < size; ++i) {
    const Sequence& sequence = *items_[i].sequence;
    const SequenceWindow& window = sequence.window;
    out[i] = static_cast<int32_t>(table_.geometry().WindowBegin(sequence, group));
    out[size + i] = static_cast<int32_t>(window.num_sinks);
    const int64_t num_seen =
        window.size > 0 ? window.num_held() : std::numeric_limits<int32_t>::max();
    out[2 * size + i] = static_cast<int32_t>(num_seen - window.num_sinks);
  }
}

void PlanArrays::FillPageIds(int32_t group, PageRange range, int32_t* out) const {
  const GroupPages& pages = groups_[group];
  for (size_t i = 0; i < items_.size(); ++i) {
    const int64_t num_shared = NumSharedPagesOf(group, i);
    auto begin = items_[i].sequence->pages[group].begin() + num_shared;
    if (range == PageRange::kPast) {
      out = std::copy_n(begin, NumPagesOf(group, i, range), out);
    } else {
      out = std::copy_n(begin, pages.kept[i] - num_shared, out);
      out = std::copy(pages.acquired.begin() + pages.offsets[i],
                      pages.acquired.begin() + pages.offsets[i + 1], out);
    }
  }
}

int64_t PlanArrays::NumLengthRows(int32_t group) const {
  return plan_.has_windows() && !table_.geometry().HasWindow(group) ? 4 : 1;
}

void PlanArrays::FillLengths(int32_t group, PageRange range, int32_t* out) const {
  FillLastPageLengths(range, out);
  if (NumLengthRows(group) > 1) FillWindows(group, out + plan_.num_sequences());
}

void PlanArrays::FillLastPageLengths(PageRange range, int32_t* out) const {
  for (const Item& item : items_) {
    const int64_t length = plan_.TextLength(item, range);
    *out++ = static_cast<int32_t>(length == 0 ? 0 : table_.geometry().SlotOf(length - 1) + 1);
  }
}

int32_t PlanArrays::PageOf(int32_t group, size_t item, int64_t position) const {
  const Sequence& sequence = *items_[item].sequence;
  return PageAt(group, item, table_.geometry().PageIndex(sequence, group, position));
}

int32_t PlanArrays::SlotOfText(int32_t group, size_t item, int64_t text_position) const {
  const PageGeometry& geometry = table_.geometry();
  const int64_t first = items_[item].sequence->first_pages[group];
  const int32_t page = PageAt(group, item, geometry.PageOf(text_position) - first);
  return static_cast<int32_t>(page * geometry.page_size() + geometry.SlotOf(text_position));
}

int32_t PlanArrays::PageAt(int32_t group, size_t item, int64_t index) const {
  const GroupPages& pages = groups_[group];
  const Sequence& sequence = *items_[item].sequence;
  return index < pages.kept[item] ? sequence.pages[group][index]
                                  : pages.acquired[pages.offsets[item] + index - pages.kept[item]];
}

void PlanArrays::FillSlots(int32_t group, int32_t* out) const {
  const int64_t page_size = table_.page_size();
  for (size_t i = 0; i < items_.size(); ++i) {
    int64_t position = items_[i].past_length;
    const int64_t end = position + items_[i].num_append;
    while (position < end) {
      const int64_t offset = table_.geometry().OffsetInPage(*items_[i].sequence, position);
      const int64_t page_end = std::min(end, position + page_size - offset);
      auto slot = static_cast<int32_t>(PageOf(group, i, position) * page_size + offset);
      for (; position < page_end; ++position) *out++ = slot++;
    }
  }
}

void PlanArrays::FillLastSlots(const int32_t* page_indptr, const int32_t* page_ids,
                               const int32_t* lengths, int32_t* out) const {
  for (size_t i = 0; i < items_.size(); ++i) {
    out[i] = page_ids[page_indptr[i + 1] - 1] * table_.page_size() + lengths[i] - 1;
  }
}

int64_t PlanArrays::NumStateSegments(int32_t state_group) const {
  int64_t count = 0;
  for (size_t i = 0; i < items_.size(); ++i) {
    plan_.states(state_group).VisitSegments(i, [&](const StatePlan::Segment&) { ++count; });
  }
  return count;
}

int64_t PlanArrays::NumStateRows(int32_t state_group) const {
  int64_t count = 0;
  for (size_t i = 0; i < items_.size(); ++i) {
    plan_.states(state_group).VisitSegments(i, [&](const StatePlan::Segment& segment) {
      count += segment.end - segment.begin + segment.num_nodes;
    });
  }
  return count;
}

void PlanArrays::FillStates(int32_t state_group, const StateArrays& arrays) const {
  const int32_t group = table_.geometry().state_group(state_group).ingredients;
  StateArrays out = arrays;
  *out.segment_indptr = *out.row_indptr = 0;
  for (size_t i = 0; i < items_.size(); ++i) {
    const Item& item = items_[i];
    const int64_t past = plan_.TextLength(item, PageRange::kPast);
    const int64_t committed = past - item.num_earlier_nodes;
    auto add = [&](int64_t text_position) {
      const int64_t row = text_position - past;
      *out.slots++ = SlotOfText(group, i, text_position);
      *out.rows++ = static_cast<int32_t>(row < 0 ? -1 : item.first_row + row);
    };
    out.segment_indptr[1] = out.segment_indptr[0];
    plan_.states(state_group).VisitSegments(i, [&](const StatePlan::Segment& segment) {
      for (int64_t at = segment.begin; at < segment.end; ++at) add(at);
      for (int64_t n = 0; n < segment.num_nodes; ++n) add(committed + segment.nodes[n]);
      const int64_t num_rows = segment.end - segment.begin + segment.num_nodes;
      out.row_indptr[1] = static_cast<int32_t>(out.row_indptr[0] + num_rows);
      ++out.row_indptr;
      *out.read_pages++ = segment.read_page;
      *out.write_pages++ = segment.write_page;
      ++out.segment_indptr[1];
    });
    ++out.segment_indptr;
  }
}

void PlanArrays::FillTaps(int32_t group, int64_t num_taps, int32_t* out) const {
  for (size_t i = 0; i < items_.size(); ++i) {
    const Item& item = items_[i];
    const int64_t past = plan_.TextLength(item, PageRange::kPast);
    const int64_t committed = past - item.num_earlier_nodes;
    const std::vector<int32_t>& parents = item.sequence->tree.parents();
    for (int64_t row = 0; row < item.num_append; ++row, out += num_taps) {
      int64_t at = past + row;
      for (int64_t tap = num_taps - 1; tap >= 0; --tap) {
        if (plan_.has_trees() && at >= committed) {
          const int32_t parent = parents[at - committed];
          at = parent >= 0 ? committed + parent : committed - 1;
        } else {
          at = std::max<int64_t>(at - 1, -1);
        }
        out[tap] = at < 0 ? -1 : SlotOfText(group, i, at);
      }
    }
  }
}

int64_t PlanArrays::NumSegmentPages(int32_t group) const {
  int64_t total = 0;
  for (const SharedSegment& segment : shared_prefix(group).segments()) total += segment.num_pages;
  return total;
}

int64_t PlanArrays::NumSegmentRows(int32_t group) const {
  int64_t total = 0;
  const SharedPrefix& shared = shared_prefix(group);
  for (const SharedSegment& segment : shared.segments()) {
    for (size_t m = segment.begin; m < segment.end; ++m) {
      total += items_[shared.members()[m]].num_append;
    }
  }
  return total;
}

void PlanArrays::FillSegmentPageIndptr(int32_t group, int32_t* out) const {
  *out = 0;
  for (const SharedSegment& segment : shared_prefix(group).segments()) {
    out[1] = out[0] + static_cast<int32_t>(segment.num_pages);
    ++out;
  }
}

void PlanArrays::FillSegmentPageIds(int32_t group, int32_t* out) const {
  const SharedPrefix& shared = shared_prefix(group);
  for (const SharedSegment& segment : shared.segments()) {
    const Item& item = items_[shared.members()[segment.begin]];
    auto begin = item.sequence->pages[group].begin() + segment.first_page;
    out = std::copy_n(begin, segment.num_pages, out);
  }
}

void PlanArrays::FillSegmentFirstPositions(int32_t group, int32_t* out) const {
  for (const SharedSegment& segment : shared_prefix(group).segments()) {
    *out++ = static_cast<int32_t>(segment.first_page * table_.page_size());
  }
}

void PlanArrays::FillSegmentRowIndptr(int32_t group, int32_t* out) const {
  const SharedPrefix& shared = shared_prefix(group);
  *out = 0;
  for (const SharedSegment& segment : shared.segments()) {
    out[1] = out[0];
    ++out;
    for (size_t m = segment.begin; m < segment.end; ++m) {
      *out += static_cast<int32_t>(items_[shared.members()[m]].num_append);
    }
  }
}

void PlanArrays::FillSegmentRows(int32_t group, int32_t* out) const {
  const SharedPrefix& shared = shared_prefix(group);
  for (const SharedSegment& segment : shared.segments()) {
    for (size_t m = segment.begin; m < segment.end; ++m) {
      const Item& item = items_[shared.members()[m]];
      for (int64_t i = 0; i < item.num_append; ++i) {
        *out++ = static_cast<int32_t>(item.first_row + i);
      }
    }
  }
}

}  // namespace pagedkv
