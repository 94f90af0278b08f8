// SPDX-License-Identifier: Apache-2.0
/*!
 * \file host_memory_test.cc
 * \brief Values in host memory: keys, checksums, eviction, jobs, and threads that share it.
 */
#include "state/host_memory/host_memory.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/checksum.h"
#include "check.h"

namespace pagedkv::host_memory_test {

namespace {

constexpr int32_t kPageSize = 4;

/*! \brief A tier of one group, and texts of one page each. */
class Fixture {
 public:
  explicit Fixture(int64_t num_slots, bool has_store = false, int64_t page_bytes = 40)
      : page_bytes_(page_bytes),
        memory_(HostSlots::BytesOf(num_slots, kPageSize, {page_bytes}) + 64),
        tier(memory_.data() + (64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64) % 64,
             num_slots, kPageSize, {page_bytes}, has_store) {}

  static PageText TextOf(const int32_t* tokens) {
    const PageKey root = RootKey("space", "salt");
    const TokenSpan span{tokens, kPageSize};
    return {NextKey(root, span), root, span};
  }
  bool Save(int32_t number) {
    const int32_t tokens[kPageSize] = {number, 1, 2, 3};
    const PageText text = TextOf(tokens);
    const int32_t slot = tier.Reserve(0, text.key);
    if (slot < 0) return false;
    std::memset(tier.DataOf(slot), number, page_bytes_);
    tier.Publish(slot, text);
    return true;
  }
  /*! \return The pinned slot; its content has been compared. */
  int32_t Pin(int32_t number) {
    const int32_t tokens[kPageSize] = {number, 1, 2, 3};
    const int32_t slot = tier.Pin(0, TextOf(tokens));
    if (slot < 0) return -1;
    REQUIRE(tier.Verify(slot, tier.LayoutOf(slot).ChecksumOfData(tier.ValueOf(slot))));
    const std::string expected(page_bytes_, static_cast<char>(number));
    REQUIRE_EQ(std::string(tier.DataOf(slot), page_bytes_), expected);
    return slot;
  }
  bool Has(int32_t number) const {
    const int32_t tokens[kPageSize] = {number, 1, 2, 3};
    return tier.Has(0, TextOf(tokens));
  }

 private:
  int64_t page_bytes_;
  std::vector<char> memory_;

