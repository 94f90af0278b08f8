// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_history_test.cc
 * \brief A history finds pages by their distance until they are reclaimed, and stays short.
 */
#include "state/pages/page_history.h"

#include "check.h"

namespace pagedkv::page_history_test {

namespace {

void Leave(PageHistory* history, int32_t page, PagePool* pool) {
  history->Append(page, pool);
  pool->Release(page);
}

TEST_CASE("page history: find") {
  PagePool pool(4);
  PageHistory history, child;
  for (int i = 0; i < 4; ++i) Leave(&history, pool.Allocate(), &pool);
  REQUIRE_EQ(history.Find(1, pool), 3);
  REQUIRE_EQ(history.Find(4, pool), 0);
  REQUIRE_EQ(history.Find(5, pool), -1);
  child.CopyWithoutLast(history, 1, &pool);
  REQUIRE_EQ(child.Find(1, pool), 2);
  REQUIRE_EQ(pool.NumKeepers(2), 2);
  pool.Allocate();  // page 0
  REQUIRE_EQ(history.Find(4, pool), -1);
  REQUIRE_EQ(child.Find(3, pool), -1);
  REQUIRE_EQ(child.Find(2, pool), 1);
  history.DropLast(2, &pool);
  REQUIRE_EQ(history.Find(1, pool), 1);
  REQUIRE_EQ(pool.NumKeepers(3), 0);
  history.Clear(&pool);
  REQUIRE_EQ(history.size(), 0);
  std::vector<int32_t> num_keepers(4, 0), num_returns(4, 0);
  child.CountKeepers(pool, &num_keepers, &num_returns);
  REQUIRE_EQ(num_keepers, (std::vector<int32_t>{0, 1, 1, 0}));
  REQUIRE_EQ(num_returns, num_keepers);
  pool.CheckIntegrity({1, 0, 0, 0}, num_keepers, num_returns);
  child.SetKeeper(Keeper::kLookup, &pool);
  pool.CheckIntegrity({1, 0, 0, 0}, num_keepers);
  child.SetKeeper(Keeper::kReturn, &pool);
  pool.CheckIntegrity({1, 0, 0, 0}, num_keepers, num_returns);
  child.CopyWithoutLast(history, 5, &pool);  // nothing
  child.Clear(&pool);
  pool.CheckIntegrity({1, 0, 0, 0}, {0, 0, 0, 0});
}

TEST_CASE("page history: a long text has a short history") {
  PagePool pool(8);
  PageHistory history;
  const int32_t first = pool.Allocate();
  pool.AddOwner(first);  // of another sequence, for ever: it is never reclaimed
  Leave(&history, first, &pool);
  for (int i = 0; i < 10000; ++i) {
    Leave(&history, pool.Allocate(), &pool);
    REQUIRE(history.size() <= 8);
  }
  for (int i = 1; i < 8; ++i) REQUIRE(history.Find(i, pool) >= 0);
  std::vector<int32_t> num_keepers(8, 0), num_returns(8, 0), num_owners(8, 0);
  num_owners[first] = 1;
  history.CountKeepers(pool, &num_keepers, &num_returns);
  pool.CheckIntegrity(num_owners, num_keepers, num_returns);
}

}  // namespace

}  // namespace pagedkv::page_history_test
