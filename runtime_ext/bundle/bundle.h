// SPDX-License-Identifier: Apache-2.0
/*!
 * \file bundle.h
 * \brief Bundles: folders with compiled kernels, the libraries that run them, and a manifest.
 *
 * manifest.json describes the kernels and has the size and the SHA-256 of every file. Its own
 * digest is in manifest.sha256, in the format of sha256sum. Every file is checked before it is
 * loaded.
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

/*! \brief Version of the manifest and of the calling convention of kernels. */
inline constexpr int64_t kBundleFormat = 1;

/*!
 * \brief Checks a bundle and loads the kernels of the best target for this machine.
 * \param path The folder.
 * \param target The name of the target; by default the best one.
 * \param device The device of the kernels; by default the first device of the target's kind. When
 *   no target is named and there is one for CPUs, that is the CPU.
 * \return "config", "kernels" and "device", as pagedkv.create takes them (capacities in the config
 *   may be changed), "target", the name of the target, and "manifest", the text of manifest.json.
 * \throws Error (ValueError) when the bundle is damaged, or for another version or machine;
 *   (RuntimeError) when the GPU or its driver is missing, or when a file has changed since this
 *   process loaded it.
 */
ffi::Map<ffi::String, ffi::Any> LoadBundle(const std::string& path,
                                           const ffi::Optional<ffi::String>& target,
                                           const ffi::Optional<DLDevice>& device);

/*!
 * \brief The index of the best target for a machine.
 * \param targets As the manifest has them.
 * \param machine "device", "architecture" and "features", for a GPU also "compute_capability" and
 *   "driver"; by default this CPU.
 * \throws Error (ValueError).
 */
int64_t ChooseBundleTarget(const ffi::Array<ffi::Any>& targets,
                           const ffi::Optional<ffi::Map<ffi::String, ffi::Any>>& machine,
                           const ffi::Optional<ffi::String>& name);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_BUNDLE_BUNDLE_H_
