// SPDX-License-Identifier: Apache-2.0
/*!
 * \file huge_pages.h
 * \brief Large host allocations on huge pages, spread over the memory nodes of the machine.
 */
#ifndef TVM_PAGEDKV_DEVICE_HUGE_PAGES_H_
#define TVM_PAGEDKV_DEVICE_HUGE_PAGES_H_

#include <cstdint>

namespace pagedkv {

/*! \brief Size and alignment of a huge page of x86-64, and of AArch64 with pages of 4 KiB. */
constexpr int64_t kHugePageBytes = int64_t{1} << 21;

/*! \brief Whether memory of so many bytes is worth it. */
constexpr bool WantsHugePages(int64_t num_bytes) { return num_bytes >= 2 * kHugePageBytes; }

/*!
 * \brief Asks for huge pages, and where there are several memory nodes for pages of all in turns:
 * which thread will read what is not known when it is written. Before the first touch. Where the
 * system refuses, the memory stays as it is.
 */
void PreferHugePages(void* data, int64_t num_bytes);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_DEVICE_HUGE_PAGES_H_
