// SPDX-License-Identifier: Apache-2.0
/*!
 * \file finds_a_bug.cc
 * \brief Tests the driver: a target with a bug that random input without coverage does not find.
 */
#include <cstddef>
#include <cstdint>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::vector<int> table(4, 1);
  size_t known = 0;
  for (const char* word = "pages"; known < size && data[known] == word[known]; ++known) {
    if (known == 4) return table.data()[size];  // beyond the end
  }
  return 0;
}
