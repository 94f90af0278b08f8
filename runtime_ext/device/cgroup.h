// SPDX-License-Identifier: Apache-2.0
/*!
 * \file cgroup.h
 * \brief Limits of Linux's control groups, by which containers limit memory.
 */
#ifndef TVM_PAGEDKV_DEVICE_CGROUP_H_
#define TVM_PAGEDKV_DEVICE_CGROUP_H_

#include <optional>
#include <string>

namespace pagedkv {

/*!
 * \brief Bytes of memory that this process may use: the least limit of its groups and of theirs.
 * \param root Where the groups are mounted.
 * \param membership A file that names the groups of the process.
 * \return Nothing where there is no limit, or no such file.
 */
std::optional<double> CgroupMemoryLimit(const std::string& root = "/sys/fs/cgroup",
                                        const std::string& membership = "/proc/self/cgroup");

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_DEVICE_CGROUP_H_
