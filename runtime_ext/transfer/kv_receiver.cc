// SPDX-License-Identifier: Apache-2.0
/*!
 * \file kv_receiver.cc
 * \brief Positions of a sequence that another cache writes.
 */
#include "transfer/kv_receiver.h"

#include <utility>

#include "base/error.h"

namespace pagedkv {

ffi::Shape KVReceiver::Prepare(int64_t sequence_id, int64_t append_length) {
  step_->phase().RequireIdle("prepare_recv");
  Sequence& sequence = table_->At(sequence_id);
  if (sequence.send) {
    Raise(kValueError, "sequence ", sequence_id, " is being sent; it cannot receive as well");
  }
  const StreamOrder::Call on_stream(&step_->stream_order());
  const StepPhase::Change change(&step_->phase());
  ReceivePlan plan = receives_.Acquire(&sequence, append_length);
  ffi::Shape slots;  // as the caller gets it: what follows the commit must not allocate
  try {
    slots = ffi::Shape(EncodeSlotMap(receives_.SlotsOf(plan)));
    copier_->Copy(plan.copies);
    // Who writes to the slots knows no stream: kernels that use their pages must be done.
    const DLDevice device = step_->storage().device();
    if (HasStreams(device)) Synchronize(device, CurrentStream(device));
  } catch (...) {
    receives_.Release(plan);
    throw;
  }
  copier_->CountCommitted(plan.copies.size());
  // Rows come into pages that may have some. Until the receive ends, nobody else reads these.
  step_->bounds().Forget();
  receives_.Commit(std::move(plan), ++last_id_);
  return slots;
}

int64_t KVReceiver::IdOf(int64_t sequence_id) {
  step_->phase().RequireNotChanging("receive_id");
  const Sequence& sequence = table_->At(sequence_id);
  if (sequence.receive == nullptr || sequence.receive->is_in_step) return 0;
  receives_.HoldPages(sequence);
  return sequence.receive->id;
}

Sequence* KVReceiver::Find(int64_t sequence_id, int64_t receive_id, const char* what) {
  step_->phase().RequireNotChanging(what);
  Sequence& sequence = table_->At(sequence_id);
  if (sequence.receive == nullptr || sequence.receive->id != receive_id ||
      sequence.receive->is_in_step) {
    Raise(kValueError, what, ": receive ", receive_id, " of sequence ", sequence_id,
          " is not under way; the sequence was used, popped or removed since prepare_recv");
  }
  return &sequence;
}

ffi::Shape KVReceiver::Shorten(int64_t sequence_id, int64_t receive_id, IntSpan firsts) {
  Sequence* sequence = Find(sequence_id, receive_id, "shorten_receive");
  const std::vector<int64_t> wanted(firsts.data, firsts.data + firsts.size);
  const std::vector<int32_t> pages = receives_.Shorten(sequence, wanted);
  return ffi::Shape(std::vector<int64_t>(pages.begin(), pages.end()));
}

void KVReceiver::Finish(int64_t sequence_id, int64_t receive_id) {
  Sequence* sequence = Find(sequence_id, receive_id, "finish_receive");
  receives_.ReleasePages(receive_id);
  table_->FinishReceive(sequence);
}

void KVReceiver::Cancel(int64_t sequence_id, int64_t receive_id) {
  step_->phase().RequireNotChanging("cancel_receive");
  const bool was_held = receives_.ReleasePages(receive_id);
  auto it = table_->sequences().find(sequence_id);
  const bool is_receiving = it != table_->sequences().end() && it->second.receive != nullptr &&
                            it->second.receive->id == receive_id && !it->second.receive->is_in_step;
  if (was_held && !is_receiving) return;
  table_->CancelReceive(Find(sequence_id, receive_id, "cancel_receive"));
}

void KVReceiver::Release(int64_t receive_id) { receives_.ReleasePages(receive_id); }

}  // namespace pagedkv
