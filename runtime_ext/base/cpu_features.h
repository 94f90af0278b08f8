// SPDX-License-Identifier: Apache-2.0
/*!
 * \file cpu_features.h
 * \brief The features of this process's CPU, and the refusal of code that needs others.
 */
#ifndef TVM_PAGEDKV_BASE_CPU_FEATURES_H_
#define TVM_PAGEDKV_BASE_CPU_FEATURES_H_

#include <set>
#include <string>

namespace pagedkv {

/*! \brief "x86_64", "aarch64" or "unknown". */
const char* CPUArchitecture();

/*!
 * \brief The features that code in this process may use, with the names of Linux (/proc/cpuinfo).
 *
 * The CPU and the operating system are asked, not the CPU's name: a hypervisor may hide features,
 * and an emulator may have fewer than the machine that it runs on. The environment variable
 * TVM_PAGEDKV_CPU_FEATURES leaves the features that ChosenFeatures keeps. If there is AMX among
 * them, the process asks for it, and has none where that is refused: see PermittedFeatures.
 */
std::set<std::string> CPUFeatures();

/*!
 * \brief The features that a list with spaces keeps: those that it names, or all others if it only
 * names features with a minus before them.
 * \param chosen The list; nullptr: all of them.
 */
std::set<std::string> ChosenFeatures(std::set<std::string> features, const char* chosen);

/*! \brief The needed features that are not present, with spaces between them. */
std::string MissingFeatures(const std::set<std::string>& needed,
                            const std::set<std::string>& present);

/*! \brief The words of a text. */
std::set<std::string> SplitWords(const std::string& text);

/*!
 * \brief Refuses code that this process cannot run.
 * \param what The code, for the error: "the kernels of the model".
 * \param architecture As CPUArchitecture names it.
 * \param features The features that the code needs.
 * \throws Error (ValueError) that lists what is missing.
 */
void RequireCPU(const std::string& what, const std::string& architecture,
                const std::set<std::string>& features);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_BASE_CPU_FEATURES_H_
