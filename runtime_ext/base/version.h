// SPDX-License-Identifier: Apache-2.0
/*!
 * \file version.h
 * \brief Versions of TVM, whose ABI is stable within a series.
 */
#ifndef TVM_PAGEDKV_BASE_VERSION_H_
#define TVM_PAGEDKV_BASE_VERSION_H_

#include <string>

namespace pagedkv {

/*! \brief The first two numbers of a version, such as "0.27". */
inline std::string Series(const std::string& version) {
  return version.substr(0, version.find('.', version.find('.') + 1));
}

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_BASE_VERSION_H_
