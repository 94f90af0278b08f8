// SPDX-License-Identifier: Apache-2.0
/*!
 * \file run_bundle.cc
 * \brief A cache from a bundle, without Python and without a compiler: one prompt, one step.
 *
 * Use: run_bundle BUNDLE [TARGET]. Writes the output of layer 0, a line for each row of each head.
 * TARGET "cuda", or a bundle with no other one, runs on the first GPU.
 */
#include <tvm/ffi/error.h>
#include <tvm_pagedkv/kv_cache.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "libraries.h"

namespace ffi = tvm::ffi;

namespace {

constexpr int64_t kPrompt = 37, kSequence = 7;

ffi::Tensor MakeTensor(ffi::Shape shape, DLDevice device) {
  const DLDataType dtype{kDLFloat, 32, 1};
  return tvm_pagedkv::Call("runtime.TVMTensorAllocWithScope", shape, dtype, device, nullptr)
      .cast<ffi::Tensor>();
}

void Run(const std::string& path, const ffi::Optional<ffi::String>& target) {
  const auto bundle = tvm_pagedkv::Bundle::Load(path, target);
  std::printf("target %s\n", bundle.target().c_str());

  // Capacities are free; all else is what the kernels were compiled for.
  const auto cache = bundle.CreateCache({{"max_total_tokens", 4096}});
  const DLDevice device = bundle.device();

  const auto layers = bundle.layers();
  const int64_t num_qo_heads = layers[0]["num_qo_heads"].cast<int64_t>();
  const int64_t num_kv_heads = layers[0]["num_kv_heads"].cast<int64_t>();
  const int64_t head_dim = layers[0]["qk_head_dim"].cast<int64_t>();
  ffi::Tensor qkv = MakeTensor({kPrompt, num_qo_heads + 2 * num_kv_heads, head_dim}, device);
  ffi::Tensor o = MakeTensor({kPrompt, num_qo_heads, head_dim}, device);
  std::vector<float> values(qkv.numel()), out(o.numel());
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(i * 7919 % 1009) / 512.0f - 1.0f;
  }
  tvm_pagedkv::Call("runtime.TVMTensorCopyFromBytes", qkv, static_cast<void*>(values.data()),
                    ffi::GetDataSize(qkv));

  cache.AddSequence(kSequence);
  cache.BeginForward({kSequence}, {kPrompt});
  const double scale = 1.0 / std::sqrt(static_cast<double>(head_dim));
  for (size_t layer = layers.size(); layer-- > 0;) {
    cache.Attention(static_cast<int64_t>(layer), scale, qkv, o);
  }
  cache.EndForward();

  tvm_pagedkv::Call("runtime.TVMTensorCopyToBytes", o, static_cast<void*>(out.data()),
                    ffi::GetDataSize(o));
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
