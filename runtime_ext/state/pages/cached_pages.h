// SPDX-License-Identifier: Apache-2.0
/*!
 * \file cached_pages.h
 * \brief The cached pages of a pool, in the order in which they are reclaimed.
 *
 * Pages of a lower rank go first, and among those of one rank the least recently used one. This is
 * a heap in an array: an insertion of the most recently used page takes constant time, any other
 * operation logarithmic time at most, and none allocates memory after construction.
 */
#ifndef TVM_PAGEDKV_STATE_PAGES_CACHED_PAGES_H_
#define TVM_PAGEDKV_STATE_PAGES_CACHED_PAGES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pagedkv {

class CachedPages {
 public:
  explicit CachedPages(int32_t num_pages) : places_(num_pages, kNone) { heap_.reserve(num_pages); }

  int32_t size() const { return static_cast<int32_t>(heap_.size()); }
  bool Contains(int32_t page) const { return places_[page] != kNone; }
  /*! \brief The page that is reclaimed next; there must be one. */
  int32_t first() const { return heap_.front().page; }
  /*! \brief All pages, in the order in which they are reclaimed. */
  std::vector<int32_t> List() const {
    std::vector<Entry> entries = heap_;
    std::sort(entries.begin(), entries.end(),
              [](const Entry& a, const Entry& b) { return a.key < b.key; });
    std::vector<int32_t> pages;
    for (const Entry& entry : entries) pages.push_back(entry.page);
    return pages;
  }

  /*! \brief Adds a page as the most recently used one of its rank. */
  void Insert(int32_t page, uint8_t rank = 0) { Add(page, KeyOf(rank, ++newest_)); }
  /*! \brief Adds a page as the least recently used one of its rank: undoes Remove(first()). */
  void InsertOldest(int32_t page, uint8_t rank = 0) { Add(page, KeyOf(rank, --oldest_)); }
  void Remove(int32_t page) {
    const auto place = static_cast<size_t>(places_[page]);
    places_[page] = kNone;
    const Entry last = heap_.back();
    heap_.pop_back();
    if (place < heap_.size()) Move(place, last);
  }
  /*! \brief Gives a page another rank; it was used when it was. */
  void SetRank(int32_t page, uint8_t rank) {
    const auto place = static_cast<size_t>(places_[page]);
    constexpr uint64_t kUse = (uint64_t{1} << kUseBits) - 1;
    Move(place, {uint64_t{rank} << kUseBits | (heap_[place].key & kUse), page});
  }

 private:
  static constexpr int32_t kNone = -1;
  static constexpr int kUseBits = 56;
  struct Entry {
    uint64_t key;  // the rank, then a number that grows from use to use
    int32_t page;
  };

  static uint64_t KeyOf(uint8_t rank, uint64_t use) { return uint64_t{rank} << kUseBits | use; }
  void Add(int32_t page, uint64_t key) {
    heap_.push_back({key, page});
    Move(heap_.size() - 1, {key, page});
  }
  void Put(size_t place, const Entry& entry) {
    heap_[place] = entry;
    places_[entry.page] = static_cast<int32_t>(place);
  }
  /*! \brief Puts an entry into an empty place, or near it where the order asks for it. */
  void Move(size_t place, const Entry& entry) {
    while (place > 0 && entry.key < heap_[(place - 1) / 2].key) {
      Put(place, heap_[(place - 1) / 2]);
      place = (place - 1) / 2;
    }
    for (;;) {
      size_t child = 2 * place + 1;
      if (child >= heap_.size()) break;
      if (child + 1 < heap_.size() && heap_[child + 1].key < heap_[child].key) ++child;
      if (entry.key < heap_[child].key) break;
      Put(place, heap_[child]);
      place = child;
    }
    Put(place, entry);
  }

  std::vector<Entry> heap_;      // no entry has a smaller key than the one at half its index
  std::vector<int32_t> places_;  // [page] in the heap
  uint64_t newest_ = uint64_t{1} << (kUseBits - 1), oldest_ = newest_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_PAGES_CACHED_PAGES_H_
