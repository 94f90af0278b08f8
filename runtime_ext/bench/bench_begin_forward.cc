// SPDX-License-Identifier: Apache-2.0
/*!
 * \file bench_begin_forward.cc
 * \brief Time of one begin_forward as a C++ program sees it, through the global functions.
 *
 * Kernels that do nothing stand in: only the planning and the arrays are timed.
 * With `tokens`, the tokens of all rows are recorded, and recording those of a step is timed too.
 * Use: bench_begin_forward [batch = 64] [context = 2048] [page_size = 16] [tokens]
 */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/device.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace ffi = tvm::ffi;

namespace {

ffi::Any MakeCache(int64_t batch, int64_t context, int64_t page_size) {
  using Map = ffi::Map<ffi::String, ffi::Any>;
  ffi::Function nothing = ffi::Function::FromPacked([](ffi::PackedArgs, ffi::Any*) {});
  Map kernels;
  for (const char* name : {"rope_append", "prefill", "decode", "copy_single_page"}) {
    kernels.Set(name, nothing);
  }
  Map layer{{"kind", "mha"}, {"num_qo_heads", 1}, {"num_kv_heads", 1}, {"qk_head_dim", 8}};
  Map config{{"max_num_sequences", batch},
             {"max_total_tokens", batch * (context + 4096)},
             {"prefill_chunk_size", std::max(batch, context)},
             {"page_size", page_size},
             {"dtype", "float16"},
             {"rope_mode", 1},
             {"layers", ffi::Array<ffi::Any>{layer}}};
  return ffi::Function::GetGlobalRequired("pagedkv.create")(config, kernels, DLDevice{kDLCPU, 0});
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t batch = argc > 1 ? std::atoll(argv[1]) : 64;
  const int64_t context = argc > 2 ? std::atoll(argv[2]) : 2048;
  const int64_t page_size = argc > 3 ? std::atoll(argv[3]) : 16;
  const bool has_tokens = argc > 4;
  constexpr int kNumSteps = 2000;

  ffi::Any cache = MakeCache(batch, context, page_size);
  auto add = ffi::Function::GetGlobalRequired("vm.builtin.kv_state_add_sequence");
  auto begin = ffi::Function::GetGlobalRequired("vm.builtin.kv_state_begin_forward");
  auto end = ffi::Function::GetGlobalRequired("vm.builtin.kv_state_end_forward");
  auto record = ffi::Function::GetGlobalRequired("pagedkv.prefix_record_step");
  std::vector<int64_t> ids;
  for (int64_t id = 0; id < batch; ++id) {
    add(cache, id);
    begin(cache, ffi::Shape{id}, ffi::Shape{context});
    if (has_tokens) record(cache, ffi::Shape(std::vector<int64_t>(context, id)));
    end(cache);
    ids.push_back(id);
  }
  ffi::Shape sequence_ids(ids), append_lengths(std::vector<int64_t>(batch, 1));
  std::vector<double> times_us;
  for (int step = 0; step < kNumSteps; ++step) {
    auto start = std::chrono::steady_clock::now();
    begin(cache, sequence_ids, append_lengths);
    if (has_tokens) record(cache, sequence_ids);
    auto stop = std::chrono::steady_clock::now();
    end(cache);
    times_us.push_back(std::chrono::duration<double, std::micro>(stop - start).count());
  }
  std::sort(times_us.begin(), times_us.end());
  std::printf(
      "begin_forward  cpu  B=%lld  context=%lld  page=%lld  min %.2f us  median %.2f us  "
      "p99 %.2f us  of %d\n",
      static_cast<long long>(batch), static_cast<long long>(context),
      static_cast<long long>(page_size), times_us.front(), times_us[kNumSteps / 2],
      times_us[kNumSteps * 99 / 100], kNumSteps);
  return 0;
}
