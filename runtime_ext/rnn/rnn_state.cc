// SPDX-License-Identifier: Apache-2.0
/*!
 * \file rnn_state.cc
 * \brief The RNN state: steps, kernels and copies over the table of snapshots.
 */
#include "rnn/rnn_state.h"

#include <tvm/ffi/dtype.h>

#include <algorithm>

#include "base/error.h"
#include "device/tensor_checks.h"

namespace pagedkv {

namespace {

constexpr int64_t kMaxPages = INT32_MAX;

void RequirePositive(const char* name, int64_t value) {
  if (value < 1 || value > kMaxPages) {
    Raise(kValueError, name, " must be from 1 to ", kMaxPages, ", got ", value);
  }
}

/*! \brief Copies a contiguous tensor. */
ffi::Tensor Clone(const ffi::Tensor& tensor, const ByteCounter& counter) {
  ffi::Tensor copy = AllocateTensor(tensor.shape(), tensor.dtype(), tensor.device(), counter);
  CopyBytes(tensor, 0, copy, 0, tensor.numel() * ItemSize(tensor.dtype()),
            CurrentStream(tensor.device()));
  return copy;
}

}  // namespace

void RNNStateConfig::Check() const {
  RequirePositive("num_layers", num_layers);
  RequirePositive("reserved_num_seqs", max_num_sequences);
  RequirePositive("max_history", max_history);
  if (max_num_sequences > kMaxPages / max_history) {
    Raise(kValueError, "reserved_num_seqs * max_history must be at most ", kMaxPages);
  }
  if (init_values.empty()) Raise(kValueError, "a layer needs at least one state");
  if (f_gets.size() != init_values.size() || f_sets.size() != init_values.size()) {
    Raise(kValueError, "each of the ", init_values.size(),
          " initial values needs a function in f_gets and one in f_sets, got ", f_gets.size(),
          " and ", f_sets.size());
  }
  for (size_t i = 0; i < init_values.size(); ++i) {
    const ffi::Tensor& value = init_values[i];
    if (!f_gets[i].defined() || !f_sets[i].defined() || !value.defined()) {
      Raise(kTypeError, "f_gets, f_sets and init_values must have no None, but entry ", i, " is");
    }
    if (!value.IsContiguous()) Raise(kValueError, "initial value ", i, " must be contiguous");
    if (value.numel() == 0) Raise(kValueError, "initial value ", i, " must not be empty");
    if (value.dtype().lanes != 1 || value.dtype().bits % 8 != 0) {
      Raise(kValueError, "initial value ", i, " must be of whole bytes, got ",
            ffi::DLDataTypeToString(value.dtype()));
    }
    if (!IsSame(value.device(), init_values[0].device())) {
      Raise(kValueError, "all initial values must be on one device");
    }
  }
}

// The configuration is checked before anything is made from it.
RNNStateObj::RNNStateObj(RNNStateConfig config)
    : config_((config.Check(), std::move(config))),
      device_(config_.init_values[0].device()),
      counter_(std::make_shared<std::atomic<int64_t>>(0)),
      order_(device_),
      table_(config_.max_num_sequences, config_.max_history),
      is_set_(config_.num_layers * num_states()) {
  for (const ffi::Tensor& value : config_.init_values) {
    init_values_.push_back(Clone(value, counter_));
  }
  for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
    for (const ffi::Tensor& value : init_values_) {
      std::vector<int64_t> shape{config_.max_num_sequences, config_.max_history};
      shape.insert(shape.end(), value.shape().begin(), value.shape().end());
      storages_.push_back(
          AllocateTensor({shape.data(), shape.size()}, value.dtype(), device_, counter_));
    }
  }
  for (SlotArray& array : slots_) {
    array.host = AllocateTensor({config_.max_num_sequences}, kInt32, {kDLCPU, 0}, UncountedBytes());
    array.device = IsHost(device_)
                       ? array.host
                       : AllocateTensor({config_.max_num_sequences}, kInt32, device_, counter_);
  }
}

void RNNStateObj::Clear() {
  phase_.RequireIdle("clear");
  table_.Clear();
}

void RNNStateObj::Add(int64_t id) {
  phase_.RequireIdle("add_sequence");
  const StreamOrder::Call call(&order_);
  Initialize(table_.Add(id));
}

void RNNStateObj::Remove(int64_t id) {
  phase_.RequireIdle("remove_sequence");
  table_.Remove(id);
}

