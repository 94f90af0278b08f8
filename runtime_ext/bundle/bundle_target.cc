// SPDX-License-Identifier: Apache-2.0
/*!
 * \file bundle_target.cc
 * \brief Chooses a target of a bundle.
 */
#include "bundle/bundle_target.h"

#include "base/cpu_features.h"
#include "base/error.h"

namespace pagedkv {

namespace {

/*! \brief "13.0" for 13000. */
std::string VersionOf(int64_t cuda) {
  return std::to_string(cuda / 1000) + "." + std::to_string(cuda % 1000 / 10);
}

bool RunsAsItIs(const DeviceCode& code, int64_t capability) {
  if (code.is_ptx || code.arch > capability) return false;
  return code.is_specific ? code.arch == capability : code.arch / 10 == capability / 10;
}

bool CanBeCompiled(const DeviceCode& code, int64_t capability) {
  return code.is_ptx && (code.is_specific ? code.arch == capability : code.arch <= capability);
}

std::string GPUObstacle(const BundleTarget& target, const Machine& machine) {
  int64_t driver = target.driver;
  if (machine.compute_capability != 0) {
    bool runs = false, can_be_compiled = false;
    std::string all;
    for (const std::string& text : target.device_code) {
      const DeviceCode code = ReadDeviceCode(text);
      runs = runs || RunsAsItIs(code, machine.compute_capability);
      can_be_compiled = can_be_compiled || CanBeCompiled(code, machine.compute_capability);
      all += (all.empty() ? "" : ", ") + text;
    }
    if (!runs && !can_be_compiled) return "has code for " + all;
    if (!runs) driver = target.driver_for_ptx;
  }
  if (machine.driver == 0 || machine.driver >= driver) return "";
  return "needs a driver for CUDA " + VersionOf(driver) + " or later, and this one is for CUDA " +
         VersionOf(machine.driver);
}

/*! \brief Returns what the machine lacks for the target; empty when it can run it. */
std::string Obstacle(const BundleTarget& target, const Machine& machine) {
  if (target.device != machine.device) return "is for device " + target.device;
  if (target.architecture != machine.architecture) return "is for " + target.architecture;
  if (target.device == "cuda") {
    const std::string obstacle = GPUObstacle(target, machine);
    if (!obstacle.empty()) return obstacle;
  }
  const std::string missing = MissingFeatures(target.features, machine.features);
  return missing.empty() ? "" : "needs " + missing;
}

}  // namespace

DeviceCode ReadDeviceCode(const std::string& text) {
  DeviceCode code;
  code.is_ptx = text.rfind("compute_", 0) == 0;
  size_t at = code.is_ptx ? 8 : 3;
  const bool is_known = code.is_ptx || text.rfind("sm_", 0) == 0;
  const size_t begin = at;
  for (; is_known && at < text.size() && at < begin + 3; ++at) {
    if (text[at] < '0' || text[at] > '9') break;
    code.arch = 10 * code.arch + (text[at] - '0');
  }
  code.is_specific = at < text.size() && text[at] == 'a';
  if (!is_known || at < begin + 2 || text.size() != at + (code.is_specific ? 1 : 0)) {
    Raise(kValueError, "device_code must be as 'sm_90' or 'compute_80', got '", text, "'");
  }
  return code;
}

Machine ThisCPU() { return {"cpu", CPUArchitecture(), CPUFeatures(), 0, 0}; }

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
  const std::string capability =
      machine.compute_capability == 0 ? "" : ", sm_" + std::to_string(machine.compute_capability);
  Raise(kValueError, "this machine (", machine.device, ", ", machine.architecture, capability,
        ") cannot run the bundle's kernels: ", obstacles,
        "; write a bundle with a target that it can run");
}

}  // namespace pagedkv
