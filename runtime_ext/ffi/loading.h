// SPDX-License-Identifier: Apache-2.0
/*!
 * \file loading.h
 * \brief Whether this copy of the library fits the process that loaded it.
 */
#ifndef TVM_PAGEDKV_FFI_LOADING_H_
#define TVM_PAGEDKV_FFI_LOADING_H_

#include <string>

namespace pagedkv {

/*! \brief The path that this copy of the library was loaded from. */
std::string LibraryPath();

/*!
 * \brief Why TVM's runtime in this process does not fit; empty when it does.
 *
 * The library calls C++ classes of libtvm_runtime.so, whose layout changes from series to series.
 * The runtime does not tell its version, but the file _version.py of the wheel that it lies in
 * does. Where there is none, as in bundles, which say their version themselves, only that of
 * tvm-ffi is compared.
 */
std::string RuntimeMismatch();

/*! \brief Returns the copy of this library that has registered its functions; empty if none has. */
std::string OtherCopy();

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_FFI_LOADING_H_
