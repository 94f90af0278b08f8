// SPDX-License-Identifier: Apache-2.0
/*!
 * \file prefix_children.cc
 * \brief A sorted list of nodes in blocks.
 */
#include "state/prefix_tree/prefix_children.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "state/prefix_tree/prefix_node.h"

namespace pagedkv {

namespace {

bool IsLessText(TokenSpan a, TokenSpan b) {
  return std::lexicographical_compare(a.data, a.data + a.size, b.data, b.data + b.size);
}

}  // namespace

PrefixChildren::PrefixChildren() = default;
PrefixChildren::~PrefixChildren() = default;

uint64_t PrefixChildren::HeadOf(TokenSpan page) const {
  // Tokens are not negative. One that is missing counts as 0: then the texts decide.
  const auto at = [&](int64_t i) -> uint64_t { return i < page.size ? page.data[i] : 0; };
  return at(skip_) << 32 | at(skip_ + 1);
}

PrefixChildren::Place PrefixChildren::LowerBound(uint64_t head, TokenSpan page) const {
  // The last block that begins before the page.
  const auto block = std::partition_point(blocks_.begin(), blocks_.end(), [&](const Block& each) {
    if (each.first_head != head) return each.first_head < head;
    return IsLessText(each.children.front().node->TokensOf(0), page);
  });
  if (block == blocks_.begin()) return {0, 0};
  const std::vector<Child>& children = std::prev(block)->children;
  const auto child = std::partition_point(children.begin(), children.end(), [&](const Child& each) {
    if (each.head != head) return each.head < head;
    return IsLessText(each.node->TokensOf(0), page);
  });
  return {static_cast<size_t>(block - blocks_.begin()) - 1,
          static_cast<size_t>(child - children.begin())};
}

int64_t PrefixChildren::NumCommonWith(uint64_t head, TokenSpan page, const Child& child) const {
  if (head >> 32 != child.head >> 32) return skip_;
  // Of several children, none ends with what all share: each has the first token of its head.
  if (head != child.head && size_ > 1) return std::min(skip_ + 1, page.size);
  return NumCommon(child.node->TokensOf(0), page);
}

int64_t PrefixChildren::Find(TokenSpan page, PrefixNode** child) const {
  if (size_ == 0) return 0;
  if (skip_ > 0) {
    const int64_t num_common = NumCommon(front()->TokensOf(0), page);
    if (num_common < skip_ || size_ == 1) {
      if (num_common > 0) *child = front();
      return num_common;
    }
  }
  const uint64_t head = HeadOf(page);
  const Place place = LowerBound(head, page);
  const std::vector<Child>& children = blocks_[place.block].children;
  // In the order of texts, the one with the most tokens in common is a neighbour.
  int64_t num_common = 0;
  const auto visit = [&](const Child& each) {
    const int64_t count = NumCommonWith(head, page, each);
    if (count <= num_common) return;
    num_common = count;
    *child = each.node.get();
  };
  if (place.index < children.size()) {
    visit(children[place.index]);
  } else if (place.block + 1 < blocks_.size()) {
    visit(blocks_[place.block + 1].children.front());
  }
  if (num_common < page.size && place.index > 0) visit(children[place.index - 1]);
  return num_common;
}

void PrefixChildren::SetSkip(int64_t skip) noexcept {
  skip_ = skip;
  for (Block& block : blocks_) {
    for (Child& child : block.children) child.head = HeadOf(child.node->TokensOf(0));
    block.first_head = block.children.front().head;
  }
}

void PrefixChildren::Reserve() {
  if (size_ > 0) return;
  blocks_.reserve(1);
  reserved_.reserve(1);
}

PrefixNode* PrefixChildren::Insert(std::unique_ptr<PrefixNode> node) {
  PrefixNode* added = node.get();
  const TokenSpan page = node->TokensOf(0);
  if (size_ == 0) {
    Reserve();
    skip_ = page.size;
    blocks_.push_back({HeadOf(page), std::move(reserved_)});
    blocks_.back().children.push_back({HeadOf(page), std::move(node)});
    size_ = 1;
    return added;
  }
  const int64_t num_common = NumCommon(front()->TokensOf(0), page);
  if (num_common < skip_) SetSkip(num_common);
  const uint64_t head = HeadOf(page);
  Place place = LowerBound(head, page);
  if (blocks_[place.block].children.size() == kMaxBlock) {
    constexpr size_t kHalf = kMaxBlock / 2;
    std::vector<Child> upper;
    upper.reserve(kMaxBlock);
    if (blocks_.size() == blocks_.capacity()) blocks_.reserve(2 * blocks_.size());
    std::vector<Child>& lower = blocks_[place.block].children;
    upper.assign(std::make_move_iterator(lower.begin() + kHalf),
                 std::make_move_iterator(lower.end()));
    lower.resize(kHalf);
    const uint64_t first_head = upper.front().head;
    const auto where = blocks_.begin() + static_cast<ptrdiff_t>(place.block) + 1;
    blocks_.insert(where, Block{first_head, std::move(upper)});
    if (place.index > kHalf) place = {place.block + 1, place.index - kHalf};
  }
  std::vector<Child>* children = &blocks_[place.block].children;
  children->insert(children->begin() + static_cast<ptrdiff_t>(place.index),
                   Child{head, std::move(node)});
  blocks_[place.block].first_head = children->front().head;
  ++size_;
  return added;
}

PrefixChildren::Place PrefixChildren::PlaceOf(const PrefixNode* node) const {
  const TokenSpan page = node->TokensOf(0);
  const Place place = LowerBound(HeadOf(page), page);
  return place.index < blocks_[place.block].children.size() ? place : Place{place.block + 1, 0};
}

std::unique_ptr<PrefixNode> PrefixChildren::Remove(const PrefixNode* node) noexcept {
  const Place place = PlaceOf(node);
  Block& block = blocks_[place.block];
  std::unique_ptr<PrefixNode> removed = std::move(block.children[place.index].node);
  block.children.erase(block.children.begin() + static_cast<ptrdiff_t>(place.index));
  --size_;
  if (block.children.empty()) {
    blocks_.erase(blocks_.begin() + static_cast<ptrdiff_t>(place.block));
  } else {
    block.first_head = block.children.front().head;
  }
  return removed;
}

std::unique_ptr<PrefixNode> PrefixChildren::Replace(const PrefixNode* node,
                                                    std::unique_ptr<PrefixNode> other) noexcept {
  const Place place = PlaceOf(node);
  return std::exchange(blocks_[place.block].children[place.index].node, std::move(other));
}

void PrefixChildren::CheckIntegrity() const {
  int64_t size = 0;
  for (const Block& block : blocks_) {
    if (block.children.empty() || block.children.size() > kMaxBlock ||
        block.first_head != block.children.front().head) {
      Raise(kRuntimeError, "a block of ", block.children.size(), " children is broken");
    }
    size += static_cast<int64_t>(block.children.size());
    for (const Child& child : block.children) {
      const TokenSpan page = child.node->TokensOf(0);
      if (child.head != HeadOf(page) || NumCommon(page, front()->TokensOf(0)) < skip_) {
        Raise(kRuntimeError, "a node of the prefix tree is found by the tokens of another");
      }
    }
  }
  if (size != size_) Raise(kRuntimeError, "a node counts ", size_, " children, but has ", size);
}

}  // namespace pagedkv
