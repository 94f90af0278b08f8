// SPDX-License-Identifier: Apache-2.0
/*!
 * \file prefix_hit_rate_test.cc
 * \brief A full pool gives up what was least recently used, and the end of a text before the rest.
 */
#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "check.h"
#include "state/plans/forward_plan.h"
#include "state/table/sequence_table.h"

namespace pagedkv::prefix_hit_rate_test {

namespace {

constexpr int32_t kPageSize = 4;

using Tokens = std::vector<int32_t>;

TokenSpan Span(const Tokens& tokens) {
  return {tokens.data(), static_cast<int64_t>(tokens.size())};
}

/*! \brief A cache of pages by their text, the least recently used one evicted first. */
class Oracle {
 public:
  explicit Oracle(size_t num_pages) : num_pages_(num_pages) {}

  /*! \brief Tokens of the leading pages that are there; then all pages of the text are. */
  int64_t Use(const Tokens& tokens) {
    std::vector<Tokens> pages;
    for (size_t end = kPageSize; end < tokens.size() + kPageSize; end += kPageSize) {
      pages.emplace_back(tokens.begin(), tokens.begin() + std::min(end, tokens.size()));
    }
    size_t num_hits = 0;
    while (num_hits < pages.size() && times_.count(pages[num_hits])) ++num_hits;
    for (size_t i = pages.size(); i-- > 0;) times_[pages[i]] = ++now_;
    while (times_.size() > num_pages_) {
      times_.erase(std::min_element(times_.begin(), times_.end(),
                                    [](auto& a, auto& b) { return a.second < b.second; }));
    }
    return std::min<int64_t>(num_hits * kPageSize, tokens.size() - 1);
  }

 private:
  size_t num_pages_;
  int64_t now_ = 0;
  std::map<Tokens, int64_t> times_;
};

TEST_CASE("prefix hit rate: as many hits as with an oracle that evicts by use") {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    CAPTURE(seed);
    constexpr int32_t kNumPages = 100;
    SequenceTable table(2, kPageSize, {kNumPages});
    ForwardPlan plan(&table, 1 << 20);
    Oracle oracle(kNumPages);
    std::mt19937_64 engine(seed);
    int64_t num_reused = 0, num_expected = 0;
    for (int i = 0; i < 2000; ++i) {
      // Popular beginnings of 16 tokens, then turns of 8.
      Tokens tokens;
      const auto topic = static_cast<int32_t>(std::min(engine() % 8, engine() % 8));
      for (int32_t n = 0; n < 16; ++n) tokens.push_back(topic);
      for (uint64_t turn = 1 + engine() % 4; turn > 0; --turn) {
        const auto answer = static_cast<int32_t>(std::min(engine() % 3, engine() % 3));
        for (int32_t n = 0; n < 8; ++n) tokens.push_back(answer);
      }
      tokens.push_back(9);
      num_expected += oracle.Use(tokens);
      int64_t id = 0, length = table.AddWithPrefix(id, "", Span(tokens));
      num_reused += length;
      int64_t num_rows = static_cast<int64_t>(tokens.size()) - length;
      plan.Prepare({&id, 1}, {&num_rows, 1});
      plan.Acquire();
      plan.Commit();
      table.prefixes().Record(&table.At(id), Span(tokens).From(length));
      plan.Finish();
      table.Remove(id);
      table.CheckIntegrity();
    }
    CAPTURE(num_reused);
    REQUIRE(num_expected > 20000);
    REQUIRE(num_reused >= num_expected * 99 / 100);
  }
}

}  // namespace

}  // namespace pagedkv::prefix_hit_rate_test
