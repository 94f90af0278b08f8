// SPDX-License-Identifier: Apache-2.0
/*!
 * \file bundle_target.h
 * \brief Which of a bundle's kernels a machine can run, and runs best.
 */
#ifndef TVM_PAGEDKV_BUNDLE_TARGET_H_
#define TVM_PAGEDKV_BUNDLE_TARGET_H_

#include <cstddef>
#include <istream>
#include <set>
#include <string>
#include <vector>

namespace pagedkv {

/*! \brief What kernels were compiled for. */
struct BundleTarget {
  std::string name;
  std::string device;              // "cpu"
  std::string architecture;        // "x86_64", "aarch64"
  std::set<std::string> features;  // that the machine must have, as Linux names them
};

/*! \brief What there is to run them. */
struct Machine {
  std::string device;
  std::string architecture;
  std::set<std::string> features;
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

#endif  // TVM_PAGEDKV_BUNDLE_TARGET_H_
