// SPDX-License-Identifier: Apache-2.0
/*!
 * \file check.h
 * \brief doctest, and an assertion on errors.
 */
#ifndef TVM_PAGEDKV_TESTS_CHECK_H_
#define TVM_PAGEDKV_TESTS_CHECK_H_

#include <doctest/doctest.h>

#include <string>

#include "base/error.h"

namespace pagedkv {

/*! \brief The message of the Error of this kind that `call` throws; fails the test without one. */
template <typename F>
std::string RaisedMessage(const std::string& kind, F call) {
  try {
    call();
  } catch (const Error& error) {
    REQUIRE_EQ(std::string(error.kind()), kind);
    return error.message();
  }
  FAIL("no error was thrown");
  return "";
}

}  // namespace pagedkv

/*! \brief The statement throws an Error of this kind whose message contains this text. */
#define REQUIRE_RAISES(kind, text, statement)                                             \
  do {                                                                                    \
    const std::string message = pagedkv::RaisedMessage(kind, [&] { (void)(statement); }); \
    CAPTURE(message);                                                                     \
    REQUIRE_NE(message.find(text), std::string::npos);                                    \
  } while (false)

#endif  // TVM_PAGEDKV_TESTS_CHECK_H_
