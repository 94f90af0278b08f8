// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_pool_test.cc
 * \brief Pages come in order, come back last in first out, and are counted.
 */
#include "page_pool.h"

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
  for (; !taken.empty(); taken.pop_back()) pool.Release(taken.back());
  CHECK_TRUE(pool.free_pages() == before);
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
  pool.CheckIntegrity({1, 0});
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
  pool.CheckIntegrity({1, 0, 0});
  CHECK_RAISES("RuntimeError", "page 0 counts 1 owners but has 2", pool.CheckIntegrity({2, 0, 0}));
  CHECK_RAISES("RuntimeError", "page 1 counts 0 owners but has 1", pool.CheckIntegrity({1, 1, 0}));
}

}  // namespace pagedkv

int main() {
  pagedkv::TestOrder();
  pagedkv::TestReleaseUndoesAllocate();
  pagedkv::TestOwners();
  pagedkv::TestShuffle();
  pagedkv::TestIntegrity();
  return 0;
}
