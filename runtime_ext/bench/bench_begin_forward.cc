// SPDX-License-Identifier: Apache-2.0
/*!
 * \file bench_begin_forward.cc
 * \brief Time of begin_forward and end_forward of a decode step as a C++ program sees them, through
 * the global functions.
 *
 * Kernels that do nothing stand in, and calls of layers are not timed: only the planning, the
 * arrays and the end of a step are. Sequences begin at different offsets in their pages, so each
 * step crosses some page boundaries.
 *
 *     same   the same sequences in each step
 *     churn  between two steps one sequence in a hundred is replaced by a new one with its context
 *
 * With `tokens`, the tokens of all rows are recorded, and recording those of a step is timed too.
 * With `cold`, other memory is read before each call, as a model does it.
 * Use: bench_begin_forward [batch = 64] [context = 2048] [page_size = 16] [same | churn]
 *   [tokens] [cold]
 */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/device.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace ffi = tvm::ffi;

namespace {

struct Options {
  int64_t batch = 64, context = 2048, page_size = 16;
  std::string change = "same";
  bool has_tokens = false, is_cold = false;

  Options(int argc, char** argv) {
    if (argc > 1) batch = std::atoll(argv[1]);
    if (argc > 2) context = std::atoll(argv[2]);
    if (argc > 3) page_size = std::atoll(argv[3]);
    for (int i = 4; i < argc; ++i) {
      const std::string word = argv[i];
      if (word == "tokens") {
        has_tokens = true;
      } else if (word == "cold") {
        is_cold = true;
      } else {
        change = word;
      }
    }
  }
  /*! \brief Fewer in large batches, whose sequences would grow far beyond their context. */
  int64_t num_steps() const { return std::clamp<int64_t>(1000000 / batch, 240, 2000); }
};

constexpr int64_t kDim = 8;

struct HostAllocator {
  void AllocData(DLTensor* tensor) { tensor->data = std::calloc(1, ffi::GetDataSize(*tensor)); }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

ffi::Tensor Zeros(ffi::Shape shape) {
  return ffi::Tensor::FromNDAlloc(HostAllocator(), shape, {kDLFloat, 16, 1}, DLDevice{kDLCPU, 0});
}

ffi::Any MakeCache(const Options& options) {
  using Map = ffi::Map<ffi::String, ffi::Any>;
  ffi::Function nothing = ffi::Function::FromPacked([](ffi::PackedArgs, ffi::Any*) {});
  Map kernels;
  for (const char* name : {"rope_append", "prefill", "decode", "copy_single_page"}) {
    kernels.Set(name, nothing);
  }
  Map layer{{"kind", "mha"}, {"num_qo_heads", 1}, {"num_kv_heads", 1}, {"qk_head_dim", kDim}};
  const int64_t length = options.context + options.num_steps() + 4 * options.page_size;
  Map config{{"max_num_sequences", options.batch},
             {"max_total_tokens", options.batch * length},
             {"prefill_chunk_size", std::max(options.batch, options.context)},
             {"page_size", options.page_size},
             {"dtype", "float16"},
             {"rope_mode", 1},
             {"layers", ffi::Array<ffi::Any>{layer}}};
  return ffi::Function::GetGlobalRequired("pagedkv.create")(config, kernels, DLDevice{kDLCPU, 0});
}

class Bench {
 public:
  explicit Bench(const Options& options)
      : options_(options),
        cache_(MakeCache(options)),
        other_memory_(options.is_cold ? 1 << 24 : 0) {
    for (int64_t i = 0; i < options.batch; ++i) ids_.push_back(AddSequence());
    lengths_ = ffi::Shape(std::vector<int64_t>(options.batch, 1));
  }