void RNNStateObj::Fork(int64_t parent_id, int64_t child_id, int64_t position) {
  phase_.RequireIdle("fork_sequence");
  const StreamOrder::Call call(&order_);
  const int32_t page = table_.Fork(parent_id, child_id, position);
  if (page != SnapshotTable::kNone) Initialize(page);
}

void RNNStateObj::PopN(int64_t id, int64_t count) {
  phase_.RequireIdle("pop_n");
  const StreamOrder::Call call(&order_);
  const int32_t page = table_.PopN(id, count);
  if (page != SnapshotTable::kNone) Initialize(page);
}

bool RNNStateObj::CanFork(int64_t parent_id, int64_t position) {
  phase_.RequireIdle("can_fork");
  return table_.CanFork(parent_id, position);
}

bool RNNStateObj::CanPopN(int64_t id, int64_t count) {
  phase_.RequireIdle("can_popn");
  return table_.CanPopN(id, count);
}

void RNNStateObj::BeginForward(IntSpan ids, IntSpan append_lengths,
                               std::optional<IntSpan> tree_parents) {
  phase_.RequireIdle("begin_forward");
  if (tree_parents) {
    size_t node = 0;
    for (size_t i = 0; i < append_lengths.size; ++i) {
      for (int64_t j = 0; j < append_lengths.data[i]; ++j, ++node) {
        if (node >= tree_parents->size || tree_parents->data[node] != j - 1) {
          Raise(kValueError, "an RNN state takes chains only: token ", j, " of sequence ",
                i < ids.size ? ids.data[i] : -1, " must have parent ", j - 1);
        }
      }
    }
    if (node != tree_parents->size) {
      Raise(kValueError, "the step has ", node, " tokens, but ", tree_parents->size, " parents");
    }
  }
  StepPhase::Change change(&phase_);
  const StreamOrder::Call call(&order_);
  table_.Begin(ids, append_lengths);
  try {
    UploadSlots();
    order_.BeginStep();
  } catch (...) {
    table_.Abort();
    throw;
  }
  std::fill(is_set_.begin(), is_set_.end(), false);
  change.BeginStep();
}

void RNNStateObj::EndForward() {
  phase_.RequireOpenStep("end_forward");
  const StreamOrder::Call call(&order_);
  CopyUnset();
  table_.End();
  order_.EndStep();
  phase_.EndStep();
}

void RNNStateObj::AbortForward() {
  phase_.RequireOpenStep("abort_forward");
  if (table_.HasWrittenInPlace()) {
    Raise(kValueError,
          "abort_forward is not possible after rnn_state_set when no page is left for the states "
          "before the step; call end_forward, then remove the sequences, or create the RNN state "
          "with max_history of at least 2");
  }
  const StreamOrder::Call call(&order_);
  table_.Abort();
  order_.EndStep();
  phase_.EndStep();
}

void RNNStateObj::Get(int64_t layer, int64_t state, const ffi::Tensor& out) {
  const StepPhase::Attending attending(&phase_, "rnn_state_get");
  RequireState(layer, state);
  CheckBatch("the output of rnn_state_get", out, state);
  const StreamOrder::Call call(&order_);
  const bool is_set = is_set_[layer * num_states() + state];
  config_.f_gets[state](StorageOf(layer, state), slots_[is_set ? kWriteSeq : kReadSeq].view.get(),
                        slots_[is_set ? kWriteHistory : kReadHistory].view.get(), out);
}

void RNNStateObj::Set(int64_t layer, int64_t state, const ffi::Tensor& data) {
  const StepPhase::Attending attending(&phase_, "rnn_state_set");
  RequireState(layer, state);
  CheckBatch("the data of rnn_state_set", data, state);
  const StreamOrder::Call call(&order_);
  table_.BeginWrite();
  config_.f_sets[state](StorageOf(layer, state), slots_[kWriteSeq].view.get(),
                        slots_[kBeforeWrite].view.get(), data);
  is_set_[layer * num_states() + state] = true;
}

ffi::Tensor RNNStateObj::DebugGet(int64_t layer, int64_t state, int64_t id) {
  phase_.RequireNotChanging("rnn_state_debug_get");
  RequireState(layer, state);
  const int32_t page = table_.Page(id);
  const StreamOrder::Call call(&order_);
  const ffi::Tensor& init = init_values_[state];
  ffi::Tensor copy = AllocateTensor(init.shape(), init.dtype(), device_, UncountedBytes());
  CopyBytes(StorageOf(layer, state), page * PageBytes(state), copy, 0, PageBytes(state),
            CurrentStream(device_));
  return copy;
}

