// SPDX-License-Identifier: Apache-2.0
/*!
 * \file bundle_device.h
 * \brief The machine that a device belongs to: its CPU, or a GPU and its driver.
 */
#ifndef TVM_PAGEDKV_BUNDLE_BUNDLE_DEVICE_H_
#define TVM_PAGEDKV_BUNDLE_BUNDLE_DEVICE_H_

#include <tvm/ffi/c_api.h>

#include <string>
#include <vector>

#include "bundle/bundle_target.h"

namespace pagedkv {

/*!
 * \brief The machine that a device belongs to.
 * \param device A CPU, or a GPU; one that is not there has an unknown compute capability.
 * \param libraries Paths of libraries that may be loaded if the process has none of their kind.
 * \throws Error (RuntimeError) for a GPU, without a driver or TVM's runtime for it; (ValueError)
 *   for other devices.
 */
Machine MachineOf(DLDevice device, const std::vector<std::string>& libraries);

/*! \brief The name of a kind of device in bundles; empty when they have none. */
std::string NameOfDevice(DLDevice device);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_BUNDLE_BUNDLE_DEVICE_H_