  void Run() {
    const int64_t num_warm_ups = 32;
    for (int64_t step = 0; step < options_.num_steps() + num_warm_ups; ++step) {
      Change(step);
      const ffi::Shape ids(ids_);
      const double begin_us = Time([&] {
        begin_(cache_, ids, lengths_);
        if (options_.has_tokens) record_(cache_, ids);
      });
      CallLayer(options_.batch);
      const double end_us = Time([&] { end_(cache_); });
      if (step < num_warm_ups) continue;
      begins_.push_back(begin_us);
      ends_.push_back(end_us);
      sums_.push_back(begin_us + end_us);
    }
  }

  void Print() {
    for (auto* times : {&begins_, &ends_, &sums_}) std::sort(times->begin(), times->end());
    const size_t count = sums_.size();
    const double mean = std::accumulate(sums_.begin(), sums_.end(), 0.0) / count;
    std::printf(
        "begin_forward + end_forward  cpu  B=%lld  context=%lld  page=%lld  %s%s%s  "
        "min %.2f us  median %.2f us  (begin %.2f, end %.2f)  mean %.2f us  p99 %.2f us  of %d\n",
        static_cast<long long>(options_.batch), static_cast<long long>(options_.context),
        static_cast<long long>(options_.page_size), options_.change.c_str(),
        options_.has_tokens ? " tokens" : "", options_.is_cold ? " cold" : "", sums_.front(),
        sums_[count / 2], begins_[count / 2], ends_[count / 2], mean, sums_[count * 99 / 100],
        static_cast<int>(count));
  }

 private:
  int64_t AddSequence() {
    const int64_t id = next_id_++;
    const int64_t length = std::max<int64_t>(options_.context - id % options_.page_size, 1);
    add_(cache_, id);
    begin_(cache_, ffi::Shape{id}, ffi::Shape{length});
    if (options_.has_tokens) record_(cache_, ffi::Shape(std::vector<int64_t>(length, id)));
    CallLayer(length);
    end_(cache_);
    return id;
  }

  /*! \brief The rows of a step count as written. */
  void CallLayer(int64_t num_rows) {
    auto [it, is_new] = tensors_.try_emplace(num_rows);
    auto& [qkv, o] = it->second;
    if (is_new) {
      qkv = Zeros({num_rows, 3, kDim});
      o = Zeros({num_rows, 1, kDim});
    }
    attention_(cache_, 0, 1.0, qkv, o);
  }

  /*! \brief What happens to the cache before a step. */
  void Change(int64_t step) {
    if (options_.change != "churn") return;
    const int64_t count = std::max<int64_t>(options_.batch / 100, 1);
    for (int64_t i = 0; i < count; ++i) {
      int64_t& id = ids_[(step * count + i) % options_.batch];
      remove_(cache_, id);
      id = AddSequence();
    }
  }

  template <typename F>
  double Time(F f) {
    for (int32_t& number : other_memory_) ++number;
    const auto start = std::chrono::steady_clock::now();
    f();
    const auto stop = std::chrono::steady_clock::now();
    return std::chrono::duration<double, std::micro>(stop - start).count();
  }

  static ffi::Function Get(const char* name) { return ffi::Function::GetGlobalRequired(name); }

  Options options_;
  ffi::Any cache_;
  ffi::Function add_ = Get("vm.builtin.kv_state_add_sequence");
  ffi::Function remove_ = Get("vm.builtin.kv_state_remove_sequence");
  ffi::Function begin_ = Get("vm.builtin.kv_state_begin_forward");
  ffi::Function end_ = Get("vm.builtin.kv_state_end_forward");
  ffi::Function attention_ = Get("vm.builtin.attention_kv_cache_attention_with_fused_qkv");
  ffi::Function record_ = Get("pagedkv.prefix_record_step");
  std::map<int64_t, std::pair<ffi::Tensor, ffi::Tensor>> tensors_;  // by number of rows
  int64_t next_id_ = 0;
  std::vector<int64_t> ids_;
  ffi::Shape lengths_;
  std::vector<int32_t> other_memory_;
  std::vector<double> begins_, ends_, sums_;
};

}  // namespace

int main(int argc, char** argv) {
  Bench bench{Options(argc, argv)};
  bench.Run();
  bench.Print();
  return 0;
}
