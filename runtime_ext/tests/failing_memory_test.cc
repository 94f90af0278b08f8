// SPDX-License-Identifier: Apache-2.0
/*!
 * \file failing_memory_test.cc
 * \brief A call in which memory runs out has changed nothing.
 */
#include "failing_memory.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "check.h"
#include "state/host_memory/host_memory.h"
#include "state/plans/forward_plan.h"
#include "state/table/receives.h"
#include "state/table/sends.h"

namespace pagedkv {

thread_local int64_t allocations_until_failure = -1;

}  // namespace pagedkv

void* operator new(size_t size) {
  int64_t& left = pagedkv::allocations_until_failure;
  if (left >= 0 && left-- == 0) throw std::bad_alloc();
  if (void* memory = std::malloc(size > 0 ? size : 1)) return memory;
  throw std::bad_alloc();
}
// Sanitizers bring one of their own, whose memory the functions below could not free.
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  try {
    return operator new(size);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

namespace pagedkv::failing_memory_test {

namespace {

/*! \brief Two sequences that share their last page, in groups with and without a window. */
struct Cache {
  Cache() : table(4, 4, {16, 16}, {0, 6}), plan(&table, 64) {
    table.Add(0);
    const int64_t id = 0, length = 30;
    plan.Prepare({&id, 1}, {&length, 1});
    plan.Acquire();
    plan.Commit();
    plan.Finish();
    table.Fork(0, 1, -1);
  }

  SequenceTable table;
  ForwardPlan plan;
};

TEST_CASE("failing memory: a receive") {
  bool succeeds = false;
  for (int64_t i = 0; !succeeds; ++i) {
    REQUIRE(i < 100);
    Cache cache;
    SequenceTable& table = cache.table;
    const std::vector<int32_t> free = table.pool(0).free_pages();
    const auto pages = table.At(1).pages;
    Receives receives(&table);
    ReceivePlan plan;
    succeeds = SucceedsWithoutAllocation(i, [&] { plan = receives.Acquire(&table.At(1), 9); });
    if (succeeds) {
      receives.Release(plan);
      REQUIRE(i > 0);  // it does allocate
    }
    REQUIRE(table.pool(0).free_pages() == free);
    REQUIRE(table.At(1).pages == pages);
    table.CheckIntegrity();
  }
  Cache cache;  // the slots are known before the receive begins
  Receives receives(&cache.table);
  ReceivePlan plan = receives.Acquire(&cache.table.At(1), 9);
  REQUIRE_FALSE(SucceedsWithoutAllocation(0, [&] { receives.SlotsOf(plan); }));
  REQUIRE_EQ(NumPositions(receives.SlotsOf(plan).groups[0]), 9);
  REQUIRE(SucceedsWithoutAllocation(0, [&] { receives.Commit(std::move(plan), 1); }));
  REQUIRE_EQ(cache.table.At(1).length, 39);
  cache.table.CheckIntegrity();
}

TEST_CASE("failing memory: a block to send") {
  bool succeeds = false;
  for (int64_t i = 0; !succeeds; ++i) {
    REQUIRE(i < 100);
    Cache cache;
    Sequence& sequence = cache.table.At(0);
    sequence.send = std::make_unique<SendMark>(SendMark{1, 1, 24, 40, 24, {{{0, 16}}, {{0, 16}}}});
    const Sends sends(&cache.table);
    SendBlock block;
    succeeds = SucceedsWithoutAllocation(i, [&] { block = sends.Plan(sequence); });
    REQUIRE_EQ(cache.table.pins().num_pins(), 0);
    REQUIRE_EQ(sequence.send->next, 24);
    if (!succeeds) continue;
    REQUIRE(i > 0);
    REQUIRE(SucceedsWithoutAllocation(0, [&] { sends.Commit(block); }));
    REQUIRE_EQ(sequence.send->next, 30);
    sends.Release(block);
    cache.table.CheckIntegrity();
  }
}

TEST_CASE("failing memory: values that a store has read") {
  constexpr int32_t kPageSize = 4;
  constexpr int64_t kPageBytes = 40;
  const std::vector<int32_t> tokens = {1, 2, 3, 4};
  bool succeeds = false;
  for (int64_t i = 0; !succeeds; ++i) {
    REQUIRE(i < 100);
    std::vector<char> memory(HostSlots::BytesOf(2, kPageSize, {kPageBytes}) + 64);
    char* aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
    HostMemory tier(aligned, 2, kPageSize, {kPageBytes}, /*has_store=*/true);
    StoreLookup lookup;
    lookup.page_size = kPageSize;
    lookup.keys = {RootKey("space", "salt")};
    lookup.keys.push_back(NextKey(lookup.keys[0], {tokens.data(), kPageSize}));
    lookup.tokens = tokens;
    lookup.values = {{0, 0, true}};
    lookup.choose = [](const std::vector<bool>&) { return std::vector<size_t>{0}; };
    const PageText text = lookup.TextOf(0);
    const int64_t ticket = tier.Begin(lookup);
    bool is_closed = false;
    std::optional<StoreJob> job = tier.NextJob(0, &is_closed);
    tier.FinishJob(job->id, {true});
    job = tier.NextJob(0, &is_closed);
    REQUIRE((job && job->kind == StoreJob::Kind::kGet));
    const std::vector<bool> results = {true};
    auto* value = reinterpret_cast<char*>(job->addresses[0]);
    const PageValueLayout layout(0, kPageSize, kPageBytes);
    layout.Seal(text, layout.ChecksumOfData(value), value);
    succeeds = SucceedsWithoutAllocation(i, [&] { tier.FinishJob(job->id, results); });
    REQUIRE(succeeds == tier.Has(0, text));
    REQUIRE(succeeds == tier.Wait(ticket, 0));
    if (!succeeds) tier.FinishJob(job->id, results);  // the job is still open
    REQUIRE((tier.Has(0, text) && tier.Wait(ticket, 0)));
    REQUIRE_EQ(tier.counts().fetched, 1);
    REQUIRE((!succeeds || i > 0));
    tier.CheckIntegrity();
  }
}

}  // namespace

}  // namespace pagedkv::failing_memory_test
