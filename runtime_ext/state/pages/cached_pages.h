// SPDX-License-Identifier: Apache-2.0
/*!
 * \file cached_pages.h
 * \brief A list of the cached pages of a pool, least recently used first.
 *
 * A doubly linked list in an array with an element per page: every operation takes constant time
 * and none allocates memory after construction.
 */
#ifndef TVM_PAGEDKV_STATE_PAGES_CACHED_PAGES_H_
#define TVM_PAGEDKV_STATE_PAGES_CACHED_PAGES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pagedkv {

class CachedPages {
 public:
  explicit CachedPages(int32_t num_pages)
      : links_(static_cast<size_t>(num_pages) + 1, {kNone, kNone}), end_(num_pages) {
    links_[end_] = {end_, end_};
  }

  int32_t size() const { return size_; }
  bool Contains(int32_t page) const { return links_[page].next != kNone; }
  /*! \brief The least recently used page; there must be one. */
  int32_t oldest() const { return links_[end_].next; }
  /*! \brief All pages, least recently used first. */
  std::vector<int32_t> List() const {
    std::vector<int32_t> pages;
    for (int32_t page = oldest(); page != end_; page = links_[page].next) pages.push_back(page);
    return pages;
  }

  /*! \brief Adds a page as the most recently used one. */
  void Insert(int32_t page) { Link(page, links_[end_].prev, end_); }
  /*! \brief Adds a page as the least recently used one: undoes Remove(oldest()). */
  void InsertOldest(int32_t page) { Link(page, end_, links_[end_].next); }
  void Remove(int32_t page) {
    const Links links = links_[page];
    links_[links.prev].next = links.next;
    links_[links.next].prev = links.prev;
    links_[page] = {kNone, kNone};
    --size_;
  }

 private:
  static constexpr int32_t kNone = -1;
  struct Links {
    int32_t prev, next;
  };

  void Link(int32_t page, int32_t prev, int32_t next) {
    links_[page] = {prev, next};
    links_[prev].next = links_[next].prev = page;
    ++size_;
  }

  std::vector<Links> links_;  // [num_pages + 1]; the last element is the sentinel
  int32_t end_;
  int32_t size_ = 0;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_PAGES_CACHED_PAGES_H_
