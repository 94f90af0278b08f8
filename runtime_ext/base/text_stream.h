// SPDX-License-Identifier: Apache-2.0
/*!
 * \file text_stream.h
 * \brief A stream whose numbers read the same in every locale.
 */
#ifndef TVM_PAGEDKV_BASE_TEXT_STREAM_H_
#define TVM_PAGEDKV_BASE_TEXT_STREAM_H_

#include <locale>
#include <sstream>

namespace pagedkv {

/*! \brief A stream without digit grouping, whatever locale the program has set. */
class ClassicText : public std::ostringstream {
 public:
  ClassicText() { imbue(std::locale::classic()); }
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_BASE_TEXT_STREAM_H_
