// SPDX-License-Identifier: Apache-2.0
/*!
 * \file slot_layout_test.cc
 * \brief The rows of all slots of a page, and its padding, are its bytes, each once.
 */
#include "storage/slot_layout.h"

#include <vector>

#include "check.h"

namespace pagedkv::slot_layout_test {

namespace {

/*! \brief The number of rows that cover each byte of the pages. */
std::vector<int> Coverage(const SlotLayout& layout, int64_t num_pages) {
  std::vector<int> covered(num_pages * layout.page_bytes, 0);
  for (int64_t slot = 0; slot < num_pages * layout.page_size; ++slot) {
    int64_t num_bytes = 0;
    layout.VisitRows(slot, [&](int64_t offset, int64_t count) {
      num_bytes += count;
      for (int64_t i = offset; i < offset + count; ++i) ++covered.at(i);
    });
    REQUIRE_EQ(num_bytes, layout.slot_bytes());
  }
  return covered;
}

TEST_CASE("slot layout: plain pages have no other bytes") {
  const SlotLayout layout = SlotLayout::Plain(4, 6, 16);
  REQUIRE_EQ(layout.page_bytes, 4 * 6 * 16);
  REQUIRE_EQ(layout.used_bytes(), layout.page_bytes);
  for (int count : Coverage(layout, 3)) REQUIRE_EQ(count, 1);
  // Rows of one slot are page_size rows apart.
  REQUIRE_EQ(layout.RowOffset(layout.sections[0], 4 + 3, 5), layout.page_bytes + (5 * 4 + 3) * 16);
}

TEST_CASE("slot layout: quantized pages have codes, scales and padding") {
  const SlotLayout layout = SlotLayout::Quantized(4, 6, {"one", {16, 4}, {16, 4}, 512});
  REQUIRE_EQ(layout.used_bytes(), 4 * 6 * (16 + 4));
  const std::vector<int> covered = Coverage(layout, 2);
  for (size_t i = 0; i < covered.size(); ++i) {
    REQUIRE_EQ(covered[i], static_cast<int64_t>(i) % 512 < layout.used_bytes() ? 1 : 0);
  }
  REQUIRE_EQ(layout.RowOffset(layout.sections[1], 4 + 3, 5), 512 + 4 * 6 * 16 + (5 * 4 + 3) * 4);
}

TEST_CASE("slot layout: K and V of other sizes have sections of their own") {
  const SlotLayout layout = SlotLayout::Quantized(4, 6, {"two", {16, 4}, {8, 2}, 384});
  REQUIRE_EQ(layout.used_bytes(), 4 * 3 * (16 + 8 + 4 + 2));
  const std::vector<int> covered = Coverage(layout, 2);
  for (size_t i = 0; i < covered.size(); ++i) {
    REQUIRE_EQ(covered[i], static_cast<int64_t>(i) % 384 < layout.used_bytes() ? 1 : 0);
  }
  // The last row of V of slot 3 of the second page: behind all codes and the scales of K.
  const int64_t scales_of_v = 4 * 3 * (16 + 8 + 4);
  REQUIRE_EQ(layout.RowOffset(layout.sections[3], 4 + 3, 5), 384 + scales_of_v + (2 * 4 + 3) * 2);
}

}  // namespace

}  // namespace pagedkv::slot_layout_test
