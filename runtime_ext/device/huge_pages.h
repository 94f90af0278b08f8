// SPDX-License-Identifier: Apache-2.0
/*!
 * \file huge_pages.h
 * \brief Large host allocations on huge pages, interleaved over the NUMA nodes of the machine.
 */
#ifndef TVM_PAGEDKV_DEVICE_HUGE_PAGES_H_
#define TVM_PAGEDKV_DEVICE_HUGE_PAGES_H_

#include <cstdint>

namespace pagedkv {

/*! \brief Size and alignment of a huge page on x86-64, and on AArch64 with 4 KiB pages. */
constexpr int64_t kHugePageBytes = int64_t{1} << 21;

/*! \brief Whether an allocation is large enough. */
constexpr bool WantsHugePages(int64_t num_bytes) { return num_bytes >= 2 * kHugePageBytes; }

/*!
 * \brief Asks for huge pages, and interleaves them over the NUMA nodes, because it is not known
 * which thread will read which page. Call it before the first touch. If the system refuses, the
 * memory stays as it is.
 */
void PreferHugePages(void* data, int64_t num_bytes);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_DEVICE_HUGE_PAGES_H_
