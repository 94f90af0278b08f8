// SPDX-License-Identifier: Apache-2.0
/*!
 * \file cache_config_checks.h
 * \brief Checks that both readers of a configuration share.
 */
#ifndef TVM_PAGEDKV_CONFIG_CACHE_CONFIG_CHECKS_H_
#define TVM_PAGEDKV_CONFIG_CACHE_CONFIG_CHECKS_H_

#include <tvm/ffi/c_api.h>

#include <cstdint>
#include <limits>
#include <string>

namespace pagedkv {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

/*! \return The value. \throws Error (ValueError) when it is not in [low, high]. */
int64_t CheckRange(const char* name, int64_t value, int64_t low, int64_t high);

DLDataType ParseDtype(const char* name, const std::string& text);

/*! \throws Error (ValueError) when this machine has no such device. */
void CheckDevice(DLDevice device);

/*! \brief Whether tensors may start inside a buffer, as merged auxiliary arrays do. */
bool CanOffsetPointers(DLDevice device);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_CONFIG_CACHE_CONFIG_CHECKS_H_
