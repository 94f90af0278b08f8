// SPDX-License-Identifier: Apache-2.0
/*!
 * \file shared_prefix_test.cc
 * \brief The tree of common page prefixes: exact, in the batch's order, and nothing lost.
 */
#include "state/plans/shared_prefix.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "check.h"

namespace pagedkv::shared_prefix_test {

namespace {

using Pages = std::vector<int32_t>;

constexpr int32_t kNumPages = 64;

PagePool PoolOf(const std::vector<Pages>& batch) {
  PagePool pool(kNumPages);
  for (int32_t i = 0; i < kNumPages; ++i) pool.Allocate();  // one owner each
  std::vector<int32_t> num_owners(kNumPages, 0);
  for (const Pages& pages : batch) {
    for (int32_t page : pages) {
      if (++num_owners[page] > 1) pool.AddOwner(page);
    }
  }
  return pool;
}

/*! \brief "first page + number of pages: sequences" of each segment; levels end with a bar. */
std::string Find(SharedPrefix* shared, const std::vector<Pages>& batch) {
  shared->Clear();
  for (const Pages& pages : batch) {
    shared->Add(pages.data(), static_cast<int64_t>(pages.size()));
  }
  shared->Find(PoolOf(batch));
  std::string text;
  for (size_t level = 0; level < shared->num_levels(); ++level) {
    for (size_t s = shared->level_begins()[level]; s < shared->level_begins()[level + 1]; ++s) {
      const SharedSegment& segment = shared->segments()[s];
      text += std::to_string(segment.first_page) + "+" + std::to_string(segment.num_pages) + ":";
      for (size_t m = segment.begin; m < segment.end; ++m) {
        text += " " + std::to_string(shared->members()[m]);
      }
      text += "; ";
    }
    text += "| ";
  }
  return text;
}

Pages NumbersOf(const SharedPrefix& shared, size_t num_sequences) {
  Pages numbers;
  for (size_t i = 0; i < num_sequences; ++i) {
    numbers.push_back(static_cast<int32_t>(shared.NumPagesOf(i)));
  }
  return numbers;
}

// A page of so many slots is worth a segment for two sequences.
constexpr int32_t kLargePage = kMinSavedPositions;

TEST_CASE("shared prefix: nothing in common") {
  SharedPrefix shared(kNumPages, kLargePage);
  REQUIRE_EQ(Find(&shared, {}), "");
  REQUIRE_EQ(Find(&shared, {{0, 1}}), "");
  REQUIRE_EQ(Find(&shared, {{}, {}}), "");
  REQUIRE_EQ(Find(&shared, {{0, 1}, {2, 3}, {}}), "");
  REQUIRE_EQ(Find(&shared, {{0, 1}, {2, 1}}), "");  // a common page, but no common prefix
  REQUIRE_EQ(shared.num_levels(), 0u);
  REQUIRE_EQ(NumbersOf(shared, 2), (Pages{0, 0}));
}

TEST_CASE("shared prefix: all in common") {
  SharedPrefix shared(kNumPages, kLargePage);
  REQUIRE_EQ(Find(&shared, {{0, 1, 2}, {0, 1, 2}, {0, 1, 2}}), "0+3: 0 1 2; | ");
  REQUIRE_EQ(NumbersOf(shared, 3), (Pages{3, 3, 3}));
  REQUIRE_EQ(Find(&shared, {{0, 1, 2}, {}, {0, 1}, {0, 1, 3}}), "0+2: 0 2 3; | ");
  REQUIRE_EQ(NumbersOf(shared, 4), (Pages{2, 0, 2, 2}));
  REQUIRE_EQ(Find(&shared, {{4}, {5}}), "");  // nothing is left of the last batch
}

TEST_CASE("shared prefix: levels") {
  SharedPrefix shared(kNumPages, kLargePage);
  const std::vector<Pages> batch{{0, 1, 2, 3, 4}, {9, 8},       {0, 1, 2, 3, 5}, {0, 1, 6, 7},
                                 {9, 8, 10},      {0, 1, 6, 7}, {0, 1, 2, 11},   {12}};
  // The members of a segment stand in the order of the segments below it.
  const std::string expected = "0+2: 0 2 6 3 5; 0+2: 1 4; | 2+1: 0 2 6; 2+2: 3 5; | 3+1: 0 2; | ";
  REQUIRE_EQ(Find(&shared, batch), expected);
  REQUIRE_EQ(NumbersOf(shared, 8), (Pages{4, 2, 4, 4, 2, 4, 3, 0}));
  const size_t* data = shared.members().data();
  REQUIRE_EQ(Find(&shared, batch), expected);
  REQUIRE(shared.members().data() == data);  // nothing was allocated anew
}

TEST_CASE("shared prefix: threshold") {
  constexpr int32_t kPage = kMinSavedPositions / 4;
  SharedPrefix shared(kNumPages, kPage);
  REQUIRE_EQ(Find(&shared, {{0, 1, 2}, {0, 1, 2}}), "");
  REQUIRE_EQ(Find(&shared, {{0, 1, 2, 3}, {0, 1, 2, 3}}), "0+4: 0 1; | ");
  REQUIRE_EQ(Find(&shared, {{0}, {0}, {0}, {0}}), "");
  REQUIRE_EQ(Find(&shared, {{0}, {0}, {0}, {0}, {0}}), "0+1: 0 1 2 3 4; | ");
  // Page 0 alone is not worth it: the segments below it begin with it, on the first level.
  const std::vector<Pages> batch{{0, 1, 2, 3}, {0, 4, 5, 6}, {0, 1, 2, 3}, {0, 7}};
  REQUIRE_EQ(Find(&shared, batch), "0+4: 0 2; | ");
  REQUIRE_EQ(NumbersOf(shared, 4), (Pages{4, 0, 4, 0}));
  // A segment that is not worth it below one that is.
  REQUIRE_EQ(Find(&shared, {{0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}, {0, 1}}), "0+2: 0 1 2; | ");
}

/*! \brief Random trees against what the definition says. */
TEST_CASE("shared prefix: random trees") {
  std::mt19937 engine(7);
  auto draw = [&](int n) { return static_cast<int>(engine() % static_cast<unsigned>(n)); };
  SharedPrefix shared(kNumPages, kLargePage);
  for (int round = 0; round < 2000; ++round) {
    std::vector<Pages> batch;
    int32_t next_page = 0;
    while (static_cast<int>(batch.size()) < 1 + draw(9)) {
      Pages pages;
      if (!batch.empty() && draw(4) > 0) {
        const Pages& parent = batch[draw(static_cast<int>(batch.size()))];
        pages.assign(parent.begin(), parent.begin() + draw(static_cast<int>(parent.size()) + 1));
      }
      for (int i = draw(4); i > 0 && next_page < kNumPages; --i) pages.push_back(next_page++);
      batch.insert(batch.begin() + draw(static_cast<int>(batch.size()) + 1), pages);
    }
    Find(&shared, batch);
    for (size_t i = 0; i < batch.size(); ++i) {
      // The longest prefix shared with another sequence.
      size_t common = 0;
      for (size_t j = 0; j < batch.size(); ++j) {
        const size_t size = std::min(batch[i].size(), batch[j].size());
        size_t same = 0;
        while (same < size && batch[i][same] == batch[j][same]) ++same;
        if (i != j) common = std::max(common, same);
      }
      REQUIRE_EQ(shared.NumPagesOf(i), static_cast<int64_t>(common));
      // Its segments cover these pages, one a level.
      int64_t covered = 0;
      for (size_t level = 0; level < shared.num_levels(); ++level) {
        int num_of_level = 0;
        for (size_t s = shared.level_begins()[level]; s < shared.level_begins()[level + 1]; ++s) {
          const SharedSegment& segment = shared.segments()[s];
          auto begin = shared.members().begin();
          if (std::count(begin + segment.begin, begin + segment.end, i) == 0) continue;
          REQUIRE_EQ(segment.first_page, covered);
          covered += segment.num_pages;
          ++num_of_level;
        }
        REQUIRE(num_of_level <= 1);
      }
      REQUIRE_EQ(covered, static_cast<int64_t>(common));
    }
  }
}

}  // namespace

}  // namespace pagedkv::shared_prefix_test
