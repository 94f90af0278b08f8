// SPDX-License-Identifier: Apache-2.0
/*!
 * \file error.cc
 * \brief Messages of errors, put together out of line: no caller compiles a stream.
 */
#include "base/error.h"

#include <charconv>

namespace pagedkv {

MessagePart::MessagePart(double number) : number_(32, '\0') {
  char* begin = number_.data();
  const auto end = std::to_chars(begin, begin + number_.size(), number, std::chars_format::general,
                                 /*precision=*/6);
  number_.resize(end.ptr - begin);
  text_ = number_;
}

void RaiseParts(const char* kind, std::initializer_list<MessagePart> parts) {
  std::string message;
  for (const MessagePart& part : parts) message += part.text();
  throw Error(kind, std::move(message));
}

}  // namespace pagedkv
