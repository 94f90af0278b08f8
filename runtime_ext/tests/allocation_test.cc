// SPDX-License-Identifier: Apache-2.0
/*!
 * \file allocation_test.cc
 * \brief A decode step allocates nothing: every allocation of the process is counted.
 *
 * The program's own malloc stands before that of the C library, for all libraries of the process,
 * so tensors and objects of the FFI count as well. Kernels that do nothing stand in.
 * Use: allocation_test path/to/libtvm_pagedkv.so
 */
#include <dlfcn.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

namespace {

std::atomic<bool> is_counting{false};
std::atomic<int64_t> num_allocations{0};

void Count() {
  if (is_counting) ++num_allocations;
}

}  // namespace

extern "C" {

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

void* malloc(size_t size) {
  Count();
  return __libc_malloc(size);
}
void* calloc(size_t count, size_t size) {
  Count();
  return __libc_calloc(count, size);
}
void* realloc(void* pointer, size_t size) {
  Count();
  return __libc_realloc(pointer, size);
}
void* memalign(size_t alignment, size_t size) {
  Count();
  return __libc_memalign(alignment, size);
}
void* aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }
int posix_memalign(void** pointer, size_t alignment, size_t size) {
  *pointer = memalign(alignment, size);
  return *pointer == nullptr ? ENOMEM : 0;
}

}  // extern "C"

namespace {

namespace ffi = tvm::ffi;
using Map = ffi::Map<ffi::String, ffi::Any>;

constexpr int64_t kBatch = 8, kHeads = 2, kDim = 8, kPageSize = 4, kContext = 37;
// Lists double their room when they are full: warm as long as it takes to have room for the rest.
constexpr int kNumWarmUps = 60, kNumSteps = 48;

struct HostAllocator {
  void AllocData(DLTensor* tensor) { tensor->data = std::calloc(1, ffi::GetDataSize(*tensor)); }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

ffi::Tensor Zeros(ffi::Shape shape, DLDataType dtype) {
  return ffi::Tensor::FromNDAlloc(HostAllocator(), shape, dtype, DLDevice{kDLCPU, 0});
}

/*! \brief A cache, its functions, and what a step of one row a sequence takes. */
class Steps {
 public:
  explicit Steps(const ffi::Array<ffi::Any>& layers, int64_t num_rows = 1, Map more = {})
      : num_layers_(static_cast<int64_t>(layers.size())) {
    ffi::Function nothing = ffi::Function::FromPacked([](ffi::PackedArgs, ffi::Any*) {});
    Map kernels;
    for (const char* name :
         {"rope_append", "prefill", "decode", "prefill_ragged", "prefill_sliding", "decode_sliding",
          "prefill_ragged_sliding", "prefill_shared", "tree_paged", "tree", "transpose_append",
          "transpose_append_mla", "mla_prefill", "mla_prefill_shared", "merge", "copy_single_page",
          "copy_pages", "compact_copy", "apply_sinks"}) {
      kernels.Set(name, nothing);
    }
    Map config{{"max_num_sequences", 4 * kBatch},
               {"max_total_tokens", 64 * 1024},
               {"prefill_chunk_size", 1024},
               {"page_size", kPageSize},
               {"dtype", "float32"},
               {"rope_mode", 2},
               {"layers", layers}};
    for (const auto& [name, value] : more) config.Set(name, value);
    cache = Get("pagedkv.create")(config, kernels, DLDevice{kDLCPU, 0});
    const int64_t total = kBatch * num_rows;
    q = Zeros({total, kHeads, kDim}, {kDLFloat, 32, 1});
    o = Zeros({total, kHeads, kDim}, {kDLFloat, 32, 1});
    qkv = Zeros({total, 3 * kHeads, kDim}, {kDLFloat, 32, 1});
    lse = Zeros({total, kHeads}, {kDLFloat, 32, 1});
    latent = Zeros({total, kDim}, {kDLFloat, 32, 1});
    sinks = Zeros({kHeads}, {kDLFloat, 32, 1});
    std::vector<int64_t> all;
    for (int64_t id = 0; id < kBatch; ++id) all.push_back(id);
    ids = ffi::Shape(all);
    lengths = ffi::Shape(std::vector<int64_t>(kBatch, num_rows));
  }

