// SPDX-License-Identifier: Apache-2.0
/*!
 * \file main.cc
 * \brief The main function of the unit tests. To run one file of tests: runtime_tests -sf='*pool*'
 */
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
