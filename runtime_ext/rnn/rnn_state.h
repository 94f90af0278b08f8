// SPDX-License-Identifier: Apache-2.0
/*!
 * \file rnn_state.h
 * \brief The RNN state that replaces apache-tvm's: whole states in pages, one snapshot a step.
 *
 * Storage of a layer's state is `[reserved_num_seqs, max_history, ...]`, as the kernels of models
 * take it. Page p is slot (p / max_history, p % max_history) of all of these tensors.
 *
 * \code
 * f_get(storage, seq_slots, history_slots, out)    // out[b] = storage[s[b], h[b]]
 * f_set(storage, seq_slots, history_slots, data)   // storage[s[b], (h[b] + 1) % H] = data[b]
 * \endcode
 */
#ifndef TVM_PAGEDKV_RNN_RNN_STATE_H_
#define TVM_PAGEDKV_RNN_RNN_STATE_H_

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/object.h>

#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "base/caller_guard.h"
#include "base/process.h"
#include "device/device_memory.h"
#include "device/device_stream.h"
#include "rnn/snapshot_table.h"
#include "step/step_phase.h"

namespace pagedkv {

/*! \brief What a model passes to vm.builtin.rnn_state_create. */
struct RNNStateConfig {
  int64_t num_layers;
  int64_t max_num_sequences;
  int64_t max_history;
  ffi::Array<ffi::Function> f_gets;     // for each state of a layer
  ffi::Array<ffi::Function> f_sets;     // likewise
  ffi::Array<ffi::Tensor> init_values;  // likewise; all layers begin with them

  /*! \throws Error (ValueError, TypeError) that names the argument. */
  void Check() const;
};

class RNNStateObj : public ffi::Object {
 public:
  explicit RNNStateObj(RNNStateConfig config);

  /*! \brief Makes a call as the only thread inside; see PagedKVCacheObj::Enter. */
  template <typename F>
  void Enter(F call) {
    process_.Require("RNN state");
    guard_.Enter();
    struct Leaving {
      CallerGuard* guard;
      ~Leaving() { guard->Leave(); }
    } leaving{&guard_};
    call();
  }

  // A call that throws Error has changed nothing.
  void Clear();
  void Add(int64_t id);
  void Remove(int64_t id);
  void Fork(int64_t parent_id, int64_t child_id, int64_t position);
  void PopN(int64_t id, int64_t count);
  bool CanFork(int64_t parent_id, int64_t position);
  bool CanPopN(int64_t id, int64_t count);
  /*! \param tree_parents Chains only: a state has one successor in a step. */
  void BeginForward(IntSpan ids, IntSpan append_lengths, std::optional<IntSpan> tree_parents);
  void EndForward();
  void AbortForward();
  bool IsInForward() const { return phase_.is_in_forward(); }

  /*! \brief Reads the states of the step's sequences, or what the step has set. */
  void Get(int64_t layer, int64_t state, const ffi::Tensor& out);
  void Set(int64_t layer, int64_t state, const ffi::Tensor& data);
  /*! \return A copy of the state at the end of a sequence. */
  ffi::Tensor DebugGet(int64_t layer, int64_t state, int64_t id);

  ffi::Map<ffi::String, ffi::Any> Stats() const;
  void CheckIntegrity() const;

  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("pagedkv.RNNState", RNNStateObj, ffi::Object);

 private:
  /*! \brief int32 [batch] on the device, in a buffer of its own as compiled kernels require. */
  struct SlotArray {
    ffi::Tensor host, device;
    StepView view{kInt32, {}};
  };
  enum SlotName { kReadSeq, kReadHistory, kWriteSeq, kWriteHistory, kBeforeWrite, kNumSlotArrays };

  int64_t num_states() const { return static_cast<int64_t>(config_.init_values.size()); }
  void RequireState(int64_t layer, int64_t state) const;
  void CheckBatch(const char* name, const ffi::Tensor& tensor, int64_t state) const;
  const ffi::Tensor& StorageOf(int64_t layer, int64_t state) const {
    return storages_[layer * num_states() + state];
  }
  int64_t PageBytes(int64_t state) const;
  /*! \brief Fills a page with the initial values. */
  void Initialize(int32_t page);
  /*! \brief Copies the states that the step has not set to the pages that it has written. */
  void CopyUnset();
  void UploadSlots();

  OwnProcess process_;
  CallerGuard guard_;
  StepPhase phase_;
  RNNStateConfig config_;
  DLDevice device_;
  ByteCounter counter_;
  StreamOrder order_;
  std::vector<ffi::Tensor> init_values_;  // copies
  std::vector<ffi::Tensor> storages_;     // [layer, state]
  std::array<SlotArray, kNumSlotArrays> slots_;
  SnapshotTable table_;
  std::vector<bool> is_set_;  // [layer, state], in the step
};

class RNNState : public ffi::ObjectRef {
 public:
  explicit RNNState(RNNStateConfig config)
      : ffi::ObjectRef(ffi::make_object<RNNStateObj>(std::move(config))) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(RNNState, ffi::ObjectRef, RNNStateObj);
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_RNN_RNN_STATE_H_