  static ffi::Function Get(const char* name) { return ffi::Function::GetGlobalRequired(name); }

  void Add(int64_t id, int64_t length) {
    Get("vm.builtin.kv_state_add_sequence")(cache, id);
    begin(cache, ffi::Shape{id}, ffi::Shape{length});
    end(cache);
  }
  void AddAll() {
    for (int64_t id = 0; id < kBatch; ++id) Add(id, kContext + id);
  }

  /*! \brief One row a sequence, in all layers. */
  void Decode() {
    begin(cache, ids, lengths);
    for (int64_t layer = 0; layer < num_layers_; ++layer) {
      attention(cache, layer, 1.0, qkv, o);
      attention_with_sinks(cache, layer, 1.0, qkv, sinks, o);
      cross_attention(cache, layer, 1.0, q, o, lse);
    }
    end(cache);
  }

  ffi::Any cache;
  ffi::Function begin = Get("vm.builtin.kv_state_begin_forward");
  ffi::Function end = Get("vm.builtin.kv_state_end_forward");
  ffi::Function attention = Get("vm.builtin.attention_kv_cache_attention_with_fused_qkv");
  ffi::Function attention_with_sinks = Get("pagedkv.attention_with_sinks");
  ffi::Function self_attention = Get("vm.builtin.attention_kv_cache_self_attention");
  ffi::Function cross_attention = Get("vm.builtin.attention_kv_cache_cross_attention");
  ffi::Function append_mla = Get("vm.builtin.attention_kv_cache_append_mla_kv");
  ffi::Function commit = Get("vm.builtin.attention_kv_cache_commit_accepted_token_tree_nodes");
  ffi::Tensor q, o, qkv, lse, latent, sinks;
  ffi::Shape ids, lengths;

