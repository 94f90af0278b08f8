// SPDX-License-Identifier: Apache-2.0
/*!
 * \file write_through_test.cc
 * \brief A tier that pages are written through to: what a step visits, and what is evicted first.
 */
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "random_text.h"
#include "state/plans/forward_plan.h"
#include "state/table/sequence_table.h"
#include "tier_fixture.h"

namespace pagedkv::write_through_test {

namespace {

constexpr int32_t kPageSize = 4, kNumPages = 1000;

class World {
 public:
  explicit World(int64_t num_slots)
      : table_(4, kPageSize, {kNumPages}),
        plan_(&table_, 1 << 20),
        slots_(1, Contents(kNumPages * kPageSize, 0)),
        tier_({num_slots, {TierWrites::kThrough, 1}}, kPageSize, &slots_, &engine_) {
    table_.prefixes().SetHostMemory(tier_.tier(), &tier_, {TierWrites::kThrough, 1}, "a model");
  }

  /*! \brief The text of a number; texts have nothing in common. */
  static Tokens TextOf(int32_t number, int64_t num_pages) {
    Tokens tokens(num_pages * kPageSize);
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = number * 10000 + static_cast<int32_t>(i);
    return tokens;
  }
  /*! \return Tokens that are reused. */
  int64_t Add(int64_t id, const Tokens& tokens) {
    std::vector<PageLoad> loads;
    const int64_t length = table_.AddWithPrefix(id, "", Span(tokens), &loads);
    REQUIRE(tier_.Load(loads));
    table_.FinishLoads(id, loads);
    return length;
  }
  void Step(int64_t id, TokenSpan tokens) {
    int64_t count = tokens.size;
    plan_.Prepare({&id, 1}, {&count, 1});
    plan_.Acquire();
    plan_.Commit();
    table_.prefixes().Record(&table_.At(id), tokens);
    plan_.Finish();
    table_.CheckIntegrity();
    tier_.tier()->CheckIntegrity();
  }
  /*! \brief Computes a text and removes its sequence. */
  void Use(const Tokens& tokens) {
    const int64_t length = Add(3, tokens);
    Step(3, Span(tokens).From(length));
    table_.Remove(3);
  }
  /*! \brief One letter for each full page: 'h' when host memory has it, else '-'. */
  std::string PlacesOf(const Tokens& tokens) const {
    std::string places;
    PageKey key = RootKey("a model", "");
    for (size_t i = 0; i + kPageSize <= tokens.size(); i += kPageSize) {
      const TokenSpan page{tokens.data() + i, kPageSize};
      const PageText text{NextKey(key, page), key, page};
      places += tier_.tier()->Has(0, text) ? 'h' : '-';
      key = text.key;
    }
    return places;
  }
  int64_t num_touches() const { return tier_.tier()->counts().touches; }

 private:
  std::mt19937_64 engine_{1};
  SequenceTable table_;
  ForwardPlan plan_;
  std::vector<Contents> slots_;
  mutable TestTier tier_;
};

TEST_CASE("write through: a step visits as many values of a long text as of a short one") {
  World world(kNumPages);
  const Tokens tokens = World::TextOf(1, 400);
  REQUIRE_EQ(world.Add(0, tokens), 0);
  int64_t num_touches = world.num_touches();
  for (int64_t page = 0; page < 400; ++page) {
    world.Step(0, {tokens.data() + page * kPageSize, kPageSize});
    CAPTURE(page);
    REQUIRE(world.num_touches() - num_touches <= 2);
    num_touches = world.num_touches();
  }
  REQUIRE_EQ(world.PlacesOf(tokens), std::string(400, 'h'));
}

TEST_CASE("write through: the visits of a step are bounded where the tier has lost the text") {
  World world(8);
  const Tokens tokens = World::TextOf(1, 400);
  world.Add(0, tokens);
  world.Step(0, {tokens.data(), 300 * kPageSize});
  for (int64_t page = 300; page < 400; ++page) {
    const int64_t num_touches = world.num_touches();
    world.Step(0, {tokens.data() + page * kPageSize, kPageSize});
    REQUIRE(world.num_touches() - num_touches <= 10);
  }
}

TEST_CASE("write through: a text that outgrows the tier loses its last pages first") {
  World world(8);
  world.Use(World::TextOf(2, 3));
  const Tokens tokens = World::TextOf(1, 40);
  world.Add(0, tokens);
  for (int64_t page = 0; page < 40; ++page) {
    world.Step(0, {tokens.data() + page * kPageSize, kPageSize});
  }
  REQUIRE_EQ(world.PlacesOf(World::TextOf(2, 3)), "---");
  REQUIRE_EQ(world.PlacesOf(tokens), "hhhhhhh" + std::string(32, '-') + "h");
}

TEST_CASE("write through: a sequence in progress keeps its beginning") {
  World world(16);
  const Tokens tokens = World::TextOf(1, 10);
  world.Add(0, tokens);
  for (int64_t page = 0; page < 10; ++page) {
    world.Step(0, {tokens.data() + page * kPageSize, kPageSize});
    world.Use(World::TextOf(2 + static_cast<int32_t>(page), 4));
  }
  REQUIRE_EQ(world.PlacesOf(tokens), "hhhhhhhhhh");
  world.Use(World::TextOf(20, 4));  // and once it stops, it goes from its end
  world.Use(World::TextOf(21, 4));
  REQUIRE_EQ(world.PlacesOf(tokens), "hhhh------");
}

TEST_CASE("write through: a beginning that others share outlives their ends") {
  World world(12);
  Tokens shared = World::TextOf(1, 4), longer = shared;
  const Tokens end = World::TextOf(2, 2);
  longer.insert(longer.end(), end.begin(), end.end());
  world.Use(longer);
  world.Use(World::TextOf(3, 2));
  shared.push_back(5);
  world.Use(shared);  // adds no page
  world.Use(World::TextOf(4, 4));
  REQUIRE_EQ(world.PlacesOf(longer), "hhhhhh");
  world.Use(World::TextOf(5, 4));
  REQUIRE_EQ(world.PlacesOf(longer), "hhhh--");
  REQUIRE_EQ(world.PlacesOf(World::TextOf(3, 2)), "--");
}

}  // namespace

}  // namespace pagedkv::write_through_test
