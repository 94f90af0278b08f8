// SPDX-License-Identifier: Apache-2.0
/*!
 * \file bundle_target.cc
 * \brief The choice among a bundle's targets.
 */
#include "bundle_target.h"

#include <algorithm>
#include <fstream>
#include <sstream>

#include "error.h"

namespace pagedkv {

namespace {

#if defined(__x86_64__) || defined(_M_X64)
constexpr const char* kArchitecture = "x86_64";
#elif defined(__aarch64__) || defined(_M_ARM64)
constexpr const char* kArchitecture = "aarch64";
#else
constexpr const char* kArchitecture = "unknown";
#endif

/*! \brief What keeps the machine from running the target; empty: nothing. */
std::string Obstacle(const BundleTarget& target, const Machine& machine) {
  if (target.device != machine.device) return "is for device " + target.device;
  if (target.architecture != machine.architecture) return "is for " + target.architecture;
  std::string lacking;
  for (const std::string& feature : target.features) {
    if (machine.features.count(feature) == 0) lacking += " " + feature;
  }
  return lacking.empty() ? "" : "needs" + lacking;
}

}  // namespace

std::set<std::string> ReadCPUFeatures(std::istream* lines) {
  std::string line, word;
  while (std::getline(*lines, line)) {
    std::istringstream words(line);
    words >> word;
    if (word != "flags" && word != "Features") continue;  // of x86, and of Arm
    words >> word;                                        // the colon
    std::set<std::string> features;
    while (words >> word) features.insert(word);
    return features;
  }
  return {};
}

Machine ThisCPU() {
  std::ifstream lines("/proc/cpuinfo");
  return {"cpu", kArchitecture, ReadCPUFeatures(&lines)};
}

size_t ChooseTarget(const std::vector<BundleTarget>& targets, const Machine& machine,
                    const std::string& name) {
  std::string obstacles;
  bool is_known = false;
  size_t best = targets.size();
  for (size_t i = 0; i < targets.size(); ++i) {
    is_known = is_known || targets[i].name == name;
    const bool is_wanted = name.empty() || targets[i].name == name;
    const std::string obstacle = Obstacle(targets[i], machine);
    const std::string what = is_wanted ? obstacle : "";
    obstacles += (i == 0 ? "" : "; ") + targets[i].name + (what.empty() ? "" : " " + what);
    if (!is_wanted || !obstacle.empty()) continue;
    if (best == targets.size() || targets[i].features.size() > targets[best].features.size()) {
      best = i;
    }
  }
  if (best < targets.size()) return best;
  if (!name.empty() && !is_known) {
    Raise(kValueError, "the bundle has no target '", name, "'; it has: ", obstacles);
  }
  Raise(kValueError, "this machine (", machine.device, ", ", machine.architecture,
        ") cannot run the bundle's kernels: ", obstacles,
        "; write a bundle with a target that it can run");
}

}  // namespace pagedkv
