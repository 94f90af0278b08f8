// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_pool_test.cc
 * \brief Pages come in order, come back last in first out, and are counted.
 */
#include "state/page_pool.h"

#include <set>

#include "check.h"

namespace pagedkv {

void TestOrder() {
  PagePool pool(4);
  CHECK_EQUAL(pool.Allocate(), 0);
  CHECK_EQUAL(pool.Allocate(), 1);
  CHECK_EQUAL(pool.num_free(), 2);
  pool.Release(1);
  pool.Release(0);
  CHECK_EQUAL(pool.Allocate(), 0);
  CHECK_EQUAL(pool.Allocate(), 1);
  CHECK_EQUAL(pool.Allocate(), 2);
}

void TestReleaseUndoesAllocate() {
  PagePool pool(8);
  pool.ShuffleFree(7);
  const std::vector<int32_t> before = pool.free_pages();
  std::vector<int32_t> taken;
  for (int i = 0; i < 5; ++i) taken.push_back(pool.Allocate());
  for (; !taken.empty(); taken.pop_back()) pool.Unallocate(taken.back());
  CHECK_TRUE(pool.free_pages() == before);
}

void TestCachedPagesAreReclaimedInTheOrderOfTheirUse() {
  PagePool pool(4);
  for (int i = 0; i < 4; ++i) pool.Allocate();
  for (int32_t page : {2, 0, 3}) pool.Retire(page);
  CHECK_EQUAL(pool.num_free(), 0);
  CHECK_EQUAL(pool.num_cached(), 3);
  CHECK_EQUAL(pool.num_available(), 3);
  CHECK_EQUAL(pool.num_used(), 1);
  pool.CheckIntegrity({0, 1, 0, 0}, {0, 0, 0, 0});
  pool.AddOwner(0);  // found again, and used last from now on
  CHECK_EQUAL(pool.num_reclaimed(), 0);
  pool.Retire(0);
  CHECK_EQUAL(pool.cached_pages().List(), (std::vector<int32_t>{2, 3, 0}));
  pool.Release(1);
  CHECK_EQUAL(pool.Allocate(), 1);  // free pages first
  CHECK_EQUAL(pool.num_reclaimed(), 0);
  const uint64_t generation = pool.Generation(2);
  CHECK_EQUAL(pool.Allocate(), 2);
  CHECK_TRUE(pool.Generation(2) != generation);
  CHECK_EQUAL(pool.Allocate(), 3);
  CHECK_EQUAL(pool.num_reclaimed(), 2);
  pool.Unallocate(3);
  pool.Unallocate(2);
  CHECK_TRUE(pool.Generation(2) == generation);
  CHECK_EQUAL(pool.num_reclaimed(), 0);
  CHECK_EQUAL(pool.cached_pages().List(), (std::vector<int32_t>{2, 3, 0}));
  pool.FreeCached();
  CHECK_EQUAL(pool.num_free(), 3);
  CHECK_TRUE(pool.Generation(2) != generation);
  pool.CheckIntegrity({0, 1, 0, 0}, {0, 0, 0, 0});
}

void TestKeepers() {
  PagePool pool(3);
  for (int i = 0; i < 3; ++i) pool.Allocate();
  pool.AddKeeper(0);
  pool.AddKeeper(0);
  pool.AddKeeper(1);
  CHECK_EQUAL(pool.num_held_and_kept(), 2);
  pool.Release(0);  // its owner has no use for the content, but others have
  CHECK_EQUAL(pool.cached_pages().List(), (std::vector<int32_t>{0}));
  CHECK_EQUAL(pool.num_held_and_kept(), 1);
  pool.CheckIntegrity({0, 1, 1}, {2, 1, 0});
  const uint64_t generation = pool.Generation(1);
  pool.Overwrite(1);
  CHECK_TRUE(pool.Generation(1) != generation);
  CHECK_EQUAL(pool.NumKeepers(1), 0);
  pool.CheckIntegrity({0, 1, 1}, {2, 0, 0});
  CHECK_EQUAL(pool.Allocate(), 0);
  CHECK_EQUAL(pool.NumKeepers(0), 0);
  pool.Unallocate(0);
  CHECK_EQUAL(pool.NumKeepers(0), 2);
  pool.DropKeeper(0);
  pool.AddOwner(0);
  CHECK_EQUAL(pool.num_held_and_kept(), 1);
  pool.DropKeeper(0);
  pool.Release(0);
  CHECK_EQUAL(pool.free_pages(), (std::vector<int32_t>{0}));
  CHECK_EQUAL(pool.Allocate(), 0);
  pool.Unallocate(0);  // was free this time
  CHECK_EQUAL(pool.num_free(), 1);
  pool.CheckIntegrity({0, 1, 1}, {0, 0, 0});
}

void TestOwners() {
  PagePool pool(2);
  int32_t page = pool.Allocate();
  pool.AddOwner(page);
  pool.AddOwner(page);
  CHECK_EQUAL(pool.RefCount(page), 3);
  CHECK_EQUAL(pool.num_shared(), 1);
  pool.Release(page);
  CHECK_EQUAL(pool.num_shared(), 1);
  pool.Release(page);
  CHECK_EQUAL(pool.num_shared(), 0);
  CHECK_EQUAL(pool.num_used(), 1);
  pool.CheckIntegrity({1, 0}, {0, 0});
  pool.Release(page);
  CHECK_EQUAL(pool.num_used(), 0);
}

void TestShuffle() {
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
  CHECK_EQUAL(pages.size(), 100u);
  CHECK_TRUE(!is_ascending);
}

void TestIntegrity() {
  PagePool pool(3);
  pool.Allocate();
  const std::vector<int32_t> none(3, 0);
  pool.CheckIntegrity({1, 0, 0}, none);
  CHECK_RAISES("RuntimeError", "page 0 counts 1 owners but has 2",
               pool.CheckIntegrity({2, 0, 0}, none));
  CHECK_RAISES("RuntimeError", "page 1 counts 0 owners but has 1",
               pool.CheckIntegrity({1, 1, 0}, none));
  CHECK_RAISES("RuntimeError", "page 0 counts 0 keepers but has 1",
               pool.CheckIntegrity({1, 0, 0}, {1, 0, 0}));
}

}  // namespace pagedkv

int main() {
  pagedkv::TestOrder();
  pagedkv::TestReleaseUndoesAllocate();
  pagedkv::TestCachedPagesAreReclaimedInTheOrderOfTheirUse();
  pagedkv::TestKeepers();
  pagedkv::TestOwners();
  pagedkv::TestShuffle();
  pagedkv::TestIntegrity();
  return 0;
}
