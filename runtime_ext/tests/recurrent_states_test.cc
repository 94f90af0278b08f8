// SPDX-License-Identifier: Apache-2.0
/*!
 * \file recurrent_states_test.cc
 * \brief Random sequences of a model with recurrent layers: every state is that of its tokens.
 */
#include "check.h"
#include "recurrent_world.h"

namespace pagedkv::recurrent_states_test {

TEST_CASE("states of random sequences are those of their tokens") {
  int64_t num_replayed = 0, num_refused = 0, num_reused = 0, num_with_lost_states = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    CAPTURE(seed);
    // Pools from plenty to hardly enough.
    const auto scarcity = static_cast<int32_t>(seed % 4);
    World world(seed, 400 - 60 * scarcity, scarcity < 2 ? 300 : 80, scarcity % 2 ? 25 : 120);
    for (int i = 0; i < 600; ++i) world.Do();
    num_replayed += world.num_replayed();
    num_refused += world.num_refused();
    num_reused += world.num_reused();
    num_with_lost_states += world.HasReclaimedState();
    world.Clear();
  }
  REQUIRE_GT(num_replayed, 1000);
  REQUIRE_GT(num_refused, 10);
  REQUIRE_GT(num_reused, 1000);
  REQUIRE_GT(num_with_lost_states, 5);
}

TEST_CASE("states come back from host memory and from a store") {
  for (const TierWrites writes : {TierWrites::kBack, TierWrites::kThrough}) {
    int64_t num_host = 0, num_store = 0;
    for (uint64_t seed = 100; seed < 120; ++seed) {
      CAPTURE(seed);
      TierSetup setup;
      setup.num_slots = seed % 2 ? 200 : 10;
      setup.policy = {writes, 1};
      setup.has_store = seed % 4 < 2;
      World world(seed, 90, 70, 20, setup);
      for (int i = 0; i < 600; ++i) world.Do();
      num_host += world.counts().host_tokens;
      num_store += world.counts().store_tokens;
      world.Clear();
    }
    REQUIRE_GT(num_host, 100);
    REQUIRE_GT(num_store, 20);
  }
}

}  // namespace pagedkv::recurrent_states_test
