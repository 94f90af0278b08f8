// SPDX-License-Identifier: Apache-2.0
/*!
 * \file send_receive.cc
 * \brief The cache object: K and V of a sequence to and from other caches.
 *
 * The cache itself moves nothing. The sender's cache calls the handler of the peer with the id of a
 * block when rows are ready, and keeps the block's pages until it is released; whoever has the
 * handler tells the other side, which reads the pages by its own means and writes to the slots that
 * it has taken.
 */
#include <cstring>
#include <exception>
#include <limits>
#include <string>
#include <utility>

#include "base/error.h"
#include "ffi/paged_kv_cache.h"

namespace pagedkv {

using StringMap = ffi::Map<ffi::String, ffi::Any>;

namespace {

constexpr DLDevice kCPU{kDLCPU, 0};
constexpr DLDataType kInt64{kDLInt, 64, 1};

ffi::Shape EncodeSlotMap(const std::vector<SlotRuns>& groups) {
  std::vector<int64_t> numbers;
  for (const SlotRuns& runs : groups) {
    numbers.push_back(static_cast<int64_t>(runs.size()));
    for (const SlotRun& run : runs) numbers.insert(numbers.end(), {run.slot, run.length});
  }
  return ffi::Shape(numbers);
}

int64_t NumBytes(const ffi::Tensor& tensor) {
  return tensor.numel() * (tensor.dtype().bits * tensor.dtype().lanes / 8);
}

/*! \brief The first byte of a tensor on the CPU. */
char* Bytes(const ffi::Tensor& tensor) {
  return static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset();
}

}  // namespace

/*! \brief Between begin_forward and end_forward is fine: no step uses what a transfer lets go. */
void PagedKVCacheObj::RequireNotPlanning(const char* what) const {
  if (phase_ == Phase::kPlanning) {
    Raise(kValueError, what, " is not possible while the cache changes its pages");
  }
}

ffi::Shape PagedKVCacheObj::DisaggPrepareRecv(int64_t sequence_id, int64_t append_length) {
  RequireIdle("prepare_recv");
  Sequence& sequence = table_.At(sequence_id);
  if (sequence.send) {
    Raise(kValueError, "sequence ", sequence_id, " is being sent; it cannot receive as well");
  }
  const StreamOrder::Call on_stream(&stream_order_);
  phase_ = Phase::kPlanning;
  try {
    ReceivePlan plan = table_.AcquireReceive(&sequence, append_length);
    try {
      CopyPages(plan.copies);
      // Who writes to the slots knows no stream: what has used their pages must be through.
      if (HasStreams(config_.device)) Synchronize(config_.device, CurrentStream(config_.device));
    } catch (...) {
      table_.ReleaseReceive(plan);
      throw;
    }
    num_page_copies_ += static_cast<int64_t>(plan.copies.size());
    table_.CommitReceive(std::move(plan), ++last_transfer_id_);
  } catch (...) {
    phase_ = Phase::kIdle;
    throw;
  }
  phase_ = Phase::kIdle;
  return EncodeSlotMap(table_.SlotsOf(sequence, sequence.length - append_length, sequence.length));
}

int64_t PagedKVCacheObj::ReceiveId(int64_t sequence_id) {
  RequireNotPlanning("receive_id");
  const Sequence& sequence = table_.At(sequence_id);
  if (sequence.receive == nullptr || sequence.receive->is_in_step) return 0;
  table_.HoldReceivePages(sequence);
  return sequence.receive->id;
}

Sequence* PagedKVCacheObj::Receiving(int64_t sequence_id, int64_t receive_id, const char* what) {
  RequireNotPlanning(what);
  Sequence& sequence = table_.At(sequence_id);
  if (sequence.receive == nullptr || sequence.receive->id != receive_id ||
      sequence.receive->is_in_step) {
    Raise(kValueError, what, ": receive ", receive_id, " of sequence ", sequence_id,
          " is not under way; the sequence was used, popped or removed since prepare_recv");
  }
  return &sequence;
}

void PagedKVCacheObj::FinishReceive(int64_t sequence_id, int64_t receive_id) {
  Sequence* sequence = Receiving(sequence_id, receive_id, "finish_receive");
  table_.ReleaseReceivePages(receive_id);
  table_.FinishReceive(sequence);
}

void PagedKVCacheObj::CancelReceive(int64_t sequence_id, int64_t receive_id) {
  RequireNotPlanning("cancel_receive");
  const bool was_held = table_.ReleaseReceivePages(receive_id);
  auto it = table_.sequences().find(sequence_id);
  const bool is_receiving = it != table_.sequences().end() && it->second.receive != nullptr &&
                            it->second.receive->id == receive_id && !it->second.receive->is_in_step;
  if (was_held && !is_receiving) return;
  table_.CancelReceive(Receiving(sequence_id, receive_id, "cancel_receive"));
}

void PagedKVCacheObj::ReleaseReceive(int64_t receive_id) {
  EnterOrDefer([this, receive_id] { table_.ReleaseReceivePages(receive_id); });
}

void PagedKVCacheObj::SetSendHandler(int64_t peer, ffi::Optional<ffi::Function> handler,
                                     ffi::Shape num_slots) {
  RequireNotPlanning("set_send_handler");
  if (!handler.has_value()) return ForgetPeer(peer);
  if (peers_.count(peer)) Raise(kValueError, "receiver ", peer, " has a handler already");
  if (static_cast<int32_t>(num_slots.size()) != table_.num_groups()) {
    Raise(kValueError, "the receiver has ", num_slots.size(), " groups of layers, this cache ",
          table_.num_groups());
  }
  for (int64_t n : num_slots) {
    if (n < 1 || n > std::numeric_limits<int32_t>::max()) {
      Raise(kValueError, "the receiver's number of slots must be a positive int32, got ", n);
    }
  }
  peers_[peer] = {*handler, {num_slots.begin(), num_slots.end()}};
}

void PagedKVCacheObj::DropSendHandler(int64_t peer) {
  EnterOrDefer([this, peer] { ForgetPeer(peer); });
}

void PagedKVCacheObj::ForgetPeer(int64_t peer) noexcept {
  // Releasing the handler may run code that calls the cache.
  const auto handler = peers_.extract(peer);
  table_.ForgetSends(peer);
  for (auto it = blocks_.begin(); it != blocks_.end();) {
    if (it->second.peer == peer) table_.ReleaseSend(it->second);
    it = it->second.peer == peer ? blocks_.erase(it) : std::next(it);
  }
}

void PagedKVCacheObj::DisaggMarkSend(int64_t sequence_id, int64_t begin, ffi::Shape position_map,
                                     int64_t peer) {
  RequireIdle("mark_send");
  Sequence& sequence = table_.At(sequence_id);
  auto it = peers_.find(peer);
  if (it == peers_.end()) {
    std::string connected;
    for (const auto& [number, each] : peers_) {
      connected += (connected.empty() ? "" : ", ") + std::to_string(number);
    }
    Raise(kValueError, "no receiver ", peer,
          " is connected (connected: ", connected.empty() ? "none" : connected,
          "); engines pass the group offset of the destination, so connect it under that number: "
          "tvm_pagedkv.transfer.Sender(..., peer=",
          peer, ")");
  }
  if (sequence.receive) {
    Raise(kValueError, "sequence ", sequence_id, " is receiving; it cannot be sent as well");
  }
  if (sequence.tree.size() > 0) {
    Raise(kValueError, "sequence ", sequence_id,
          " cannot be sent: its last positions are token tree nodes that are not committed");
  }
  table_.RequireNoWindow(sequence, "be sent");
  if (groups_.empty()) {
    Raise(kValueError, "sequence ", sequence_id,
          " cannot be sent: no layer of this cache has K and V");
  }
  if (sequence.send) {
    Raise(kValueError, "sequence ", sequence_id, " is being sent already: positions up to ",
          sequence.send->end, ", of which those from ", sequence.send->next, " on are missing");
  }
  std::vector<bool> has_window;
  for (const Group& group : groups_) has_window.push_back(group.shape.window > 0);
  auto slots =
      ParseSlotMap(position_map.data(), position_map.size(), it->second.num_slots, has_window);
  const int64_t count = NumPositions(slots[0]);
  if (begin < 0 || begin > std::numeric_limits<int32_t>::max() - count) {
    Raise(kValueError, "cannot send ", count, " positions from ", begin, " on");
  }
  auto mark = std::make_unique<SendMark>();
  *mark = {last_transfer_id_ + 1, peer, begin, begin + count, begin, std::move(slots)};
  table_.RequireSendable(sequence, *mark);
  const int64_t send_id = mark->id;
  sequence.send = std::move(mark);
  ++last_transfer_id_;
  int64_t block = 0;
  try {
    block = MakeSendBlock(&sequence);
  } catch (...) {
    sequence.send.reset();
    throw;
  }
  if (!block) return;
  try {
    Announce({block});
  } catch (...) {  // the receiver does not know of the block, so the sequence is not being sent
    if (auto it = blocks_.find(block); it != blocks_.end()) {
      table_.ReleaseSend(it->second);
      blocks_.erase(it);
    }
    table_.ForgetSend(sequence_id, send_id);
    throw;
  }
}

void PagedKVCacheObj::RequireNoSends(const ffi::Shape& sequence_ids) const {
  for (int64_t id : sequence_ids) {
    auto it = table_.sequences().find(id);
    if (it == table_.sequences().end() || it->second.send == nullptr) continue;
    Raise(kValueError, "sequence ", id, " is being sent; it cannot have a token tree meanwhile");
  }
}

int64_t PagedKVCacheObj::MakeSendBlock(Sequence* sequence) {
  if (sequence->send == nullptr || sequence->length <= sequence->send->next) return 0;
  auto it = blocks_.emplace(last_transfer_id_ + 1, SendBlock{}).first;
  try {
    it->second = table_.AcquireSend(sequence);
  } catch (...) {
    blocks_.erase(it);
    throw;
  }
  return ++last_transfer_id_;
}

std::vector<int64_t> PagedKVCacheObj::MakeSendBlocks() {
  std::vector<int64_t> blocks;
  if (peers_.empty()) return blocks;
  for (int64_t id : SequenceIds()) {
    if (table_.Peek(id).send == nullptr) continue;
    if (int64_t block = MakeSendBlock(&table_.At(id))) blocks.push_back(block);
  }
  return blocks;
}

void PagedKVCacheObj::Announce(const std::vector<int64_t>& blocks) {
  if (!blocks.empty() && HasStreams(config_.device)) {
    // Whoever reads them does so in another thread or process, or by hardware of its own.
    stream_order_.Synchronize();
  }
  std::exception_ptr first_error;
  for (int64_t id : blocks) {
    auto it = blocks_.find(id);
    if (it == blocks_.end()) continue;  // an earlier handler has let go of this one's peer
    const ffi::Function handler = peers_.at(it->second.peer).handler;
    try {
      handler(id);
    } catch (...) {  // the other receivers must hear of their rows all the same
      if (first_error == nullptr) first_error = std::current_exception();
    }
  }
  if (first_error != nullptr) std::rethrow_exception(first_error);
}

int64_t PagedKVCacheObj::SendId(int64_t sequence_id) const {
  const Sequence& sequence = table_.At(sequence_id);
  return sequence.send ? sequence.send->id : 0;
}

void PagedKVCacheObj::CancelSend(int64_t sequence_id, int64_t send_id) {
  RequireNotPlanning("cancel_send");
  table_.At(sequence_id);
  table_.ForgetSend(sequence_id, send_id);
}

StringMap PagedKVCacheObj::DescribeSendBlock(int64_t block_id) const {
  auto it = blocks_.find(block_id);
  if (it == blocks_.end()) Raise(kKeyError, "no block ", block_id, " is ready to be sent");
  const SendBlock& block = it->second;
  ffi::Array<ffi::Any> runs;
  for (const std::vector<CopyRun>& group : block.runs) {
    const auto count = static_cast<int64_t>(group.size());
    static_assert(sizeof(CopyRun) == 3 * sizeof(int64_t));
    ffi::Tensor tensor = AllocateTensor({count, 3}, kInt64, kCPU, allocated_bytes_);
    std::memcpy(tensor.data_ptr(), group.data(), group.size() * sizeof(CopyRun));
    runs.push_back(tensor);
  }
  return {{"send_id", block.send_id},
          {"sequence_id", block.sequence_id},
          {"begin", block.begin},
          {"end", block.end},
          {"runs", runs}};
}

void PagedKVCacheObj::ReleaseSendBlock(int64_t block_id) {
  auto it = blocks_.find(block_id);
  if (it == blocks_.end()) Raise(kKeyError, "no block ", block_id, " is ready to be sent");
  RequireNotPlanning("release_send_block");
  table_.ReleaseSend(it->second);
  blocks_.erase(it);
}

ffi::Tensor PagedKVCacheObj::PagesOf(int64_t layer) const { return LayerAt(layer).pages; }

ffi::Shape PagedKVCacheObj::SharedPages() const {
  if (shared_pages_ == nullptr) return {-1, 0};
  return {shared_pages_->descriptor(), shared_pages_->num_bytes()};
}

void CopyRegions(ffi::Tensor destination, ffi::Tensor source, ffi::Tensor regions) {
  for (const ffi::Tensor& each : {destination, source, regions}) {
    if (!each.defined()) Raise(kTypeError, "copy_regions takes three tensors, got None");
    if (!each.IsContiguous()) Raise(kValueError, "the tensors of copy_regions must be contiguous");
  }
  const DLDataType dtype = regions.dtype();
  if (regions.ndim() != 2 || regions.size(1) != 3 || dtype.code != kDLInt || dtype.bits != 64 ||
      dtype.lanes != 1 || regions.device().device_type != kDLCPU) {
    Raise(kValueError, "regions must be int64 [n, 3] on the CPU: destination, source, bytes");
  }
  const int64_t limits[] = {NumBytes(destination), NumBytes(source)};
  const auto* rows = reinterpret_cast<const int64_t*>(Bytes(regions));
  for (int64_t i = 0; i < regions.size(0); ++i) {
    const int64_t* row = rows + 3 * i;
    for (int side = 0; side < 2; ++side) {
      if (row[2] < 0 || row[side] < 0 || row[2] > limits[side] ||
          row[side] > limits[side] - row[2]) {
        Raise(kIndexError, "region ", i, " (", row[2], " bytes at ", row[side], ") is not within ",
              limits[side], " bytes of the ", side == 0 ? "destination" : "source");
      }
    }
  }
  const bool on_host =
      destination.device().device_type == kDLCPU && source.device().device_type == kDLCPU;
  void* stream = nullptr;
  const DLDevice device =
      destination.device().device_type == kDLCPU ? source.device() : destination.device();
  if (!on_host) stream = CurrentStream(device);
  for (int64_t i = 0; i < regions.size(0); ++i) {
    const int64_t* row = rows + 3 * i;
    if (on_host) {
      std::memmove(Bytes(destination) + row[0], Bytes(source) + row[1], row[2]);
    } else {
      CopyBytes(source, row[1], destination, row[0], row[2], stream);
    }
  }
  // The sender may change the rows once they were read.
  if (!on_host) Synchronize(device, stream);
}

}  // namespace pagedkv
