// SPDX-License-Identifier: Apache-2.0
/*!
 * \file check.h
 * \brief A check that ends the test program, and one for errors of a kind.
 */
#ifndef TVM_PAGEDKV_TESTS_CHECK_H_
#define TVM_PAGEDKV_TESTS_CHECK_H_

#include <cstdlib>
#include <iostream>
#include <string>

#include "base/error.h"

#define CHECK_TRUE(condition)                                                        \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::cerr << __FILE__ << ":" << __LINE__ << ": not true: " #condition << "\n"; \
      std::exit(1);                                                                  \
    }                                                                                \
  } while (false)

#define CHECK_EQUAL(actual, expected)                                                 \
  do {                                                                                \
    if (!((actual) == (expected))) {                                                  \
      std::cerr << __FILE__ << ":" << __LINE__ << ": " #actual " != " #expected "\n"; \
      std::exit(1);                                                                   \
    }                                                                                 \
  } while (false)

/*! \brief The statement throws an Error of this kind, whose message has this text. */
#define CHECK_RAISES(kind_name, text, statement)                                              \
  do {                                                                                        \
    bool has_raised = false;                                                                  \
    try {                                                                                     \
      statement;                                                                              \
    } catch (const pagedkv::Error& error) {                                                   \
      has_raised = true;                                                                      \
      CHECK_EQUAL(std::string(error.kind()), std::string(kind_name));                         \
      if (error.message().find(text) == std::string::npos) {                                  \
        std::cerr << __FILE__ << ":" << __LINE__ << ": message: " << error.message() << "\n"; \
        std::exit(1);                                                                         \
      }                                                                                       \
    }                                                                                         \
    CHECK_TRUE(has_raised);                                                                   \
  } while (false)

#endif  // TVM_PAGEDKV_TESTS_CHECK_H_
