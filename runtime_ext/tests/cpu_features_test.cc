// SPDX-License-Identifier: Apache-2.0
#include "base/cpu_features.h"

#include <cstdlib>
#include <string>

#include "check.h"

using pagedkv::CPUArchitecture;
using pagedkv::CPUFeatures;
using pagedkv::RequireCPU;

TEST_CASE("features of the CPU") {
  const std::set<std::string> all = CPUFeatures();
  const std::string architecture = CPUArchitecture();
  // What every CPU of the architecture has.
  if (architecture == "x86_64") REQUIRE(all.count("sse2"));
  if (architecture == "aarch64") REQUIRE(all.count("asimd"));
  RequireCPU("this", architecture, all);
  REQUIRE_RAISES("ValueError", "the code cannot run here: compiled for pdp11, and this is ",
                 RequireCPU("the code", "pdp11", {}));

  setenv("TVM_PAGEDKV_CPU_FEATURES", " sse2 asimd  no_such_feature", 1);
  REQUIRE(CPUFeatures().size() <= 1);
  REQUIRE_RAISES("ValueError", "this CPU lacks avx2 no_such_feature;",
                 RequireCPU("the code", architecture, {"avx2", "no_such_feature"}));
  unsetenv("TVM_PAGEDKV_CPU_FEATURES");
  REQUIRE(CPUFeatures() == all);
}
