// SPDX-License-Identifier: Apache-2.0
/*!
 * \file red_zone.h
 * \brief Red zones between the arrays of one allocation, in builds with AddressSanitizer only.
 */
#ifndef TVM_PAGEDKV_DEVICE_RED_ZONE_H_
#define TVM_PAGEDKV_DEVICE_RED_ZONE_H_

#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#define TVM_PAGEDKV_HAS_RED_ZONES 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TVM_PAGEDKV_HAS_RED_ZONES 1
#endif
#endif

#ifdef TVM_PAGEDKV_HAS_RED_ZONES
#include <sanitizer/asan_interface.h>
#endif

namespace pagedkv {

#ifdef TVM_PAGEDKV_HAS_RED_ZONES
/*! \brief Bytes behind each array. */
constexpr int64_t kRedZoneBytes = 64;
inline void Forbid(const void* begin, size_t num_bytes) {
  __asan_poison_memory_region(begin, num_bytes);
}
inline void Allow(const void* begin, size_t num_bytes) {
  __asan_unpoison_memory_region(begin, num_bytes);
}
#else
constexpr int64_t kRedZoneBytes = 0;
inline void Forbid(const void*, size_t) {}
inline void Allow(const void*, size_t) {}
#endif

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_DEVICE_RED_ZONE_H_
