// SPDX-License-Identifier: Apache-2.0
/*!
 * \file thread_test.cc
 * \brief Threads on one cache and on several, to be run under ThreadSanitizer.
 *
 * Kernels that do nothing stand in. Use: thread_test path/to/libtvm_pagedkv.so
 */
#include <dlfcn.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace {

namespace ffi = tvm::ffi;
using Map = ffi::Map<ffi::String, ffi::Any>;

constexpr int kNumThreads = 4, kNumRounds = 2000;
constexpr int64_t kHeads = 2, kDim = 8;

struct HostAllocator {
  void AllocData(DLTensor* tensor) { tensor->data = std::calloc(1, ffi::GetDataSize(*tensor)); }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

ffi::Tensor Zeros(ffi::Shape shape) {
  return ffi::Tensor::FromNDAlloc(HostAllocator(), shape, DLDataType{kDLFloat, 32, 1},
                                  DLDevice{kDLCPU, 0});
}

/*! \brief The functions of caches, looked up before there are threads. */
struct Functions {
  static ffi::Function Get(const char* name) { return ffi::Function::GetGlobalRequired(name); }

  ffi::Function create = Get("pagedkv.create");
  ffi::Function add = Get("vm.builtin.kv_state_add_sequence");
  ffi::Function remove = Get("vm.builtin.kv_state_remove_sequence");
  ffi::Function fork = Get("vm.builtin.kv_state_fork_sequence");
  ffi::Function begin = Get("vm.builtin.kv_state_begin_forward");
  ffi::Function end = Get("vm.builtin.kv_state_end_forward");
  ffi::Function abort = Get("pagedkv.abort_forward");
  ffi::Function attention = Get("vm.builtin.attention_kv_cache_attention_with_fused_qkv");
  ffi::Function length = Get("vm.builtin.attention_kv_cache_get_sequence_length");
  ffi::Function check = Get("pagedkv.check_integrity");
  ffi::Function set_handler = Get("pagedkv.set_send_handler");
  ffi::Function drop_handler = Get("pagedkv.drop_send_handler");
};

ffi::Any MakeCache(const Functions& f) {
  ffi::Function nothing = ffi::Function::FromPacked([](ffi::PackedArgs, ffi::Any*) {});
  Map kernels;
  for (const char* name : {"rope_append", "prefill", "decode", "transpose_append", "split_rotary",
                           "copy_single_page"}) {
    kernels.Set(name, nothing);
  }
  Map layer{{"kind", "mha"},       {"num_qo_heads", kHeads}, {"num_kv_heads", kHeads},
            {"qk_head_dim", kDim}, {"v_head_dim", kDim},     {"rope_theta", 1e4},
            {"rope_scale", 1.0}};
  Map config{{"max_num_sequences", 64},
             {"max_total_tokens", 4096},
             {"prefill_chunk_size", 256},
             {"page_size", 4},
             {"dtype", "float32"},
             {"rope_mode", 0},
             {"layers", ffi::Array<ffi::Any>{layer}}};
  return f.create(config, kernels, DLDevice{kDLCPU, 0});
}

std::atomic<int64_t> num_refused{0}, num_failed{0};

/*! \brief Makes a call until no other thread is in its way; other errors count as failures. */
void Insist(const std::function<void()>& call) {
  while (true) {
    try {
      return call();
    } catch (const ffi::Error& error) {
      if (std::string(error.what()).find("another thread is inside") == std::string::npos) {
        std::fprintf(stderr, "%s\n", error.what());
        ++num_failed;
        return;
      }
      ++num_refused;
    }
  }
}

void RunThreads(const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kNumThreads; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
}

/*! \brief One cache: forks, removals, steps and handlers that come and go, from all threads. */
bool OneCache(const Functions& f) {
  ffi::Any cache = MakeCache(f);
  f.add(cache, 0);
  f.begin(cache, ffi::Shape{0}, ffi::Shape{9});
  f.end(cache);
  const ffi::Function handler = ffi::Function::FromPacked([](ffi::PackedArgs, ffi::Any*) {});
  RunThreads([&](int me) {
    const int64_t own = 1 + me;
    for (int i = 0; i < kNumRounds; ++i) {
      Insist([&] { f.fork(cache, 0, own, 1 + i % 9); });
      Insist([&] { f.remove(cache, own); });
      Insist([&] { f.set_handler(cache, own, handler, ffi::Shape{64}); });
      f.drop_handler(cache, own);  // as a finalizer does, at any moment
      if (i % 8 == 0) Insist([&] { f.check(cache); });
    }
  });
  f.check(cache);
  return f.length(cache, 0).cast<int64_t>() == 9;
}

/*! \brief A cache for each thread. */
bool SeveralCaches(const Functions& f) {
  std::vector<ffi::Any> caches;
  for (int i = 0; i < kNumThreads; ++i) caches.push_back(MakeCache(f));
  const int64_t refused_before = num_refused;
  RunThreads([&](int me) {
    const ffi::Any& cache = caches[me];
    const ffi::Tensor qkv = Zeros({2, 3 * kHeads, kDim}), o = Zeros({2, kHeads, kDim});
    for (int i = 0; i < kNumRounds; ++i) {
      Insist([&] {
        f.add(cache, 0);
        f.begin(cache, ffi::Shape{0}, ffi::Shape{2});
        f.attention(cache, 0, 1.0, qkv, o);
        i % 3 == 0 ? f.abort(cache) : f.end(cache);
        f.fork(cache, 0, 1, -1);
        f.begin(cache, ffi::Shape{1, 0}, ffi::Shape{1, 1});
        f.attention(cache, 0, 1.0, qkv, o);
        f.end(cache);
        f.check(cache);
        f.remove(cache, 0);
        f.remove(cache, 1);
      });
    }
  });
  return num_refused == refused_before;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 || dlopen(argv[1], RTLD_NOW) == nullptr) {
    std::fprintf(stderr, "use: thread_test LIBRARY; %s\n", argc == 2 ? dlerror() : "");
    return 2;
  }
  const Functions functions;
  const bool is_right = OneCache(functions) && SeveralCaches(functions) && num_failed == 0;
  std::printf("%s; %lld calls refused\n", is_right ? "ok" : "failed",
              static_cast<long long>(num_refused));
  return is_right ? 0 : 1;
}
