// SPDX-License-Identifier: Apache-2.0
#include "base/cpu_features.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/tile_permission.h"
#include "check.h"

using pagedkv::ChosenFeatures;
using pagedkv::CPUArchitecture;
using pagedkv::CPUFeatures;
using pagedkv::PermittedFeatures;
using pagedkv::RequireCPU;
using pagedkv::TileRefusal;

namespace {

using Features = std::set<std::string>;

int num_questions = 0;

int Permit() { return ++num_questions, 0; }

int Refuse() { return ++num_questions, EPERM; }

}  // namespace

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

TEST_CASE("features that a list keeps") {
  const Features all = {"amx_bf16", "amx_tile", "avx2"};
  REQUIRE(ChosenFeatures(all, nullptr) == all);
  REQUIRE(ChosenFeatures(all, "").empty());
  REQUIRE(ChosenFeatures(all, "avx2 no_such_feature") == Features{"avx2"});
  REQUIRE(ChosenFeatures(all, " -amx_tile -no_such_feature") == Features{"amx_bf16", "avx2"});
  REQUIRE(ChosenFeatures(all, "avx2 amx_tile -amx_tile") == Features{"avx2"});
  REQUIRE(ChosenFeatures(all, "-") == all);
}

TEST_CASE("tiles need a permission") {
  const Features all = {"amx_bf16", "amx_int8", "amx_tile", "avx512f"};
  const Features others = {"avx512f"};
  num_questions = 0;
  REQUIRE(PermittedFeatures(all, Permit) == all);
  REQUIRE(num_questions == 1);
  REQUIRE(TileRefusal().empty());

  // Nobody asks where nothing would use it.
  REQUIRE(PermittedFeatures({"amx_bf16", "avx512f"}, Permit) == others);
  REQUIRE(PermittedFeatures(others, Permit) == others);
  REQUIRE(num_questions == 1);

  REQUIRE(PermittedFeatures(all, Refuse) == others);
  REQUIRE(num_questions == 2);
  REQUIRE(TileRefusal() == std::string(std::strerror(EPERM)));
  REQUIRE_RAISES("ValueError", "amx_tile no_such_feature (Linux refuses AMX to this process: ",
                 RequireCPU("the code", CPUArchitecture(), {"amx_tile", "no_such_feature"}));

  REQUIRE(PermittedFeatures(all, Permit) == all);
  REQUIRE(TileRefusal().empty());
}

TEST_CASE("Linux answers about tiles") {
  unsetenv("TVM_PAGEDKV_CPU_FEATURES");
  const bool has_tiles = CPUFeatures().count("amx_tile") != 0;
  REQUIRE((pagedkv::AskForTiles() == 0) == has_tiles);
}
