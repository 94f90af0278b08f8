// SPDX-License-Identifier: Apache-2.0
/*!
 * \file cpu_features.cc
 * \brief Asks CPUID on x86-64 and the auxiliary vector on AArch64.
 */
#include "base/cpu_features.h"

#include <cstdint>
#include <cstdlib>
#include <sstream>

#include "base/error.h"
#include "base/tile_permission.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace pagedkv {

namespace {

#if defined(__x86_64__)

constexpr const char* kArchitecture = "x86_64";

enum Register { kEAX, kEBX, kECX, kEDX };

/*! \brief The state that the operating system must save for a feature: bits of XCR0. */
enum State : uint64_t { kNone = 0, kAVX = 0x6, kAVX512 = 0xe6, kAMX = 0x60000 };

struct Feature {
  const char* name;
  uint32_t leaf, subleaf;
  Register reg;
  int bit;
  State state;
};

constexpr Feature kFeatures[] = {
    {"sse2", 1, 0, kEDX, 26, kNone},
    {"pni", 1, 0, kECX, 0, kNone},
    {"pclmulqdq", 1, 0, kECX, 1, kNone},
    {"ssse3", 1, 0, kECX, 9, kNone},
    {"fma", 1, 0, kECX, 12, kAVX},
    {"cx16", 1, 0, kECX, 13, kNone},
    {"sse4_1", 1, 0, kECX, 19, kNone},
    {"sse4_2", 1, 0, kECX, 20, kNone},
    {"movbe", 1, 0, kECX, 22, kNone},
    {"popcnt", 1, 0, kECX, 23, kNone},
    {"aes", 1, 0, kECX, 25, kNone},
    {"avx", 1, 0, kECX, 28, kAVX},
    {"f16c", 1, 0, kECX, 29, kAVX},
    {"bmi1", 7, 0, kEBX, 3, kNone},
    {"avx2", 7, 0, kEBX, 5, kAVX},
    {"bmi2", 7, 0, kEBX, 8, kNone},
    {"avx512f", 7, 0, kEBX, 16, kAVX512},
    {"avx512dq", 7, 0, kEBX, 17, kAVX512},
    {"adx", 7, 0, kEBX, 19, kNone},
    {"avx512ifma", 7, 0, kEBX, 21, kAVX512},
    {"avx512cd", 7, 0, kEBX, 28, kAVX512},
    {"sha_ni", 7, 0, kEBX, 29, kNone},
    {"avx512bw", 7, 0, kEBX, 30, kAVX512},
    {"avx512vl", 7, 0, kEBX, 31, kAVX512},
    {"avx512vbmi", 7, 0, kECX, 1, kAVX512},
    {"avx512_vbmi2", 7, 0, kECX, 6, kAVX512},
    {"gfni", 7, 0, kECX, 8, kNone},
    {"vaes", 7, 0, kECX, 9, kAVX},
    {"vpclmulqdq", 7, 0, kECX, 10, kAVX},
    {"avx512_vnni", 7, 0, kECX, 11, kAVX512},
    {"avx512_bitalg", 7, 0, kECX, 12, kAVX512},
    {"avx512_vpopcntdq", 7, 0, kECX, 14, kAVX512},
    {"avx512_vp2intersect", 7, 0, kEDX, 8, kAVX512},
    {"amx_bf16", 7, 0, kEDX, 22, kAMX},
    {"avx512_fp16", 7, 0, kEDX, 23, kAVX512},
    {"amx_tile", 7, 0, kEDX, 24, kAMX},
    {"amx_int8", 7, 0, kEDX, 25, kAMX},
    {"avx_vnni", 7, 1, kEAX, 4, kAVX},
    {"avx512_bf16", 7, 1, kEAX, 5, kAVX512},
    {"amx_fp16", 7, 1, kEAX, 21, kAMX},
    {"avx_ifma", 7, 1, kEAX, 23, kAVX},
    {"avx_vnni_int8", 7, 1, kEDX, 4, kAVX},
    {"avx_ne_convert", 7, 1, kEDX, 5, kAVX},
    {"avx_vnni_int16", 7, 1, kEDX, 10, kAVX},
    {"lahf_lm", 0x80000001, 0, kECX, 0, kNone},
    {"abm", 0x80000001, 0, kECX, 5, kNone},
    {"sse4a", 0x80000001, 0, kECX, 6, kNone},
    {"xop", 0x80000001, 0, kECX, 11, kAVX},
    {"fma4", 0x80000001, 0, kECX, 16, kAVX},
    {"tbm", 0x80000001, 0, kECX, 21, kNone},
};

/*! \brief The registers that the operating system saves. */
uint64_t SavedState() {
  uint32_t words[4] = {};
  constexpr uint32_t kHasXGETBV = 1u << 27;
  if (!__get_cpuid(1, &words[kEAX], &words[kEBX], &words[kECX], &words[kEDX]) ||
      !(words[kECX] & kHasXGETBV)) {
    return 0;
  }
  uint32_t low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

/*! \brief The highest subleaf of leaf 7. */
uint32_t LastSubleaf() {
  uint32_t last = 0, others[3];
  return __get_cpuid_count(7, 0, &last, &others[0], &others[1], &others[2]) ? last : 0;
}

std::set<std::string> DetectFeatures() {
  const uint64_t saved = SavedState();
  const uint32_t last_subleaf = LastSubleaf();
  std::set<std::string> features;
  for (const Feature& feature : kFeatures) {
    uint32_t words[4] = {};
    if (feature.subleaf > last_subleaf || (saved & feature.state) != feature.state) continue;
    if (!__get_cpuid_count(feature.leaf, feature.subleaf, &words[kEAX], &words[kEBX], &words[kECX],
                           &words[kEDX])) {
      continue;
    }
    if (words[feature.reg] >> feature.bit & 1) features.insert(feature.name);
  }
  return features;
}

#elif defined(__aarch64__)

constexpr const char* kArchitecture = "aarch64";

struct Feature {
  const char* name;
  unsigned long word;
  int bit;
};

constexpr Feature kFeatures[] = {
    {"fp", AT_HWCAP, 0},        {"asimd", AT_HWCAP, 1},    {"aes", AT_HWCAP, 3},
    {"sha2", AT_HWCAP, 6},      {"crc32", AT_HWCAP, 7},    {"atomics", AT_HWCAP, 8},
    {"fphp", AT_HWCAP, 9},      {"asimdhp", AT_HWCAP, 10}, {"asimdrdm", AT_HWCAP, 12},
    {"jscvt", AT_HWCAP, 13},    {"fcma", AT_HWCAP, 14},    {"lrcpc", AT_HWCAP, 15},
    {"sha3", AT_HWCAP, 17},     {"asimddp", AT_HWCAP, 20}, {"sve", AT_HWCAP, 22},
    {"asimdfhm", AT_HWCAP, 23}, {"uscat", AT_HWCAP, 25},   {"ilrcpc", AT_HWCAP, 26},
    {"flagm", AT_HWCAP, 27},    {"sve2", AT_HWCAP2, 1},    {"svebitperm", AT_HWCAP2, 4},
    {"flagm2", AT_HWCAP2, 7},   {"frint", AT_HWCAP2, 8},   {"svei8mm", AT_HWCAP2, 9},
    {"svebf16", AT_HWCAP2, 12}, {"i8mm", AT_HWCAP2, 13},   {"bf16", AT_HWCAP2, 14},
};

std::set<std::string> DetectFeatures() {
  std::set<std::string> features;
  for (const Feature& feature : kFeatures) {
    if (getauxval(feature.word) >> feature.bit & 1) features.insert(feature.name);
  }
  return features;
}

#else

constexpr const char* kArchitecture = "unknown";

std::set<std::string> DetectFeatures() { return {}; }

#endif

}  // namespace

const char* CPUArchitecture() { return kArchitecture; }

std::set<std::string> SplitWords(const std::string& text) {
  std::istringstream words(text);
  std::set<std::string> split;
  for (std::string word; words >> word;) split.insert(word);
  return split;
}

std::set<std::string> ChosenFeatures(std::set<std::string> features, const char* chosen) {
  if (chosen == nullptr) return features;
  std::set<std::string> words = SplitWords(chosen), left;
  bool names_some = words.empty();
  for (const std::string& word : words) {
    if (word[0] == '-') {
      features.erase(word.substr(1));
    } else {
      names_some = true;
    }
  }
  if (!names_some) return features;
  for (const std::string& word : words) {
    if (features.count(word) != 0) left.insert(word);
  }
  return left;
}

std::set<std::string> CPUFeatures() {
  const char* chosen = std::getenv("TVM_PAGEDKV_CPU_FEATURES");
  return PermittedFeatures(ChosenFeatures(DetectFeatures(), chosen), AskForTiles);
}

std::string MissingFeatures(const std::set<std::string>& needed,
                            const std::set<std::string>& present) {
  std::string missing;
  for (const std::string& feature : needed) {
    if (present.count(feature) == 0) missing += (missing.empty() ? "" : " ") + feature;
  }
  return missing;
}

void RequireCPU(const std::string& what, const std::string& architecture,
                const std::set<std::string>& features) {
  if (architecture != kArchitecture) {
    Raise(kValueError, what, " cannot run here: compiled for ", architecture, ", and this is ",
          kArchitecture);
  }
  const std::string missing = MissingFeatures(features, CPUFeatures());
  if (missing.empty()) return;
  const std::string refusal = TileRefusal();
  const bool is_refused = !refusal.empty() && missing.find("amx_tile") != std::string::npos;
  Raise(kValueError, what, " cannot run here: this CPU lacks ", missing,
        is_refused ? " (Linux refuses AMX to this process: " + refusal + ")" : "",
        "; compile for \"native\" on this machine, or for a CPU without these features");
}

}  // namespace pagedkv
