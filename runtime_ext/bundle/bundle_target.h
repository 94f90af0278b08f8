// SPDX-License-Identifier: Apache-2.0
/*!
 * \file bundle_target.h
 * \brief Which of a bundle's kernels a machine can run, and runs best.
 */
#ifndef TVM_PAGEDKV_BUNDLE_BUNDLE_TARGET_H_
#define TVM_PAGEDKV_BUNDLE_BUNDLE_TARGET_H_

#include <cstddef>
#include <cstdint>
#include <istream>
#include <set>
#include <string>
#include <vector>

namespace pagedkv {

/*! \brief Code of a GPU: of its own kind, or PTX, which drivers compile for later ones too. */
struct DeviceCode {
  int64_t arch = 0;  // 90: compute capability 9.0
  bool is_ptx = false;
  bool is_specific = false;  // runs on this architecture alone, as "sm_90a" does
};

/*!
 * \brief Reads "sm_90", "sm_90a" or "compute_80".
 * \throws Error (ValueError).
 */
DeviceCode ReadDeviceCode(const std::string& text);

/*! \brief What kernels were compiled for. */
struct BundleTarget {
  std::string name;
  std::string device;              // "cpu", "cuda"
  std::string architecture;        // of the host: "x86_64", "aarch64"
  std::set<std::string> features;  // that the host must have, as Linux names them
  // Of "cuda":
  std::vector<std::string> device_code = {};
  int64_t driver = 0;          // the version of CUDA that drivers must know, as 13000 for 13.0
  int64_t driver_for_ptx = 0;  // ... where they have to compile PTX
};

/*! \brief What there is to run them. */
struct Machine {
  std::string device;
  std::string architecture;
  std::set<std::string> features;
  // Of "cuda"; 0: not known.
  int64_t compute_capability = 0;  // 90 for 9.0
  int64_t driver = 0;              // the version of CUDA that it is for
};

/*! \brief The CPU of this process. A hypervisor may hide some of what the CPU's name promises. */
Machine ThisCPU();

/*! \brief The features among the lines of /proc/cpuinfo. */
std::set<std::string> ReadCPUFeatures(std::istream* lines);

/*!
 * \brief Chooses the target that asks for most of what the machine has; of equals the first one.
 * \param name Not empty: the target of this name or none.
 * \return An index into `targets`.
 * \throws Error (ValueError) that says what each target needs and the machine lacks.
 */
size_t ChooseTarget(const std::vector<BundleTarget>& targets, const Machine& machine,
                    const std::string& name);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_BUNDLE_BUNDLE_TARGET_H_
