// SPDX-License-Identifier: Apache-2.0
/*!
 * \file eviction_hints_test.cc
 * \brief Hints change which pages are evicted, and nothing else.
 */
#include <map>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "random_text.h"
#include "state/plans/forward_plan.h"
#include "state/table/sequence_table.h"
#include "tier_fixture.h"

namespace pagedkv::eviction_hints_test {

namespace {

constexpr int32_t kPageSize = 4;
constexpr int64_t kNever = EvictionHints::kNever;

class Cache {
 public:
  /*! \param num_slots Of host memory; 0: no tier. */
  explicit Cache(int32_t num_pages, int64_t num_slots = 0, std::vector<int64_t> windows = {0})
      : table(8, kPageSize, std::vector<int32_t>(windows.size(), num_pages), windows),
        plan_(&table, 1 << 20),
        slots_(windows.size(), Contents(num_pages * kPageSize, 0)),
        tier_({num_slots, {TierWrites::kBack, 1}}, kPageSize, &slots_, &engine_) {
    if (num_slots == 0) return;
    table.prefixes().SetHostMemory(tier_.tier(), &tier_, {TierWrites::kBack, 1}, "a model");
  }

  /*! \brief The text of a number; texts have nothing in common. */
  static Tokens TextOf(int32_t number, int64_t num_tokens) {
    Tokens tokens(static_cast<size_t>(num_tokens));
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = number * 1000 + static_cast<int32_t>(i);
    return tokens;
  }
  int64_t Begin(int64_t id, const Tokens& tokens) {
    std::vector<PageLoad> loads;
    const int64_t length = table.AddWithPrefix(id, "", Span(tokens), &loads);
    REQUIRE(tier_.Load(loads));
    table.FinishLoads(id, loads);
    const TokenSpan rest = Span(tokens).From(length);
    const int64_t count = rest.size;
    plan_.Prepare({&id, 1}, {&count, 1});
    plan_.Acquire();
    plan_.Commit();
    table.prefixes().Record(&table.At(id), rest);
    plan_.Finish();
    Check();
    return length;
  }
  /*! \brief Computes a text and removes its sequence. \return Tokens that are reused. */
  int64_t Use(const Tokens& tokens) {
    const int64_t length = Begin(7, tokens);
    table.Remove(7);
    Check();
    return length;
  }
  int64_t Match(const Tokens& tokens) const { return table.prefixes().Match("", Span(tokens)); }
  int64_t Retain(const Tokens& tokens, int64_t priority, int64_t expiry = kNever) {
    const int64_t hint = hints().Retain("", Span(tokens), priority, expiry);
    Check();
    return hint;
  }
  int64_t Pin(const Tokens& tokens, int64_t expiry = kNever) {
    const int64_t hint = hints().Pin("", Span(tokens), expiry);
    Check();
    return hint;
  }
  int64_t Demote(const Tokens& tokens, bool from_host = false) {
    const int64_t num_pages = table.prefixes().Demote("", Span(tokens), from_host);
    Check();
    return num_pages;
  }
  EvictionHints& hints() { return table.prefixes().hints(); }
  void Check() const {
    table.CheckIntegrity();
    tier_.tier()->CheckIntegrity();
  }

  SequenceTable table;

