// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_pool_test.cc
 * \brief Pages come in order, come back last in first out, and are counted.
 */
#include "state/pages/page_pool.h"

#include <algorithm>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "check.h"

namespace pagedkv::page_pool_test {

namespace {

TEST_CASE("page pool: order") {
  PagePool pool(4);
  REQUIRE_EQ(pool.Allocate(), 0);
  REQUIRE_EQ(pool.Allocate(), 1);
  REQUIRE_EQ(pool.num_free(), 2);
  pool.Release(1);
  pool.Release(0);
  REQUIRE_EQ(pool.Allocate(), 0);
  REQUIRE_EQ(pool.Allocate(), 1);
  REQUIRE_EQ(pool.Allocate(), 2);
}

TEST_CASE("page pool: release undoes allocate") {
  PagePool pool(8);
  pool.ShuffleFree(7);
  const std::vector<int32_t> before = pool.free_pages();
  std::vector<int32_t> taken;
  for (int i = 0; i < 5; ++i) taken.push_back(pool.Allocate());
  for (; !taken.empty(); taken.pop_back()) pool.Unallocate(taken.back());
  REQUIRE(pool.free_pages() == before);
}

TEST_CASE("page pool: cached pages are reclaimed in the order of their use") {
  PagePool pool(4);
  for (int i = 0; i < 4; ++i) pool.Allocate();
  for (int32_t page : {2, 0, 3}) {
    pool.AddKeeper(page);
    pool.Release(page);
  }
  REQUIRE_EQ(pool.num_free(), 0);
  REQUIRE_EQ(pool.num_cached(), 3);
  REQUIRE_EQ(pool.num_available(), 3);
  REQUIRE_EQ(pool.num_used(), 1);
  pool.CheckIntegrity({0, 1, 0, 0}, {1, 0, 1, 1});
  pool.AddOwner(0);  // found again, and used last from now on
  REQUIRE_EQ(pool.num_reclaimed(), 0);
  pool.Release(0);
  REQUIRE_EQ(pool.cached_pages().List(), (std::vector<int32_t>{2, 3, 0}));
  pool.Release(1);
  REQUIRE_EQ(pool.Allocate(), 1);  // free pages first
  REQUIRE_EQ(pool.num_reclaimed(), 0);
  const uint64_t generation = pool.Generation(2);
  REQUIRE_EQ(pool.Allocate(), 2);
  REQUIRE(pool.Generation(2) != generation);
  REQUIRE_EQ(pool.Allocate(), 3);
  REQUIRE_EQ(pool.num_reclaimed(), 2);
  pool.Unallocate(3);
  pool.Unallocate(2);
  REQUIRE(pool.Generation(2) == generation);
  REQUIRE_EQ(pool.num_reclaimed(), 0);
  REQUIRE_EQ(pool.cached_pages().List(), (std::vector<int32_t>{2, 3, 0}));
  for (int32_t page : {3, 2, 0}) pool.DropKeeper(page);
  REQUIRE_EQ(pool.num_free(), 3);
  REQUIRE(pool.Generation(2) != generation);
  pool.CheckIntegrity({0, 1, 0, 0}, {0, 0, 0, 0});
}

TEST_CASE("page pool: keepers") {
  PagePool pool(3);
  for (int i = 0; i < 3; ++i) pool.Allocate();
  pool.AddKeeper(0);
  pool.AddKeeper(0);
  pool.AddKeeper(1);
  REQUIRE_EQ(pool.num_held_and_kept(), 2);
  pool.Release(0);  // its owner has no use for the content, but others have
  REQUIRE_EQ(pool.cached_pages().List(), (std::vector<int32_t>{0}));
  REQUIRE_EQ(pool.num_held_and_kept(), 1);
  pool.CheckIntegrity({0, 1, 1}, {2, 1, 0});
  const uint64_t generation = pool.Generation(1);
  pool.Overwrite(1);
  REQUIRE(pool.Generation(1) != generation);
  REQUIRE_EQ(pool.NumKeepers(1), 0);
  pool.CheckIntegrity({0, 1, 1}, {2, 0, 0});
  REQUIRE_EQ(pool.Allocate(), 0);
  REQUIRE_EQ(pool.NumKeepers(0), 0);
  pool.Unallocate(0);
  REQUIRE_EQ(pool.NumKeepers(0), 2);
  pool.DropKeeper(0);
  pool.AddOwner(0);
  REQUIRE_EQ(pool.num_held_and_kept(), 1);
  pool.DropKeeper(0);
  pool.Release(0);
  REQUIRE_EQ(pool.free_pages(), (std::vector<int32_t>{0}));
  REQUIRE_EQ(pool.Allocate(), 0);
  pool.Unallocate(0);  // was free this time
  REQUIRE_EQ(pool.num_free(), 1);
  pool.CheckIntegrity({0, 1, 1}, {0, 0, 0});
}

TEST_CASE("page pool: pages that sequences may return to are reclaimed last") {
  PagePool pool(4);
  for (int i = 0; i < 4; ++i) pool.Allocate();
  for (int32_t page : {0, 1, 2, 3}) {
    pool.AddKeeper(page, page < 2 ? Keeper::kReturn : Keeper::kLookup);
    pool.Release(page);
  }
  REQUIRE_EQ(pool.cached_pages().List(), (std::vector<int32_t>{2, 3, 0, 1}));
  REQUIRE_EQ(pool.num_spare(), 2);
  REQUIRE_EQ(pool.NumForCopyOf(3), 2);
  REQUIRE_EQ(pool.NumForCopyOf(1), 4);
  pool.AddKeeper(2, Keeper::kReturn);
  REQUIRE_EQ(pool.cached_pages().List(), (std::vector<int32_t>{3, 0, 1, 2}));
  pool.CheckIntegrity({0, 0, 0, 0}, {1, 1, 2, 1}, {1, 1, 1, 0});
  pool.AddKeeper(0);
  pool.DropKeeper(0, Keeper::kReturn);  // in use until now
  REQUIRE_EQ(pool.cached_pages().List(), (std::vector<int32_t>{3, 0, 1, 2}));
  pool.DropKeeper(1, Keeper::kReturn);
  REQUIRE_EQ(pool.Allocate(), 1);  // free
  REQUIRE_EQ(pool.Allocate(), 3);
  REQUIRE_EQ(pool.Allocate(), 0);
  REQUIRE_EQ(pool.num_spare(), 0);
  REQUIRE_EQ(pool.Allocate(), 2);
  REQUIRE_EQ(pool.num_available(), 0);
  pool.Unallocate(2);
  REQUIRE_EQ(pool.num_spare(), 0);
  REQUIRE(pool.IsForReturn(2));
  pool.CheckIntegrity({1, 1, 0, 1}, {0, 0, 2, 0}, {0, 0, 1, 0});
  REQUIRE_RAISES("RuntimeError", "page 2 counts 1 keepers that return to it but has 0",
                 pool.CheckIntegrity({1, 1, 0, 1}, {0, 0, 2, 0}));
}

TEST_CASE("page pool: cached pages come in the order of rank and use") {
  std::mt19937_64 engine(3);
  CachedPages cached(40);
  std::vector<std::pair<int, int32_t>> expected;  // rank and page, in the order of reclaiming
  auto insert = [&](int rank, int32_t page, bool is_oldest) {
    auto at = std::find_if(expected.begin(), expected.end(), [&](const auto& each) {
      return is_oldest ? each.first >= rank : each.first > rank;
    });
    expected.insert(at, {rank, page});
  };
  for (int i = 0; i < 5000; ++i) {
    const auto page = static_cast<int32_t>(engine() % 40);
    const auto rank = static_cast<int>(engine() % 3);
    const auto at = std::find_if(expected.begin(), expected.end(),
                                 [&](const auto& each) { return each.second == page; });
    REQUIRE_EQ(cached.Contains(page), at != expected.end());
    if (at == expected.end()) {
      const bool is_oldest = engine() % 4 == 0;
      const auto byte = static_cast<uint8_t>(rank);
      is_oldest ? cached.InsertOldest(page, byte) : cached.Insert(page, byte);
      insert(rank, page, is_oldest);
    } else {
      cached.Remove(page);
      expected.erase(at);
    }
    std::vector<int32_t> pages;
    for (const auto& each : expected) pages.push_back(each.second);
    REQUIRE_EQ(cached.List(), pages);
    if (!pages.empty()) REQUIRE_EQ(cached.first(), pages.front());
  }
}

TEST_CASE("page pool: owners") {
  PagePool pool(2);
  int32_t page = pool.Allocate();
  pool.AddOwner(page);
  pool.AddOwner(page);
  REQUIRE_EQ(pool.RefCount(page), 3);
  REQUIRE_EQ(pool.num_shared(), 1);
  pool.Release(page);
  REQUIRE_EQ(pool.num_shared(), 1);
  pool.Release(page);
  REQUIRE_EQ(pool.num_shared(), 0);
  REQUIRE_EQ(pool.num_used(), 1);
  pool.CheckIntegrity({1, 0}, {0, 0});
  pool.Release(page);
  REQUIRE_EQ(pool.num_used(), 0);
}

TEST_CASE("page pool: shuffle") {
  PagePool pool(100);
  pool.ShuffleFree(1);
  std::set<int32_t> pages;
  bool is_ascending = true;
  for (int32_t last = -1; pool.num_free() > 0;) {
    int32_t page = pool.Allocate();
    is_ascending = is_ascending && page > last;
    last = page;
    pages.insert(page);
  }
  REQUIRE_EQ(pages.size(), 100u);
  REQUIRE(!is_ascending);
}

TEST_CASE("page pool: integrity") {
  PagePool pool(3);
  pool.Allocate();
  const std::vector<int32_t> none(3, 0);
  pool.CheckIntegrity({1, 0, 0}, none);
  REQUIRE_RAISES("RuntimeError", "page 0 counts 1 owners but has 2",
                 pool.CheckIntegrity({2, 0, 0}, none));
  REQUIRE_RAISES("RuntimeError", "page 1 counts 0 owners but has 1",
                 pool.CheckIntegrity({1, 1, 0}, none));
  REQUIRE_RAISES("RuntimeError", "page 0 counts 0 keepers but has 1",
                 pool.CheckIntegrity({1, 0, 0}, {1, 0, 0}));
}

}  // namespace

}  // namespace pagedkv::page_pool_test
