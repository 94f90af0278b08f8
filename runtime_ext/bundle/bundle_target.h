// SPDX-License-Identifier: Apache-2.0
/*!
 * \file bundle_target.h
 * \brief The choice among the targets of a bundle that a machine can run.
 */
#ifndef TVM_PAGEDKV_BUNDLE_BUNDLE_TARGET_H_
#define TVM_PAGEDKV_BUNDLE_BUNDLE_TARGET_H_

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace pagedkv {

/*! \brief GPU code: machine code for one architecture, or PTX, which drivers compile for later
 * ones. */
struct DeviceCode {
  int64_t arch = 0;  // 90: compute capability 9.0
  bool is_ptx = false;
  bool is_specific = false;  // runs on this architecture only, such as "sm_90a"
};

/*!
 * \brief Reads "sm_90", "sm_90a" or "compute_80".
 * \throws Error (ValueError).
 */
DeviceCode ReadDeviceCode(const std::string& text);

/*! \brief The target that kernels were compiled for. */
struct BundleTarget {
  std::string name;
  std::string device;              // "cpu", "cuda"
  std::string architecture;        // of the host: "x86_64", "aarch64"
  std::set<std::string> features;  // required of the host, as CPUFeatures names them
  // For "cuda":
  std::vector<std::string> device_code = {};
  int64_t driver = 0;          // minimum CUDA version of the driver, 13000 for 13.0
  int64_t driver_for_ptx = 0;  // the same when the driver has to compile PTX
};

/*! \brief The machine that runs kernels. */
struct Machine {
  std::string device;
  std::string architecture;
  std::set<std::string> features;
  // For "cuda"; 0 when unknown.
  int64_t compute_capability = 0;  // 90 for 9.0
  int64_t driver = 0;              // CUDA version of the driver
};

/*! \brief The CPU of this process. */
Machine ThisCPU();

/*!
 * \brief Chooses the most specific target that the machine supports; the first one of equals.
 * \param name If not empty, the only target to consider.
 * \return An index into `targets`.
 * \throws Error (ValueError) that lists what the machine lacks for each target.
 */
size_t ChooseTarget(const std::vector<BundleTarget>& targets, const Machine& machine,
                    const std::string& name);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_BUNDLE_BUNDLE_TARGET_H_
