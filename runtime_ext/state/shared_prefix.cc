// SPDX-License-Identifier: Apache-2.0
/*!
 * \file shared_prefix.cc
 * \brief Which first pages the sequences of a batch have in common, as a tree of segments.
 */
#include "state/shared_prefix.h"

#include <algorithm>
#include <numeric>

namespace pagedkv {

SharedPrefix::SharedPrefix(int32_t num_pages, int32_t page_size)
    : page_size_(page_size), level_begins_(1, 0), part_of_page_(num_pages, -1) {}

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
    for (size_t i = 0; i < nodes_.size(); ++i) {  // which may grow
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

/*! \brief Sorts the node's sequences by their next page; those that agree there are its children.
 */
void SharedPrefix::Split(const Node& node, const PagePool& pool, std::vector<Node>* children) {
  const int64_t next = node.end_page;
  auto page_of = [&](size_t m) {
    const Item& item = sequences_[members_[m]];
    if (next >= item.num_pages || pool.RefCount(item.pages[next]) == 1) return -1;
    return item.pages[next];
  };
  // Parts are numbered as they come, so that the result depends on the batch only.
  part_sizes_.clear();
  size_t num_alone = 0;
  for (size_t m = node.begin; m < node.end; ++m) {
    const int32_t page = page_of(m);
    if (page < 0) {
      ++num_alone;
      continue;
    }
    if (part_of_page_[page] < 0) {
      part_of_page_[page] = static_cast<int32_t>(part_sizes_.size());
      part_sizes_.push_back(0);
    }
    ++part_sizes_[part_of_page_[page]];
  }
  if (part_sizes_.empty()) return;

  const size_t first_child = children->size();
  size_t begin = node.begin;
  for (size_t& size : part_sizes_) {
    const size_t part_begin = begin;
    begin += size;
    children->push_back({node.first_page, next + 1, part_begin, begin});
    size = part_begin;  // from here on: where its next sequence goes
  }
  sorted_.assign(members_.begin() + node.begin, members_.begin() + node.end);
  size_t alone = node.end - num_alone;
  for (size_t m = node.begin; m < node.end; ++m) {
    const size_t sequence = sorted_[m - node.begin];
    const Item& item = sequences_[sequence];
    const int32_t page = next < item.num_pages ? item.pages[next] : -1;
    const int32_t part = page < 0 ? -1 : part_of_page_[page];
    members_[part < 0 ? alone++ : part_sizes_[part]++] = sequence;
  }
  auto child = children->begin() + static_cast<ptrdiff_t>(first_child);
  for (auto it = child; it != children->end(); ++it) {
    part_of_page_[sequences_[members_[it->begin]].pages[next]] = -1;
    if (it->end - it->begin == 1) continue;
    *child = *it;
    child->end_page = CommonEnd(*child);
    ++child;
  }
  children->erase(child, children->end());
}

int64_t SharedPrefix::CommonEnd(const Node& node) const {
  const Item& first = sequences_[members_[node.begin]];
  int64_t end = first.num_pages;
  for (size_t m = node.begin + 1; m < node.end; ++m) {
    const Item& other = sequences_[members_[m]];
    end = std::min(end, other.num_pages);
    // Mostly so, and several times faster to find out than where they differ.
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
