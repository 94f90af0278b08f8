// SPDX-License-Identifier: Apache-2.0
/*!
 * \file bundle_library.h
 * \brief The libraries with kernels that this process has loaded from bundles.
 */
#ifndef TVM_PAGEDKV_BUNDLE_BUNDLE_LIBRARY_H_
#define TVM_PAGEDKV_BUNDLE_BUNDLE_LIBRARY_H_

#include <tvm/ffi/extra/module.h>

#include <string>

namespace pagedkv {

namespace ffi = tvm::ffi;

/*!
 * \brief Loads a library with kernels once; it stays loaded until the process ends.
 *
 * All modules of one file share its code and its data, among which is a pointer to the module
 * loaded last. The kernels call functions through that pointer, so no module may be freed while
 * kernels of another module are in use.
 *
 * \param path The library.
 * \param digest SHA-256 of the file.
 * \throws Error (RuntimeError) when the file has changed since this process loaded it: the dynamic
 *   loader would return the old code.
 */
ffi::Module LoadBundleLibrary(const std::string& path, const std::string& digest);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_BUNDLE_BUNDLE_LIBRARY_H_