 private:
  std::mt19937_64 engine_{1};
  ForwardPlan plan_;
  std::vector<Contents> slots_;
  mutable TestTier tier_;
};

const Tokens kA = Cache::TextOf(1, 9), kB = Cache::TextOf(2, 9), kC = Cache::TextOf(3, 9);

TEST_CASE("hints: a retained text outlives texts that were used later") {
  Cache cache(6);
  cache.Use(kA);
  cache.Retain(kA, 1);
  cache.Use(kB);
  cache.Use(kC);
  REQUIRE_EQ(cache.Match(kA), 8);
  REQUIRE_LT(cache.Match(kB), 8);
  REQUIRE_EQ(cache.table.pool(0).num_retained(), 2);
  REQUIRE_EQ(cache.table.pool(0).num_available(), 6);  // a step may take them
  cache.Use(Cache::TextOf(4, 24));
  REQUIRE_EQ(cache.Match(kA), 0);
  REQUIRE_EQ(cache.hints().num_hints(), 1);
}

TEST_CASE("hints: a text that is computed later is retained") {
  Cache cache(6);
  cache.Retain(kA, 1);
  REQUIRE_EQ(cache.Match(kA), 0);
  cache.Use(kA);
  cache.Use(kB);
  cache.Use(kC);
  REQUIRE_EQ(cache.Match(kA), 8);
  cache.Use(Cache::TextOf(4, 24));
  cache.Use(kA);  // and when it comes again
  cache.Use(kB);
  cache.Use(kC);
  REQUIRE_EQ(cache.Match(kA), 8);
}

TEST_CASE("hints: a lower priority goes first, and the highest of a page counts") {
  Cache cache(9);
  cache.Use(kA);
  cache.Use(kB);
  cache.Use(kC);
  const int64_t strong = cache.Retain(kA, 80);
  cache.Retain(kB, 20);
  cache.Retain(kA, 10);
  cache.Retain(kC, 50);
  cache.Use(Cache::TextOf(4, 20));
  REQUIRE_EQ(cache.Match(kA), 8);
  REQUIRE_LT(cache.Match(kB), 8);
  REQUIRE_EQ(cache.Match(kC), 8);
  REQUIRE(cache.hints().Release(strong));
  cache.Check();
  cache.Use(Cache::TextOf(5, 24));
  REQUIRE_LT(cache.Match(kA), 8);
  REQUIRE_EQ(cache.Match(kC), 8);
}

TEST_CASE("hints: what two texts share has the priority of both") {
  Cache cache(8);
  Tokens one = kA, other = kA;
  for (int32_t i = 0; i < 4; ++i) one.push_back(i + 1);
  for (int32_t i = 0; i < 4; ++i) other.push_back(i + 5);
  const int64_t hint = cache.Retain(one, 30);
  cache.Use(one);
  cache.Use(other);  // splits the node
  cache.Retain(other, 60);
  REQUIRE(cache.hints().Release(hint));
  cache.Check();
  REQUIRE_EQ(cache.table.pool(0).num_retained(), 3);
  cache.hints().Clear();
  cache.Check();
  REQUIRE_EQ(cache.table.pool(0).num_retained(), 0);
}

TEST_CASE("hints: pinned pages are never evicted and count as used") {
  Cache cache(8);
  cache.Use(kA);
  const int64_t hint = cache.Pin(kA), again = cache.Pin(kA);
  REQUIRE_EQ(cache.table.pool(0).num_used(), 2);
  REQUIRE_EQ(cache.hints().num_pins(), 4);
  REQUIRE_EQ(cache.Use(Cache::TextOf(4, 24)), 0);
  REQUIRE_EQ(cache.Match(kA), 8);
  REQUIRE_RAISES("CacheFullError", "hints pin 4 pages", cache.Use(Cache::TextOf(5, 25)));
  cache.table.Remove(7);
  cache.Check();
  REQUIRE(cache.hints().Release(hint));
  REQUIRE_EQ(cache.table.pool(0).num_used(), 2);
  REQUIRE(cache.hints().Release(again));
  REQUIRE(!cache.hints().Release(again));
  REQUIRE_RAISES("KeyError", "no hint 9", cache.hints().Release(9));
  cache.Check();
  REQUIRE_EQ(cache.table.pool(0).num_used(), 0);
  cache.Use(Cache::TextOf(6, 32));
  REQUIRE_EQ(cache.Match(kA), 0);
}

TEST_CASE("hints: a pinned page is copied before a sequence writes to it") {
  Cache cache(8);
  cache.Use(kA);
  cache.Pin(kA);
  Tokens longer(kA.begin(), kA.begin() + 6);
  longer.push_back(77);
  REQUIRE_EQ(cache.Begin(0, longer), 6);
  REQUIRE_EQ(cache.Match(kA), 8);
  cache.table.Pop(0, 3);
  cache.Check();
  cache.table.Fork(0, 1, 2);
  cache.table.Remove(0);
  cache.Check();
  REQUIRE_EQ(cache.Match(kA), 8);
}

TEST_CASE("hints: pins hold half of a pool at most") {
  Cache cache(8);
  cache.Pin(Cache::TextOf(1, 16));  // pinned when it comes
  cache.Pin(Cache::TextOf(1, 12));  // the same pages
  const std::string message =
      "the pin needs 1 pages of layer group 0, but pins hold 4 and may hold 4";
  REQUIRE_RAISES("CacheFullError", message, cache.Pin(kB.size() > 8 ? Cache::TextOf(2, 4) : kB));
  REQUIRE_EQ(cache.hints().num_hints(), 2);
  cache.Check();
  cache.Use(Cache::TextOf(1, 17));
  REQUIRE_EQ(cache.table.pool(0).num_used(), 4);
  REQUIRE_EQ(cache.hints().num_pins(), 7);
  cache.table.Clear();
  cache.Check();
  REQUIRE_EQ(cache.hints().num_hints(), 0);
  REQUIRE_EQ(cache.table.pool(0).num_free(), 8);
}

TEST_CASE("hints: a hint ends when its time is over") {
  Cache cache(6);
  cache.Use(kA);
  const int64_t hint = cache.Retain(kA, 5, /*expiry=*/100);
  cache.Pin(kA, /*expiry=*/200);
  cache.Pin(kA, kNever);
  cache.hints().Expire(99);
  REQUIRE_EQ(cache.hints().num_hints(), 3);
  cache.hints().Expire(100);
  cache.Check();
  REQUIRE_EQ(cache.hints().num_hints(), 2);
  REQUIRE(!cache.hints().Release(hint));
  REQUIRE_EQ(cache.hints().next_expiry(), 200);
  cache.hints().Expire(1000);
  cache.Check();
  REQUIRE_EQ(cache.hints().num_pins(), 2);
  REQUIRE_EQ(cache.hints().next_expiry(), kNever);
}

TEST_CASE("hints: wrong arguments change nothing") {
  Cache cache(4);
  for (int64_t priority : {0, -1, 101}) {
    REQUIRE_RAISES("ValueError", "priority must be between 1 and 100", cache.Retain(kA, priority));
  }
  REQUIRE_EQ(cache.hints().num_hints(), 0);
  REQUIRE_EQ(cache.table.prefixes().tree().num_nodes(), 0);
  const int64_t hint = cache.Retain({1, 2}, 3);  // no full page
  cache.Check();
  REQUIRE(cache.hints().Release(hint));
  REQUIRE_RAISES("KeyError", "no hint 0", cache.hints().Release(0));
}

TEST_CASE("hints: a demoted text goes first, but not what others share") {
  Cache cache(9);
  Tokens shared = Cache::TextOf(1, 8), agent = shared, other = shared;
  for (int32_t i = 0; i < 6; ++i) agent.push_back(i + 1);
  for (int32_t i = 0; i < 5; ++i) other.push_back(i + 50);
  cache.Use(other);
  cache.Use(kB);
  cache.Use(agent);
  REQUIRE_EQ(cache.Demote(agent), 2);
  cache.Use(Cache::TextOf(4, 8));
  REQUIRE_EQ(cache.Match(agent), 8);
  REQUIRE_EQ(cache.Match(other), 12);
  REQUIRE_EQ(cache.Match(kB), 8);
  cache.Begin(0, kC);
  REQUIRE_EQ(cache.Demote(kC), 0);  // it is running
  cache.Retain(other, 1);
  REQUIRE_EQ(cache.Demote(other), 0);
  REQUIRE_EQ(cache.Demote(Cache::TextOf(9, 12)), 0);  // never heard of
}

TEST_CASE("hints: host memory honours priorities") {
  Cache cache(6, /*num_slots=*/6);
  cache.Use(kA);
  cache.Retain(kA, 5);
  for (int32_t n = 10; n < 20; ++n) cache.Use(Cache::TextOf(n, 24));
  REQUIRE_EQ(cache.Match(kA), 8);  // in host memory by now
  REQUIRE_EQ(cache.table.pool(0).num_retained(), 0);
  REQUIRE_EQ(cache.Use(kA), 8);
  REQUIRE_EQ(cache.table.pool(0).num_retained(), 2);
  cache.hints().Clear();
  cache.Check();
  for (int32_t n = 20; n < 30; ++n) cache.Use(Cache::TextOf(n, 24));
  REQUIRE_EQ(cache.Match(kA), 0);
}

TEST_CASE("hints: a demoted text is in host memory before its pages are reclaimed") {
  Cache cache(6, /*num_slots=*/6);
  cache.Use(kA);
  cache.Use(kB);
  REQUIRE_EQ(cache.Demote(kA), 3);
  cache.table.Clear();
  REQUIRE_EQ(cache.Match(kA), 8);
  REQUIRE_EQ(cache.Match(kB), 0);
}

TEST_CASE("hints: in a group with a window, a hint covers the window before its end") {
  Cache cache(32, 0, {0, 4});
  const Tokens text = Cache::TextOf(1, 64);
  cache.Use(text);
  cache.Pin(text);
  REQUIRE_EQ(cache.table.pool(0).num_used(), 16);
  REQUIRE_EQ(cache.table.pool(1).num_used(), 5);  // 4 and 16 positions
}

TEST_CASE("hints: a hint makes no text known") {
  for (const std::vector<int64_t>& windows : {std::vector<int64_t>{}, {0}, {3}}) {
    Cache cache(16, 0, windows);
    cache.Retain(kA, 1);
    cache.Pin(kA);
    REQUIRE_EQ(cache.Match(kA), 0);
    REQUIRE_EQ(cache.Use(kA), 0);
    if (!windows.empty()) REQUIRE_EQ(cache.Match(kA), 8);
  }
}

TEST_CASE("hints: random texts and hints") {
  int64_t num_reused = 0, num_refused = 0;
  for (uint64_t seed = 0; seed < 30; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 engine(seed);
    auto below = [&](uint64_t limit) { return engine() % limit; };
    Cache cache(24, seed % 3 ? 0 : 20,
                seed % 2 ? std::vector<int64_t>{0} : std::vector<int64_t>{0, 6});
    std::map<int64_t, Tokens> running;
    std::vector<int64_t> hints;
    int64_t now = 0;
    auto text = [&] {
      Tokens tokens(1 + below(30));
      for (size_t i = 0; i < tokens.size(); ++i) {
        tokens[i] = static_cast<int32_t>(i % 5 == 0 ? below(2) : 0);
      }
      return tokens;
    };
    for (int i = 0; i < 400; ++i) {
      const auto id = static_cast<int64_t>(below(4));
      try {
        switch (below(9)) {
          case 0:
            hints.push_back(cache.Retain(text(), 1 + static_cast<int64_t>(below(100)),
                                         below(2) ? kNever : now + 1 + below(20)));
            break;
          case 1:
            hints.push_back(cache.Pin(text(), below(2) ? kNever : now + 1 + below(20)));
            break;
          case 2:
            if (!hints.empty()) cache.hints().Release(hints[below(hints.size())]);
            break;
          case 3:
            cache.Demote(text(), below(2));
            break;
          case 4:
            cache.hints().Expire(now += below(4));
            break;
          case 5:
            if (running.count(id)) {
              cache.table.Pop(id, static_cast<int64_t>(below(running[id].size() + 1)));
              running.erase(id);
              cache.table.Remove(id);
            }
            break;
          default:
            if (running.count(id)) {
              cache.table.Remove(id);
              running.erase(id);
            } else {
              const Tokens tokens = text();
              num_reused += cache.Begin(id, tokens);
              running[id] = tokens;
            }
        }
      } catch (const Error& error) {
        ++num_refused;
        if (cache.table.Find(id) != nullptr && !running.count(id)) cache.table.Remove(id);
      }
      cache.Check();
      if (below(100) == 0) {
        cache.table.Clear();
        running.clear();
        cache.Check();
      }
    }
  }
  REQUIRE_GT(num_reused, 10000);
  REQUIRE_GT(num_refused, 10);
}

}  // namespace

}  // namespace pagedkv::eviction_hints_test
