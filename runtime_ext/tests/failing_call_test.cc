// SPDX-License-Identifier: Apache-2.0
/*!
 * \file failing_call_test.cc
 * \brief Calls of transfers in which one allocation fails have changed nothing, and work again.
 *
 * The program's own operator new stands before that of the C++ library, for the library under test
 * as well. Each allocation of a call fails in a run of its own. Kernels that do nothing stand in.
 * Use: failing_call_test path/to/libtvm_pagedkv.so
 */
#include <dlfcn.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "failing_memory.h"

namespace pagedkv {

thread_local int64_t allocations_until_failure = -1;

}  // namespace pagedkv

void* operator new(size_t size) {
  int64_t& left = pagedkv::allocations_until_failure;
  if (left >= 0 && left-- == 0) throw std::bad_alloc();
  if (void* memory = std::malloc(size > 0 ? size : 1)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

namespace ffi = tvm::ffi;
using Map = ffi::Map<ffi::String, ffi::Any>;

constexpr int64_t kHeads = 2, kDim = 8, kRows = 8, kPeer = 7;
constexpr int64_t kMaxAllocations = 1000;  // of a call

ffi::Function Get(const char* name) { return ffi::Function::GetGlobalRequired(name); }

void Require(bool is_so, const char* what) {
  if (is_so) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}
#define REQUIRE(condition) Require(condition, #condition)

/*! \return Whether `call` succeeded; false when its allocation number `index` failed. */
template <typename F>
bool Succeeds(int64_t index, F call) {
  pagedkv::allocations_until_failure = index;
  bool succeeds = true;
  try {
    call();
  } catch (const std::exception&) {  // the FFI makes an error of std::bad_alloc
    succeeds = false;
  }
  pagedkv::allocations_until_failure = -1;
  return succeeds;
}

struct Cache {
  Cache() {
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
    cache = Get("pagedkv.create")(config, kernels, DLDevice{kDLCPU, 0});
  }

  void Add(int64_t id) { Get("vm.builtin.kv_state_add_sequence")(cache, id); }
  void Begin(ffi::Shape ids, ffi::Shape lengths) {
    Get("vm.builtin.kv_state_begin_forward")(cache, ids, lengths);
  }
  /*! \brief Appends to the only layer. */
  void Attend(int64_t num_rows) {
    struct Allocator {
      void AllocData(DLTensor* tensor) { tensor->data = std::calloc(1, ffi::GetDataSize(*tensor)); }
      void FreeData(DLTensor* tensor) { std::free(tensor->data); }
    };
    const DLDevice cpu{kDLCPU, 0};
    const DLDataType type{kDLFloat, 32, 1};
    auto qkv = ffi::Tensor::FromNDAlloc(Allocator(), {num_rows, 3 * kHeads, kDim}, type, cpu);
    auto o = ffi::Tensor::FromNDAlloc(Allocator(), {num_rows, kHeads, kDim}, type, cpu);
    Get("vm.builtin.attention_kv_cache_attention_with_fused_qkv")(cache, 0, 1.0, qkv, o);
  }
  void End() { end(cache); }
  int64_t Length(int64_t id) {
    return Get("vm.builtin.attention_kv_cache_get_sequence_length")(cache, id).cast<int64_t>();
  }
  int64_t NumAvailable() {
    return Get("vm.builtin.attention_kv_cache_get_num_available_pages")(cache).cast<int64_t>();
  }
  void Check() { Get("pagedkv.check_integrity")(cache); }

  ffi::Any cache;
  ffi::Function end = Get("vm.builtin.kv_state_end_forward");
  ffi::Function prepare = Get("vm.builtin.kv_cache_disagg_prepare_recv");
};

/*! \brief A receive that shares its last page, so that it takes pages and copies. */
int64_t Receives() {
  for (int64_t i = 0; i < kMaxAllocations; ++i) {
    Cache target;
    target.Add(0);
    target.Begin(ffi::Shape{0}, ffi::Shape{9});
    target.Attend(9);
    target.End();
    Get("vm.builtin.kv_state_fork_sequence")(target.cache, 0, 1, -1);
    const int64_t num_available = target.NumAvailable();
    const bool succeeds = Succeeds(i, [&] { target.prepare(target.cache, 1, 9); });
    target.Check();
    if (succeeds) {
      REQUIRE(target.NumAvailable() < num_available);
      return i;
    }
    REQUIRE(target.NumAvailable() == num_available && target.Length(1) == 9);
    target.prepare(target.cache, 1, 9);  // as if nothing had been tried
    target.Check();
  }
  return -1;
}

/*! \brief The end of a step whose rows of two sequences are sent. */
int64_t Sends() {
  for (int64_t i = 0; i < kMaxAllocations; ++i) {
    Cache source, target;
    std::vector<int64_t> blocks;
    blocks.reserve(16);
    const ffi::Function handler = ffi::Function::FromPacked(
        [&blocks](ffi::PackedArgs args, ffi::Any*) { blocks.push_back(args[0].cast<int64_t>()); });
    Get("pagedkv.set_send_handler")(source.cache, kPeer, handler, ffi::Shape{4096});
    for (int64_t id : {0, 1}) {
      source.Add(id);
      target.Add(id);
      const auto slots = target.prepare(target.cache, id, 2 * kRows).cast<ffi::Shape>();
      Get("vm.builtin.kv_cache_disagg_mark_send")(source.cache, id, 0, slots, kPeer);
    }
    source.Begin(ffi::Shape{0, 1}, ffi::Shape{kRows, kRows});
    source.Attend(2 * kRows);
    const bool succeeds = Succeeds(i, [&] { source.End(); });
    if (!succeeds) {
      REQUIRE(blocks.empty());
      source.End();  // the step is still open
    }
    source.Check();
    REQUIRE(blocks.size() == 2);  // each row is announced, and once
    for (int64_t id : {0, 1}) {
      const auto block = Get("pagedkv.send_block")(source.cache, blocks[id]).cast<Map>();
      REQUIRE(block["sequence_id"].cast<int64_t>() == id && block["begin"].cast<int64_t>() == 0);
      REQUIRE(block["end"].cast<int64_t>() == kRows);
    }
    if (succeeds) return i;
  }
  return -1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 || dlopen(argv[1], RTLD_NOW) == nullptr) {
    std::fprintf(stderr, "use: failing_call_test LIBRARY; %s\n", argc == 2 ? dlerror() : "");
    return 2;
  }
  const int64_t receives = Receives(), sends = Sends();
  std::printf("allocations that failed: %lld of a receive, %lld of a step that sends\n",
              static_cast<long long>(receives), static_cast<long long>(sends));
  return receives > 0 && sends > 0 ? 0 : 1;  // one that allocates nothing proves nothing
}