 private:
  int64_t num_layers_;
};

Map Layer(const char* kind, int64_t window = 0) {
  Map layer{{"kind", kind},
            {"num_qo_heads", kHeads},
            {"num_kv_heads", kHeads},
            {"qk_head_dim", kDim},
            {"v_head_dim", kDim}};
  if (window > 0) layer.Set("window", window);
  return layer;
}

Map LatentLayer() {
  return {{"kind", "mla"}, {"num_qo_heads", kHeads}, {"qk_head_dim", kDim}, {"v_head_dim", kDim}};
}

/*! \brief Counts what `step` allocates once it has run some times; true when it is nothing. */
bool AllocatesNothing(const char* name, const std::function<void()>& step) {
  auto count = [&](int num_steps) {
    num_allocations = 0;
    is_counting = true;
    for (int i = 0; i < num_steps; ++i) step();
    is_counting = false;
    return num_allocations.load();
  };
  const int64_t num_first = count(kNumWarmUps);
  const int64_t num_steady = count(kNumSteps);
  std::printf("%s: %lld allocations in %d steps, %lld in the %d steps before\n", name,
              static_cast<long long>(num_steady), kNumSteps, static_cast<long long>(num_first),
              kNumWarmUps);
  return num_steady == 0 && num_first > 0;  // a counter that never counts proves nothing
}

bool PlainLayers() {
  Steps steps({Layer("mha")});
  steps.AddAll();
  return AllocatesNothing("plain layers", [&] { steps.Decode(); });
}

bool LayersWithWindows() {
  Steps steps({Layer("mha"), Layer("mha_sliding", 7), Layer("mha_sliding", 64)});
  steps.AddAll();
  return AllocatesNothing("layers with windows", [&] { steps.Decode(); });
}

bool LatentLayers() {
  Steps steps({LatentLayer()});
  steps.AddAll();
  return AllocatesNothing("latent layers", [&] {
    steps.begin(steps.cache, steps.ids, steps.lengths);
    steps.append_mla(steps.cache, 0, steps.latent);
    steps.cross_attention(steps.cache, 0, 1.0, steps.q, steps.o, steps.lse);
    steps.end(steps.cache);
  });
}

bool SharedPrefixes() {
  Steps steps({Layer("mha")});
  const int64_t root = kBatch, half = kBatch + 1;
  steps.Add(root, 100 * kPageSize);
  auto fork = Steps::Get("vm.builtin.kv_state_fork_sequence");
  fork(steps.cache, root, half, 50 * kPageSize);
  for (int64_t id = 0; id < kBatch; ++id) {
    fork(steps.cache, id % 2 == 0 ? root : half, id, -1);
  }
  Steps::Get("pagedkv.share_every_prefix")(steps.cache);
  return AllocatesNothing("shared prefixes", [&] { steps.Decode(); });
}

bool SequencesWithWindows() {
  Steps steps({Layer("mha")}, 1, {{"sliding_window", true}});
  steps.AddAll();
  auto enable = Steps::Get("vm.builtin.attention_kv_cache_enable_sliding_window_for_seq");
  for (int64_t id = 0; id < kBatch; id += 2) enable(steps.cache, id, 24, 5);
  return AllocatesNothing("sequences with windows", [&] { steps.Decode(); });
}

/*! \brief Three nodes a round, of which the first one is kept, or none. */
bool TokenTrees() {
  constexpr int64_t kNumNodes = 3;
  Steps steps({Layer("mha")}, kNumNodes);
  steps.AddAll();
  std::vector<int64_t> parents, leaves;
  for (int64_t id = 0; id < kBatch; ++id) {
    parents.insert(parents.end(), {-1, 0, 0});
    leaves.push_back(id % 2 == 0 ? 0 : -1);
  }
  const ffi::Shape tree(parents), kept(leaves);
  return AllocatesNothing("token trees", [&] {
    steps.begin(steps.cache, steps.ids, steps.lengths, tree);
    steps.attention(steps.cache, 0, 1.0, steps.qkv, steps.o);
    steps.end(steps.cache);
    is_counting = false;  // the commit is between steps
    steps.commit(steps.cache, steps.ids, kept);
    is_counting = true;
  });
}

/*! \brief In every step one sequence leaves, and another one takes its place. */
bool SequencesThatComeAndGo() {
  Steps steps({Layer("mha"), Layer("mha_sliding", 7)});
  steps.AddAll();
  auto remove = Steps::Get("vm.builtin.kv_state_remove_sequence");
  auto add = Steps::Get("vm.builtin.kv_state_add_sequence");
  const ffi::Shape prompt{kContext};
  std::vector<ffi::Shape> each;
  for (int64_t id = 0; id < kBatch; ++id) each.push_back(ffi::Shape{id});
  size_t next = 0;
  return AllocatesNothing("sequences that come and go", [&] {
    const ffi::Shape& one = each[next++ % each.size()];
    remove(steps.cache, one[0]);
    add(steps.cache, one[0]);
    steps.begin(steps.cache, one, prompt);
    steps.end(steps.cache);
    steps.Decode();
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 || dlopen(argv[1], RTLD_NOW) == nullptr) {
    std::fprintf(stderr, "use: allocation_test LIBRARY; %s\n", argc == 2 ? dlerror() : "");
    return 2;
  }
  bool is_right = true;
  for (auto test : {PlainLayers, LayersWithWindows, LatentLayers, SharedPrefixes,
                    SequencesWithWindows, TokenTrees, SequencesThatComeAndGo}) {
    is_right = test() && is_right;
  }
  return is_right ? 0 : 1;
}