 public:
  HostMemory tier;
};

void Seal(const PageValueLayout& layout, const PageText& text, char* value) {
  layout.Seal(text, layout.ChecksumOfData(value), value);
}

bool IsWhole(const PageValueLayout& layout, const char* value) {
  return layout.IsWhole(layout.ChecksumOfData(value), value);
}

TEST_CASE("checksum: every bit counts") {
  for (size_t size : {0, 8, 56, 64, 72, 192, 300, 1100}) {
    std::string bytes(size, 'x');
    std::set<uint64_t> seen{Checksum(bytes.data(), size)};
    for (size_t bit = 0; bit < 8 * size; ++bit) {
      bytes[bit / 8] ^= static_cast<char>(1 << bit % 8);
      seen.insert(Checksum(bytes.data(), size));
      bytes[bit / 8] ^= static_cast<char>(1 << bit % 8);
    }
    REQUIRE_EQ(seen.size(), 8 * size + 1);
  }
  const std::string zeros(128, '\0');
  REQUIRE_NE(Checksum(zeros.data(), 64), Checksum(zeros.data(), 128));
  REQUIRE_NE(Checksum(zeros.data(), 64), Checksum(zeros.data(), 64, 1));
}

TEST_CASE("page keys: everything counts, and parts do not run into each other") {
  const int32_t tokens[] = {1, 2, 3, 4};
  const PageKey root = RootKey("a", "b");
  const std::set<PageKey> keys{root,
                               RootKey("ab", ""),
                               RootKey("", "ab"),
                               RootKey("a", ""),
                               RootKey("a", "b", kValueRevision + 1),
                               NextKey(root, {tokens, 4}),
                               NextKey(root, {tokens, 3}),
                               NextKey(RootKey("a", ""), {tokens, 4}),
                               ValueKey(root, 0),
                               ValueKey(root, 1)};
  REQUIRE_EQ(keys.size(), 10);
}

TEST_CASE("page values: a bit that flips anywhere is found") {
  const int32_t tokens[kPageSize] = {5, 6, 7, 8};
  const PageText text = Fixture::TextOf(tokens);
  const PageValueLayout layout(0, kPageSize, 24);
  std::vector<char> value(layout.num_bytes(), 'x');
  Seal(layout, text, value.data());
  REQUIRE(IsWhole(layout, value.data()));
  REQUIRE(layout.IsOf(text, value.data()));
  for (size_t bit = 0; bit < 8 * value.size(); ++bit) {
    value[bit / 8] ^= static_cast<char>(1 << bit % 8);
    REQUIRE_FALSE(IsWhole(layout, value.data()));
    value[bit / 8] ^= static_cast<char>(1 << bit % 8);
  }
  REQUIRE_FALSE(IsWhole(PageValueLayout(1, kPageSize, 24), value.data()));  // of another group
  const int32_t other[kPageSize] = {5, 6, 7, 9};
  PageText collision = Fixture::TextOf(other);
  collision.key = text.key;
  REQUIRE_FALSE(layout.IsOf(collision, value.data()));
}

TEST_CASE("page values: blocks count at their places, to the last byte") {
  constexpr int64_t kBlock = PageValueLayout::kBlockBytes;
  const int32_t tokens[kPageSize] = {5, 6, 7, 8};
  const PageValueLayout layout(0, kPageSize, 2 * kBlock + 40);
  REQUIRE_EQ(layout.num_blocks(), 3);
  std::vector<char> value(layout.num_bytes(), '\0');
  char* data = value.data() + layout.data_offset();
  std::memset(data, 'a', kBlock);
  std::memset(data + kBlock, 'b', kBlock);
  Seal(layout, Fixture::TextOf(tokens), value.data());
  REQUIRE(IsWhole(layout, value.data()));
  for (int64_t byte : {int64_t{0}, kBlock - 1, kBlock, 2 * kBlock, 2 * kBlock + 39}) {
    data[byte] ^= 1;
    REQUIRE_FALSE(IsWhole(layout, value.data()));
    data[byte] ^= 1;
  }
  std::swap_ranges(data, data + kBlock, data + kBlock);
  REQUIRE_FALSE(IsWhole(layout, value.data()));
}

TEST_CASE("host memory: the least recently used value goes, but none with a pin") {
  Fixture f(3);
  for (int32_t i : {1, 2, 3}) REQUIRE(f.Save(i));
  REQUIRE_FALSE(f.Save(1));  // it is there, and was used just now
  const int32_t pinned = f.Pin(2);
  REQUIRE(f.Save(4));
  REQUIRE_FALSE(f.Has(3));
  REQUIRE(f.Save(5));
  REQUIRE_FALSE(f.Has(1));
  REQUIRE(f.Has(2));
  f.tier.CheckIntegrity();
  f.tier.Clear();
  REQUIRE_FALSE(f.Has(2));
  f.tier.CheckIntegrity();
  REQUIRE(f.Save(2));  // beside the slot that is still in use
  REQUIRE(f.Save(3));
  REQUIRE(f.Save(1));
  REQUIRE_FALSE(f.Has(2));
  f.tier.Unpin(pinned);
  f.tier.CheckIntegrity();
  REQUIRE_EQ(f.tier.counts().num_values, 2);
  REQUIRE_EQ(f.tier.counts().evicted, 3);
}

TEST_CASE("host memory: a full tier refuses") {
  Fixture f(1);
  REQUIRE(f.Save(1));
  const int32_t slot = f.Pin(1);
  REQUIRE_FALSE(f.Save(2));
  REQUIRE_EQ(f.tier.counts().skipped, 1);
  f.tier.Unpin(slot);
  REQUIRE(f.Save(2));
  REQUIRE_EQ(f.Pin(1), -1);
}

TEST_CASE("host memory: jobs write what is still there, then it closes") {
  Fixture f(2, true);
  for (int32_t i : {1, 2, 3}) REQUIRE(f.Save(i));
  bool is_closed = true;
  const std::optional<StoreJob> job = f.tier.NextJob(0, &is_closed);
  REQUIRE(job);
  REQUIRE_FALSE(is_closed);
  REQUIRE_EQ(job->keys.size(), 2);  // 1 was evicted first
  REQUIRE_FALSE(f.tier.NextJob(0, &is_closed));
  REQUIRE_FALSE(f.Save(4));  // both are on their way
  REQUIRE_FALSE(f.tier.Flush(0));
  REQUIRE_RAISES("ValueError", "has 2 keys, got 1", f.tier.FinishJob(job->id, {true}));
  f.tier.FinishJob(job->id, {true, false});
  REQUIRE(f.tier.Flush(0));
  REQUIRE_EQ(f.tier.counts().stored, 1);
  REQUIRE_EQ(f.tier.counts().failed_stores, 2);
  REQUIRE(f.Save(4));
  f.tier.Close();
  REQUIRE(f.tier.NextJob(0, &is_closed));
  REQUIRE_FALSE(is_closed);
  REQUIRE_FALSE(f.tier.NextJob(0, &is_closed));
  REQUIRE(is_closed);
  f.tier.CheckIntegrity();
}

StoreLookup LookupOf(int32_t number) {
  const int32_t tokens[kPageSize] = {number, 1, 2, 3};
  const PageText text = Fixture::TextOf(tokens);
  StoreLookup lookup;
  lookup.page_size = kPageSize;
  lookup.keys = {text.parent, text.key};
  lookup.tokens.assign(tokens, tokens + kPageSize);
  lookup.values = {{0, 0, true}};
  lookup.choose = [](const std::vector<bool>&) { return std::vector<size_t>(); };
  return lookup;
}

TEST_CASE("host memory: lookups overtake a write a few times, not for ever") {
  Fixture f(2, true);
  constexpr int32_t kLimit = StoreQueue::kMaxLookupJobsInARow;
  std::string order;
  bool is_closed = false;
  for (int32_t i = 0; i < 3 * kLimit; ++i) {
    REQUIRE_NE(f.tier.Begin(LookupOf(100 + i)), 0);  // there is always another one
    REQUIRE_NE(f.tier.Begin(LookupOf(200 + i)), 0);
    if (i == kLimit || i == kLimit + 1) REQUIRE(f.Save(i));
    const std::optional<StoreJob> job = f.tier.NextJob(0, &is_closed);
    REQUIRE(job);
    order += job->kind == StoreJob::Kind::kPut ? 'w' : 'r';
    f.tier.FinishJob(job->id, std::vector<bool>(job->keys.size(), false));
  }
  // Lookups before the first value was saved do not count, and the job takes both values.
  const std::string reads(kLimit, 'r');
  REQUIRE_EQ(order, reads + reads + "w" + std::string(kLimit - 1, 'r'));
}

TEST_CASE("host memory: the queue of writes is bounded, and what it drops stays in memory") {
  constexpr auto kBound = static_cast<int32_t>(StoreQueue::kMaxQueuedPuts);
  Fixture f(kBound + 2, true);
  for (int32_t i = 0; i < kBound + 2; ++i) REQUIRE(f.Save(i));
  REQUIRE_EQ(f.tier.counts().pending_stores, kBound);
  REQUIRE_EQ(f.tier.counts().dropped_stores, 2);
  REQUIRE_EQ(f.tier.counts().failed_stores, 0);
  f.tier.Unpin(f.Pin(kBound + 1));  // its content is compared
  REQUIRE(f.Save(kBound + 2));      // evicts the first value, whose write makes room
  REQUIRE_EQ(f.tier.counts().pending_stores, kBound);
  REQUIRE_EQ(f.tier.counts().dropped_stores, 2);
  REQUIRE_EQ(f.tier.counts().failed_stores, 1);
  for (bool is_closed = false;;) {
    const std::optional<StoreJob> job = f.tier.NextJob(0, &is_closed);
    if (!job) break;
    f.tier.FinishJob(job->id, std::vector<bool>(job->keys.size(), true));
  }
  REQUIRE_EQ(f.tier.counts().stored, kBound);
  REQUIRE(f.tier.Flush(0));
  f.tier.CheckIntegrity();
}

TEST_CASE("host memory: threads") {
  Fixture f(8, true);
  std::atomic<int64_t> num_written{0};
  std::thread worker([&] {
    for (bool is_closed = false; !is_closed;) {
      const std::optional<StoreJob> job = f.tier.NextJob(60, &is_closed);
      if (!job) continue;
      int64_t sum = 0;
      for (size_t i = 0; i < job->addresses.size(); ++i) {
        const auto* value = reinterpret_cast<const char*>(job->addresses[i]);
        for (int64_t byte = 0; byte < job->sizes[i]; ++byte) sum += value[byte];
      }
      num_written += sum != 0 ? static_cast<int64_t>(job->keys.size()) : 0;
      f.tier.FinishJob(job->id, std::vector<bool>(job->keys.size(), true));
    }
  });
  int64_t num_found = 0;
  for (int32_t i = 0; i < 5000; ++i) {
    f.Save(1 + i % 23);
    const int32_t slot = f.Pin(1 + i * 7 % 23);
    if (slot < 0) continue;
    ++num_found;
    f.tier.Unpin(slot);
  }
  f.tier.Close();
  worker.join();
  f.tier.CheckIntegrity();
  REQUIRE(num_found > 0);
  REQUIRE(num_written > 0);
  REQUIRE_EQ(num_written, f.tier.counts().stored);
  REQUIRE_EQ(f.tier.counts().damaged, 0);
}

}  // namespace

}  // namespace pagedkv::host_memory_test
