# SPDX-License-Identifier: Apache-2.0
# Toolchain of CMake for AArch64 on Linux: what Debian and Ubuntu have as g++-aarch64-linux-gnu.
# docs/bundles.md says how to build the library with it.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
