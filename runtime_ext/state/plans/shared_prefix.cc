// SPDX-License-Identifier: Apache-2.0
/*!
 * \file shared_prefix.cc
 * \brief The shared prefixes of a batch, as a tree of segments.
 */
#include "state/plans/shared_prefix.h"

#include <algorithm>
#include <numeric>

namespace pagedkv {

SharedPrefix::SharedPrefix(int32_t num_pages, int32_t page_size)
    : page_size_(page_size), level_begins_(1, 0), child_of_page_(num_pages, -1) {}

void SharedPrefix::Clear() {
  sequences_.clear();
  segments_.clear();
  level_begins_.assign(1, 0);
}

void SharedPrefix::Find(const PagePool& pool) {
  members_.resize(sequences_.size());
  std::iota(members_.begin(), members_.end(), size_t{0});
  nodes_.clear();
  Split({0, 0, 0, members_.size()}, pool, &nodes_);
  while (!nodes_.empty()) {
    next_nodes_.clear();
    for (size_t i = 0; i < nodes_.size(); ++i) {  // nodes_ may grow
      const Node node = nodes_[i];
      if (IsWorthwhile(node)) {
        segments_.push_back(
            {node.first_page, node.end_page - node.first_page, node.begin, node.end});
        for (size_t m = node.begin; m < node.end; ++m) {
          sequences_[members_[m]].num_covered = node.end_page;
        }
        Split({node.end_page, node.end_page, node.begin, node.end}, pool, &next_nodes_);
      } else {
        Split(node, pool, &nodes_);
      }
    }
    if (segments_.size() > level_begins_.back()) level_begins_.push_back(segments_.size());
    nodes_.swap(next_nodes_);
  }
}

/*! \brief Sorts the sequences of a node by their next page. Those that share it form a child. */
void SharedPrefix::Split(const Node& node, const PagePool& pool, std::vector<Node>* children) {
  const int64_t next = node.end_page;
  auto page_of = [&](size_t m) {
    const Item& item = sequences_[members_[m]];
    if (next >= item.num_pages || pool.RefCount(item.pages[next]) == 1) return -1;
    return item.pages[next];
  };
  // Children are numbered in batch order, so the result does not depend on page ids.
  child_sizes_.clear();
  size_t num_alone = 0;
  for (size_t m = node.begin; m < node.end; ++m) {
    const int32_t page = page_of(m);
    if (page < 0) {
      ++num_alone;
      continue;
    }
    if (child_of_page_[page] < 0) {
      child_of_page_[page] = static_cast<int32_t>(child_sizes_.size());
      child_sizes_.push_back(0);
    }
    ++child_sizes_[child_of_page_[page]];
  }
  if (child_sizes_.empty()) return;

  const size_t first_child = children->size();
  size_t begin = node.begin;
  for (size_t& size : child_sizes_) {
    const size_t child_begin = begin;
    begin += size;
    children->push_back({node.first_page, next + 1, child_begin, begin});
    size = child_begin;  // from here on the index of its next sequence
  }
  sorted_.assign(members_.begin() + node.begin, members_.begin() + node.end);
  size_t alone = node.end - num_alone;
  for (size_t m = node.begin; m < node.end; ++m) {
    const size_t sequence = sorted_[m - node.begin];
    const Item& item = sequences_[sequence];
    const int32_t page = next < item.num_pages ? item.pages[next] : -1;
    const int32_t child = page < 0 ? -1 : child_of_page_[page];
    members_[child < 0 ? alone++ : child_sizes_[child]++] = sequence;
  }
  auto kept = children->begin() + static_cast<ptrdiff_t>(first_child);
  for (auto it = kept; it != children->end(); ++it) {
    child_of_page_[sequences_[members_[it->begin]].pages[next]] = -1;
    if (it->end - it->begin == 1) continue;
    *kept = *it;
    kept->end_page = CommonEnd(*kept);
    ++kept;
  }
  children->erase(kept, children->end());
}

int64_t SharedPrefix::CommonEnd(const Node& node) const {
  const Item& first = sequences_[members_[node.begin]];
  int64_t end = first.num_pages;
  for (size_t m = node.begin + 1; m < node.end; ++m) {
    const Item& other = sequences_[members_[m]];
    end = std::min(end, other.num_pages);
    // The common case: std::equal is several times faster than std::mismatch.
    if (std::equal(first.pages + node.end_page, first.pages + end, other.pages + node.end_page)) {
      continue;
    }
    end = std::mismatch(first.pages + node.end_page, first.pages + end, other.pages + node.end_page)
              .first -
          first.pages;
  }
  return end;
}

bool SharedPrefix::IsWorthwhile(const Node& node) const {
  const auto num_sequences = static_cast<int64_t>(node.end - node.begin);
  const int64_t num_positions = (node.end_page - node.first_page) * page_size_;
  return num_positions * (num_sequences - 1) >= min_saved_positions_;
}

}  // namespace pagedkv
