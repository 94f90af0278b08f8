// SPDX-License-Identifier: Apache-2.0
/*!
 * \file bundle.h
 * \brief Bundles: folders with compiled kernels, the libraries that run them, and a manifest.
 *
 * manifest.json says what the kernels are for, and bytes and SHA-256 of every file; its own digest
 * is in manifest.sha256, as sha256sum writes it. Nothing is loaded before it was checked.
 */
#ifndef TVM_PAGEDKV_BUNDLE_BUNDLE_H_
#define TVM_PAGEDKV_BUNDLE_BUNDLE_H_

#include <tvm/ffi/any.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <string>

namespace pagedkv {

namespace ffi = tvm::ffi;

/*! \brief Of the manifest, and of how kernels and the cache call each other. */
inline constexpr int64_t kBundleFormat = 1;

/*!
 * \brief Checks a bundle and loads the kernels that this machine runs best.
 * \param path The folder.
 * \param target The name of the target to take; none: the best one.
 * \param device Where they will run; none: the first device that the target is for, a CPU if there
 *   is a target for one and none is named.
 * \return "config", "kernels" and "device", as pagedkv.create takes them (capacities in the config
 *   may be changed), "target", the name of the target, and "manifest", the text of manifest.json.
 * \throws Error (ValueError) when the bundle is damaged, or of another version or machine;
 *   (RuntimeError) for a GPU that is not there, or without a driver.
 */
ffi::Map<ffi::String, ffi::Any> LoadBundle(const std::string& path,
                                           const ffi::Optional<ffi::String>& target,
                                           const ffi::Optional<DLDevice>& device);

/*!
 * \brief The index of the target that a machine runs best.
 * \param targets As the manifest has them.
 * \param machine "device", "architecture" and "features", of a GPU "compute_capability" and
 *   "driver" besides; none: this CPU.
 * \throws Error (ValueError).
 */
int64_t ChooseBundleTarget(const ffi::Array<ffi::Any>& targets,
                           const ffi::Optional<ffi::Map<ffi::String, ffi::Any>>& machine,
                           const ffi::Optional<ffi::String>& name);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_BUNDLE_BUNDLE_H_
