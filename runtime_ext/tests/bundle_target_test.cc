// SPDX-License-Identifier: Apache-2.0
#include "bundle/bundle_target.h"

#include <string>
#include <vector>

#include "check.h"

using pagedkv::BundleTarget;
using pagedkv::ChooseTarget;
using pagedkv::Machine;

namespace {

const std::vector<BundleTarget> kTargets = {
    {"v3", "cpu", "x86_64", {"avx2", "f16c", "fma"}},
    {"v4", "cpu", "x86_64", {"avx2", "avx512f", "f16c", "fma"}},
    {"v4 too", "cpu", "x86_64", {"avx2", "avx512f", "f16c", "fma"}},
    {"v4+bf16", "cpu", "x86_64", {"avx2", "avx512_bf16", "avx512f", "f16c", "fma"}},
    {"arm", "cpu", "aarch64", {"asimd"}},
    {"gpu", "cuda", "x86_64", {}, {"sm_80", "sm_90a", "compute_80"}, 13000, 13020},
};

Machine GPU(int64_t compute_capability, int64_t driver) {
  return {"cuda", "x86_64", {"avx2"}, compute_capability, driver};
}

std::string Chosen(const Machine& machine, const std::string& name = "") {
  return kTargets[ChooseTarget(kTargets, machine, name)].name;
}

}  // namespace

TEST_CASE("bundle target") {
  const Machine zen2{"cpu", "x86_64", {"sse2", "avx2", "fma", "f16c"}};
  const Machine skylake{"cpu", "x86_64", {"avx2", "avx512f", "f16c", "fma", "more"}};
  const Machine zen4{"cpu", "x86_64", {"avx2", "avx512_bf16", "avx512f", "f16c", "fma"}};
  REQUIRE_EQ(Chosen(zen2), "v3");
  REQUIRE_EQ(Chosen(skylake), "v4");  // the first of equals
  REQUIRE_EQ(Chosen(zen4), "v4+bf16");
  REQUIRE_EQ(Chosen(zen4, "v3"), "v3");
  REQUIRE_EQ(Chosen({"cpu", "aarch64", {"fp", "asimd"}}), "arm");
  REQUIRE_EQ(Chosen(GPU(80, 13000)), "gpu");
  REQUIRE_EQ(Chosen(GPU(86, 13000)), "gpu");
  REQUIRE_EQ(Chosen(GPU(90, 13010)), "gpu");
  REQUIRE_EQ(Chosen(GPU(100, 13020)), "gpu");  // from PTX
  REQUIRE_EQ(Chosen(GPU(100, 0)), "gpu");      // by a driver that does not tell
  REQUIRE_RAISES("ValueError", "gpu has code for sm_80, sm_90a, compute_80",
                 Chosen(GPU(75, 13020)));
  REQUIRE_RAISES("ValueError", "(cuda, x86_64, sm_75)", Chosen(GPU(75, 13020)));
  REQUIRE_RAISES("ValueError",
                 "gpu needs a driver for CUDA 13.2 or later, and this one is for CUDA 13.1",
                 Chosen(GPU(100, 13010)));
  REQUIRE_RAISES("ValueError", "gpu needs a driver for CUDA 13.0", Chosen(GPU(0, 12090)));
  REQUIRE_RAISES("ValueError", "gpu is for x86_64", Chosen({"cuda", "aarch64", {}, 90, 13000}));
  REQUIRE(pagedkv::ReadDeviceCode("sm_90a").is_specific);
  REQUIRE_EQ(pagedkv::ReadDeviceCode("compute_120").arch, 120);
  for (const char* text : {"", "sm_", "sm_9", "sm_90b", "sm_9000", "compute_", "90", "sm_-90"}) {
    REQUIRE_RAISES("ValueError", "device_code must be as", pagedkv::ReadDeviceCode(text));
  }
  REQUIRE_RAISES("ValueError", "v4+bf16 needs avx512_bf16", Chosen(skylake, "v4+bf16"));
  REQUIRE_RAISES("ValueError", "no target 'v5'; it has: v3; v4; v4 too; v4+bf16; arm; gpu",
                 Chosen(zen4, "v5"));
  REQUIRE_RAISES(
      "ValueError",
      "v3 needs avx2 f16c fma; v4 needs avx2 avx512f f16c fma; v4 too needs avx2 avx512f "
      "f16c fma; v4+bf16 needs avx2 avx512_bf16 avx512f f16c fma; arm is for aarch64; gpu "
      "is for device cuda",
      Chosen({"cpu", "x86_64", {"sse2"}}));
  REQUIRE_RAISES("ValueError", "(cpu, riscv64)", Chosen({"cpu", "riscv64", {}}));
  REQUIRE_EQ(pagedkv::ThisCPU().device, "cpu");
}
