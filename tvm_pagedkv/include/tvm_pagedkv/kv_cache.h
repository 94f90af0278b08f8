// SPDX-License-Identifier: Apache-2.0
/*!
 * \file kv_cache.h
 * \brief The cache in C++: typed calls of the global functions of libtvm_pagedkv.so.
 *
 * Needs C++17 and the headers of tvm-ffi. The library must have been loaded, after
 * libtvm_runtime.so. Errors are thrown as `tvm::ffi::Error`; its kind is "ValueError", "KeyError",
 * "IndexError", "TypeError" or "RuntimeError". A call that fails leaves the cache unchanged.
 */
#ifndef TVM_PAGEDKV_KV_CACHE_H_
#define TVM_PAGEDKV_KV_CACHE_H_

#include <tvm/ffi/any.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <string>
#include <utility>

namespace tvm_pagedkv {

namespace ffi = tvm::ffi;

/*! \brief Calls a global function; throws where it is missing, as before the library is loaded. */
template <typename... Args>
ffi::Any Call(const char* name, Args&&... args) {
  return ffi::Function::GetGlobalRequired(name)(std::forward<Args>(args)...);
}

/*! \brief A paged KV cache. Copies refer to the same cache. One thread may call it at a time. */
class KVCache {
 public:
  using Map = ffi::Map<ffi::String, ffi::Any>;

  /*! \brief Wraps what a compiled model's function has created. */
  explicit KVCache(ffi::Any cache) : cache_(std::move(cache)) {}

  /*! \brief Creates a cache from a configuration and kernels by name, such as those of a bundle. */
  static KVCache Create(const Map& config, const ffi::Any& kernels, DLDevice device) {
    return KVCache(Call("pagedkv.create", config, kernels, device));
  }

  /*! \brief The object that the functions of compiled models take. */
  const ffi::Any& object() const { return cache_; }

  // --- sequences ---

  void Clear() const { Call("vm.builtin.kv_state_clear", cache_); }
  void AddSequence(int64_t seq_id) const {
    Call("vm.builtin.kv_state_add_sequence", cache_, seq_id);
  }
  void RemoveSequence(int64_t seq_id) const {
    Call("vm.builtin.kv_state_remove_sequence", cache_, seq_id);
  }
  /*! \param position The number of positions that the child has; -1: all of them. */
  void ForkSequence(int64_t parent_id, int64_t child_id, int64_t position = -1) const {
    Call("vm.builtin.kv_state_fork_sequence", cache_, parent_id, child_id, position);
  }
  /*! \brief Drops the last `n` positions. */
  void PopN(int64_t seq_id, int64_t n) const {
    Call("vm.builtin.kv_state_popn", cache_, seq_id, n);
  }
  /*! \brief Throws what PopN would throw, and changes nothing. */
  void CheckPop(int64_t seq_id, int64_t n) const { Call("pagedkv.check_pop", cache_, seq_id, n); }
  /*! \brief Lets a sequence keep its first `sinks` positions and its last ones. */
  void EnableSlidingWindow(int64_t seq_id, int64_t window, int64_t sinks) const {
    Call("vm.builtin.attention_kv_cache_enable_sliding_window_for_seq", cache_, seq_id, window,
         sinks);
  }

  // --- a step ---

  /*!
   * \brief Begins a step that appends `lengths[i]` rows to sequence `seq_ids[i]`.
   * \param tree_parents For token trees, the parent node of each row, -1 for a root.
   */
  void BeginForward(const ffi::Shape& seq_ids, const ffi::Shape& lengths,
                    const ffi::Optional<ffi::Shape>& tree_parents = {}) const {
    Call("vm.builtin.kv_state_begin_forward", cache_, seq_ids, lengths, tree_parents);
  }
  /*!
   * \brief Appends and attends in one layer.
   * \param sm_scale What scores are multiplied with, usually 1 / sqrt(head_dim).
   * \param qkv [rows, num_qo_heads + 2 * num_kv_heads, head_dim] in the dtype of the cache.
   * \param o [rows, num_qo_heads, head_dim], written.
   */
  void Attention(int64_t layer, double sm_scale, const ffi::Tensor& qkv,
                 const ffi::Tensor& o) const {
    Call("vm.builtin.attention_kv_cache_attention_with_fused_qkv", cache_, layer, sm_scale, qkv, o);
  }
  /*! \brief The position of each row of the step, int32 [rows]. */
  ffi::Tensor QueryPositions() const {
    return Call("vm.builtin.attention_kv_cache_get_query_positions", cache_).cast<ffi::Tensor>();
  }
  void EndForward() const { Call("vm.builtin.kv_state_end_forward", cache_); }
  /*! \brief Undoes the step that has begun. */
  void AbortForward() const { Call("pagedkv.abort_forward", cache_); }
  /*! \brief Keeps the path to an accepted node of each tree; leaf -1: keeps nothing of it. */
  void CommitTree(const ffi::Shape& seq_ids, const ffi::Shape& leaves) const {
    Call("vm.builtin.attention_kv_cache_commit_accepted_token_tree_nodes", cache_, seq_ids, leaves);
  }

  // --- what it holds ---

  int64_t SequenceLength(int64_t seq_id) const {
    return Call("vm.builtin.attention_kv_cache_get_sequence_length", cache_, seq_id)
        .cast<int64_t>();
  }
  int64_t TotalLength() const {
    return Call("vm.builtin.attention_kv_cache_get_total_sequence_length", cache_).cast<int64_t>();
  }
  int64_t NumAvailablePages() const {
    return Call("vm.builtin.attention_kv_cache_get_num_available_pages", cache_).cast<int64_t>();
  }
  bool IsEmpty() const { return Call("vm.builtin.attention_kv_cache_empty", cache_).cast<bool>(); }

 private:
  ffi::Any cache_;
};

/*! \brief A folder with compiled kernels. Loading runs its machine code: trust it as a program. */
class Bundle {
 public:
  /*! \param target One of the targets of the bundle; by default the best for this machine. */
  static Bundle Load(const std::string& folder, const ffi::Optional<ffi::String>& target = {}) {
    return Bundle(
        Call("pagedkv.load_bundle", ffi::String(folder), target, nullptr).cast<KVCache::Map>());
  }

  std::string target() const { return fields_["target"].cast<ffi::String>(); }
  DLDevice device() const { return fields_["device"].cast<DLDevice>(); }
  /*! \brief The configuration as `KVCache::Create` takes it; its capacities may be changed. */
  KVCache::Map config() const { return fields_["config"].cast<KVCache::Map>(); }
  /*! \brief The layers of the configuration: head counts and dimensions. */
  ffi::Array<KVCache::Map> layers() const {
    return config()["layers"].cast<ffi::Array<KVCache::Map>>();
  }

  /*! \param capacities Overrides, such as {"max_total_tokens", 4096}. */
  KVCache CreateCache(const KVCache::Map& capacities = {}) const {
    KVCache::Map changed = config();
    for (const auto& [name, value] : capacities) changed.Set(name, value);
    return KVCache::Create(changed, fields_["kernels"], device());
  }

 private:
  explicit Bundle(KVCache::Map fields) : fields_(std::move(fields)) {}

  KVCache::Map fields_;
};

}  // namespace tvm_pagedkv

#endif  // TVM_PAGEDKV_KV_CACHE_H_
