// SPDX-License-Identifier: Apache-2.0
/*!
 * \file main.cc
 * \brief Every call of the installed header that needs no kernels of trees.
 *
 * Use: consumer BUNDLE. Prints the attention of one row beside the V that it must equal.
 */
#include <tvm/ffi/error.h>
#include <tvm_pagedkv/kv_cache.h>

#include <cstdio>
#include <vector>

namespace ffi = tvm::ffi;

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const auto bundle = tvm_pagedkv::Bundle::Load(argv[1]);
  const auto cache = bundle.CreateCache({{"max_total_tokens", 64}});
  const auto layers = bundle.layers();
  const auto num_qo_heads = layers[0]["num_qo_heads"].cast<int64_t>();
  const auto num_kv_heads = layers[0]["num_kv_heads"].cast<int64_t>();
  const auto head_dim = layers[0]["qk_head_dim"].cast<int64_t>();
  auto make = [&](ffi::Shape shape) {
    return tvm_pagedkv::Call("runtime.TVMTensorAllocWithScope", shape, DLDataType{kDLFloat, 32, 1},
                             bundle.device(), nullptr)
        .cast<ffi::Tensor>();
  };
  ffi::Tensor qkv = make({1, num_qo_heads + 2 * num_kv_heads, head_dim});
  ffi::Tensor o = make({1, num_qo_heads, head_dim});
  auto* values = static_cast<float*>(qkv.data_ptr());
  for (int64_t i = 0; i < qkv.numel(); ++i) values[i] = static_cast<float>(i % 17);

  cache.AddSequence(0);
  cache.BeginForward({0}, {1});
  std::printf("position %d\n", static_cast<int32_t*>(cache.QueryPositions().data_ptr())[0]);
  cache.AbortForward();
  cache.BeginForward({0}, {1});
  for (int64_t layer = 0; layer < static_cast<int64_t>(layers.size()); ++layer) {
    cache.Attention(layer, 0.125, qkv, o);
  }
  cache.EndForward();
  // A row that sees only itself: its output is its V.
  const float expected = values[(num_qo_heads + num_kv_heads) * head_dim + 1];
  std::printf("o %g %g\n", static_cast<float*>(o.data_ptr())[1], expected);
  cache.ForkSequence(0, 1);
  std::printf("lengths %d %d\n", static_cast<int>(cache.SequenceLength(1)),
              static_cast<int>(cache.TotalLength()));
  cache.PopN(1, 1);
  cache.RemoveSequence(0);
  try {
    cache.AddSequence(1);
  } catch (const ffi::Error& error) {
    std::printf("%s\n", error.kind().c_str());
  }
  cache.Clear();
  std::printf("empty %d, pages %d\n", cache.IsEmpty(), static_cast<int>(cache.NumAvailablePages()));
  return 0;
}
