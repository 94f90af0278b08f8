// SPDX-License-Identifier: Apache-2.0
/*!
 * \file shared_prefix.h
 * \brief The shared prefixes of a batch, as a tree of segments.
 *
 *     sequence 0   [ a a a ][ b b ] . .
 *     sequence 1   [ a a a ][ b b ] . . .
 *     sequence 2   [ a a a ] . .
 *                   level 0  level 1
 *
 * A segment is a range of pages that at least two sequences of the batch share, together with these
 * sequences. Segments of one level have no sequence in common, and a sequence has at most one
 * segment per level. Attention reads the pages of a segment once for all rows of its sequences.
 */
#ifndef TVM_PAGEDKV_STATE_PLANS_SHARED_PREFIX_H_
#define TVM_PAGEDKV_STATE_PLANS_SHARED_PREFIX_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "state/pages/page_pool.h"

namespace pagedkv {

/*!
 * \brief A segment pays for its launch and merge when it saves reading this many positions. Pages
 * of a smaller one belong to the segments below it.
 */
constexpr int64_t kMinSavedPositions = 512;
/*!
 * \brief Like kMinSavedPositions, on a GPU. An estimate from data sheets, not measured.
 *
 * At 4 KiB per position this is 16 MiB, which an H200 reads in the time of one or two launches.
 */
constexpr int64_t kMinSavedPositionsOnDevice = 4096;

struct SharedSegment {
  int64_t first_page;  // index in the page lists of its sequences
  int64_t num_pages;
  size_t begin, end;  // its sequences are members()[begin : end]
};

class SharedPrefix {
 public:
  SharedPrefix(int32_t num_pages, int32_t page_size);

  /*! \brief Sets how many positions a segment has to save from now on. */
  void set_min_saved_positions(int64_t num_positions) { min_saved_positions_ = num_positions; }

  /*! \brief Begins a new batch. */
  void Clear();
  /*! \brief Adds a sequence with the pages that may be shared. Find reads them. */
  void Add(const int32_t* pages, int64_t num_pages) { sequences_.push_back({pages, num_pages, 0}); }
  /*! \brief Finds the segments. Once its vectors have grown it allocates nothing. */
  void Find(const PagePool& pool);

  /*! \brief All segments, level by level. */
  const std::vector<SharedSegment>& segments() const { return segments_; }
  /*! \brief Segments of level l are segments()[level_begins()[l] : level_begins()[l + 1]]. */
  const std::vector<size_t>& level_begins() const { return level_begins_; }
  size_t num_levels() const { return level_begins_.size() - 1; }
  /*! \brief Sequences, numbered in the order in which they were added. */
  const std::vector<size_t>& members() const { return members_; }
  /*! \brief Number of leading pages of a sequence that are in segments. */
  int64_t NumPagesOf(size_t sequence) const {
    return segments_.empty() ? 0 : sequences_[sequence].num_covered;
  }

 private:
  struct Item {
    const int32_t* pages;
    int64_t num_pages;
    int64_t num_covered;
  };
  /*! \brief Sequences that agree in all pages before `end`, of which [begin, end) are uncovered. */
  struct Node {
    int64_t first_page, end_page;
    size_t begin, end;
  };

  void Split(const Node& node, const PagePool& pool, std::vector<Node>* children);
  int64_t CommonEnd(const Node& node) const;
  bool IsWorthwhile(const Node& node) const;

  int32_t page_size_;
  int64_t min_saved_positions_ = kMinSavedPositions;
  std::vector<Item> sequences_;
  std::vector<size_t> members_;
  std::vector<SharedSegment> segments_;
  std::vector<size_t> level_begins_;
  // Scratch.
  std::vector<int32_t> child_of_page_;  // [num_pages] -1 between calls
  std::vector<Node> nodes_, next_nodes_;
  std::vector<size_t> child_sizes_, sorted_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_PLANS_SHARED_PREFIX_H_