ffi::Map<ffi::String, ffi::Any> RNNStateObj::Stats() const {
  const PagePool& pool = table_.pool();
  return {{"num_sequences", table_.num_sequences()},
          {"num_pages", int64_t{pool.num_pages()}},
          {"num_used_pages", int64_t{pool.num_used()}},
          {"num_cached_pages", int64_t{pool.num_cached()}},
          {"num_shared_pages", int64_t{pool.num_shared()}},
          {"num_evicted_pages", pool.num_reclaimed()},
          {"memory_bytes", counter_->load()}};
}

void RNNStateObj::CheckIntegrity() const { table_.CheckIntegrity(); }

void RNNStateObj::RequireState(int64_t layer, int64_t state) const {
  if (layer < 0 || layer >= config_.num_layers) {
    Raise(kIndexError, "layer ", layer, " is out of range: the RNN state has ", config_.num_layers,
          " layers");
  }
  if (state < 0 || state >= num_states()) {
    Raise(kIndexError, "state ", state, " is out of range: a layer has ", num_states(), " states");
  }
}

void RNNStateObj::CheckBatch(const char* name, const ffi::Tensor& tensor, int64_t state) const {
  if (!tensor.defined()) Raise(kTypeError, name, " must be a tensor, got None");
  const ffi::Tensor& init = init_values_[state];
  std::vector<int64_t> shape{static_cast<int64_t>(table_.step().size())};
  shape.insert(shape.end(), init.shape().begin(), init.shape().end());
  if (!std::equal(shape.begin(), shape.end(), tensor.shape().begin(), tensor.shape().end())) {
    Raise(kValueError, name, " must have shape ", ShapeText({shape.data(), shape.size()}), ", got ",
          ShapeText(tensor.shape()));
  }
  if (tensor.dtype() != init.dtype()) {
    Raise(kValueError, name, " must be ", ffi::DLDataTypeToString(init.dtype()), ", got ",
          ffi::DLDataTypeToString(tensor.dtype()));
  }
  if (!IsSame(tensor.device(), device_)) {
    Raise(kValueError, name, " must be on the RNN state's device");
  }
  if (!tensor.IsContiguous()) Raise(kValueError, name, " must be contiguous");
}

int64_t RNNStateObj::PageBytes(int64_t state) const {
  return init_values_[state].numel() * ItemSize(init_values_[state].dtype());
}

void RNNStateObj::Initialize(int32_t page) {
  for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
    for (int64_t state = 0; state < num_states(); ++state) {
      CopyBytes(init_values_[state], 0, StorageOf(layer, state), page * PageBytes(state),
                PageBytes(state), CurrentStream(device_));
    }
  }
}

void RNNStateObj::CopyUnset() {
  if (!table_.is_written()) return;
  for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
    for (int64_t state = 0; state < num_states(); ++state) {
      if (is_set_[layer * num_states() + state]) continue;
      for (const SnapshotTable::StepItem& item : table_.step()) {
        if (item.write == item.read) continue;
        CopyBytes(StorageOf(layer, state), item.read * PageBytes(state), StorageOf(layer, state),
                  item.write * PageBytes(state), PageBytes(state), CurrentStream(device_));
      }
    }
  }
}

void RNNStateObj::UploadSlots() {
  const std::vector<SnapshotTable::StepItem>& items = table_.step();
  const auto batch = static_cast<int64_t>(items.size());
  const auto history = static_cast<int32_t>(config_.max_history);
  std::array<int32_t*, kNumSlotArrays> rows;
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = static_cast<int32_t*>(slots_[i].host.data_ptr());
  }
  for (int64_t i = 0; i < batch; ++i) {
    rows[kReadSeq][i] = items[i].read / history;
    rows[kReadHistory][i] = items[i].read % history;
    rows[kWriteSeq][i] = items[i].write / history;
    rows[kWriteHistory][i] = items[i].write % history;
    // f_set writes the slot after the one that it gets.
    rows[kBeforeWrite][i] = (items[i].write % history + history - 1) % history;
  }
  void* stream = CurrentStream(device_);
  for (SlotArray& array : slots_) {
    if (!IsHost(device_)) {
      CopyBytes(array.host, 0, array.device, 0, batch * ItemSize(kInt32), stream);
    }
    array.view.Set(array.device, 0, batch);
  }
  // The next step overwrites the host's arrays.
  if (!IsHost(device_)) Synchronize(device_, stream);
}

}  // namespace pagedkv
