// SPDX-License-Identifier: Apache-2.0
/*!
 * \file run_bundle.cc
 * \brief A cache from a bundle, without Python and without a compiler: one prompt, one step.
 *
 * Use: run_bundle BUNDLE [TARGET]. Writes the output of layer 0, a line for each row of each head.
 * TARGET "cuda", or a bundle with no other one, runs on the first GPU.
 */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/string.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "libraries.h"

namespace ffi = tvm::ffi;
using Map = ffi::Map<ffi::String, ffi::Any>;

namespace {

constexpr int64_t kPrompt = 37, kSequence = 7;

ffi::Tensor MakeTensor(ffi::Shape shape, DLDevice device) {
  const DLDataType dtype{kDLFloat, 32, 1};
  return Find("runtime.TVMTensorAllocWithScope")(shape, dtype, device, nullptr).cast<ffi::Tensor>();
}

void Run(const std::string& path, const ffi::Optional<ffi::String>& target) {
  Map bundle = Find("pagedkv.load_bundle")(ffi::String(path), target, nullptr).cast<Map>();
  std::printf("target %s\n", bundle["target"].cast<ffi::String>().c_str());

  // Capacities are free; all else is what the kernels were compiled for.
  Map config = bundle["config"].cast<Map>();
  config.Set("max_total_tokens", 4096);
  const auto device = bundle["device"].cast<DLDevice>();
  ffi::Any cache = Find("pagedkv.create")(config, bundle["kernels"], device);

  auto layers = config["layers"].cast<ffi::Array<Map>>();
  const int64_t num_qo_heads = layers[0]["num_qo_heads"].cast<int64_t>();
  const int64_t num_kv_heads = layers[0]["num_kv_heads"].cast<int64_t>();
  const int64_t head_dim = layers[0]["qk_head_dim"].cast<int64_t>();
  ffi::Tensor qkv = MakeTensor({kPrompt, num_qo_heads + 2 * num_kv_heads, head_dim}, device);
  ffi::Tensor o = MakeTensor({kPrompt, num_qo_heads, head_dim}, device);
  std::vector<float> values(qkv.numel()), out(o.numel());
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(i * 7919 % 1009) / 512.0f - 1.0f;
  }
  Find("runtime.TVMTensorCopyFromBytes")(qkv, static_cast<void*>(values.data()),
                                         ffi::GetDataSize(qkv));

  Find("vm.builtin.kv_state_add_sequence")(cache, kSequence);
  Find("vm.builtin.kv_state_begin_forward")(cache, ffi::Shape{kSequence}, ffi::Shape{kPrompt});
  auto attention = Find("vm.builtin.attention_kv_cache_attention_with_fused_qkv");
  const double scale = 1.0 / std::sqrt(static_cast<double>(head_dim));
  for (size_t layer = layers.size(); layer-- > 0;) {
    attention(cache, static_cast<int64_t>(layer), scale, qkv, o);
  }
  Find("vm.builtin.kv_state_end_forward")(cache);

  Find("runtime.TVMTensorCopyToBytes")(o, static_cast<void*>(out.data()), ffi::GetDataSize(o));
  for (size_t i = 0; i < out.size(); ++i) {
    std::printf("%.9g%c", out[i], (i + 1) % head_dim == 0 ? '\n' : ' ');
  }
}

/*! \brief Says which libraries of TVM the process has. */
void PrintLibraries() {
  std::ifstream maps("/proc/self/maps");
  std::string line, last;
  while (std::getline(maps, line)) {
    const size_t begin = line.find('/');
    if (begin == std::string::npos || line.find("libtvm") == std::string::npos) continue;
    if (line.substr(begin) != last) std::printf("library %s\n", line.c_str() + begin);
    last = line.substr(begin);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) {
    std::fprintf(stderr, "use: run_bundle BUNDLE [TARGET]\n");
    return 2;
  }
  if (!LoadLibraries(argv[1])) return 1;
  try {
    Run(argv[1], argc == 3 ? ffi::Optional<ffi::String>(ffi::String(argv[2])) : std::nullopt);
  } catch (const ffi::Error& error) {
    std::fprintf(stderr, "%s: %s\n", error.kind().c_str(), error.message().c_str());
    return 1;
  }
  PrintLibraries();
  return 0;
}
