// SPDX-License-Identifier: Apache-2.0
/*!
 * \file kv_sender.cc
 * \brief Positions of sequences that go to other caches.
 */
#include "transfer/kv_sender.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"

namespace pagedkv {

namespace {

constexpr DLDataType kInt64{kDLInt, 64, 1};

/*! \brief Int64 [count, 3] on the CPU: source slot, destination slot, number of slots. */
ffi::Tensor RunsTensor(const std::vector<CopyRun>& runs, const ByteCounter& counter) {
  static_assert(sizeof(CopyRun) == 3 * sizeof(int64_t));
  const auto count = static_cast<int64_t>(runs.size());
  ffi::Tensor tensor = AllocateTensor({count, 3}, kInt64, {kDLCPU, 0}, counter);
  std::memcpy(tensor.data_ptr(), runs.data(), runs.size() * sizeof(CopyRun));
  return tensor;
}

}  // namespace

void KVSender::SetHandler(int64_t peer, ffi::Optional<ffi::Function> handler, IntSpan num_slots) {
  step_->phase().RequireNotChanging("set_send_handler");
  if (!handler.has_value()) return DropHandler(peer);
  if (peers_.count(peer)) Raise(kValueError, "receiver ", peer, " has a handler already");
  if (static_cast<int32_t>(num_slots.size) != table_->geometry().num_pools()) {
    Raise(kValueError, "the receiver has ", num_slots.size, " groups of layers, this cache ",
          table_->geometry().num_pools());
  }
  const std::vector<int64_t> slots(num_slots.data, num_slots.data + num_slots.size);
  for (int64_t n : slots) {
    if (n < 1 || n > std::numeric_limits<int32_t>::max()) {
      Raise(kValueError, "the receiver's number of slots must be a positive int32, got ", n);
    }
  }
  peers_[peer] = {*handler, slots};
}

void KVSender::DropHandler(int64_t peer) noexcept {
  // Releasing the handler may run code that calls the cache, so it is the last thing to go.
  const auto handler = peers_.extract(peer);
  sends_.ForgetPeer(peer);
  for (auto it = blocks_.begin(); it != blocks_.end();) {
    if (it->second.peer == peer) sends_.Release(it->second);
    it = it->second.peer == peer ? blocks_.erase(it) : std::next(it);
  }
}

const KVSender::Peer& KVSender::PeerAt(int64_t peer) const {
  auto it = peers_.find(peer);
  if (it != peers_.end()) return it->second;
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

void KVSender::RequireMaySend(const Sequence& sequence) const {
  if (sequence.receive) {
    Raise(kValueError, "sequence ", sequence.id, " is receiving; it cannot be sent as well");
  }
  if (sequence.tree.size() > 0) {
    Raise(kValueError, "sequence ", sequence.id,
          " cannot be sent: its last positions are token tree nodes that are not committed");
  }
  RequireNoWindow(sequence, "be sent");
  if (table_->num_groups() == 0) {
    Raise(kValueError, "sequence ", sequence.id,
          " cannot be sent: no layer of this cache has K and V");
  }
  if (sequence.send) {
    Raise(kValueError, "sequence ", sequence.id, " is being sent already: positions up to ",
          sequence.send->end, ", of which those from ", sequence.send->next, " on are missing");
  }
}

void KVSender::MarkSend(int64_t sequence_id, int64_t begin, IntSpan position_map, int64_t peer) {
  step_->phase().RequireIdle("mark_send");
  Sequence& sequence = table_->At(sequence_id);
  const std::vector<int64_t>& num_slots = PeerAt(peer).num_slots;
  RequireMaySend(sequence);
  std::vector<bool> has_window;
  for (int32_t g = 0; g < table_->num_groups(); ++g)
    has_window.push_back(table_->geometry().HasWindow(g));
  SlotMap map = ParseSlotMap(position_map.data, position_map.size, num_slots, has_window);
  const int64_t count = NumPositions(map.groups[0]);
  if (begin < 0 || begin > std::numeric_limits<int32_t>::max() - count) {
    Raise(kValueError, "cannot send ", count, " positions from ", begin, " on");
  }
  auto mark = std::make_unique<SendMark>();
  *mark = {last_id_ + 1,         peer, begin, begin + count, begin, std::move(map.groups),
           std::move(map.states)};
  sends_.RequireSendable(sequence, *mark);
  const int64_t send_id = mark->id;
  sequence.send = std::move(mark);
  ++last_id_;
  std::vector<int64_t> blocks;
  try {
    blocks = MakeBlocks({&sequence});
  } catch (...) {
    sequence.send.reset();
    throw;
  }
  try {
    Announce(blocks);
  } catch (...) {  // the receiver does not know of the block, so the sequence is not being sent
    for (int64_t block : blocks) DropBlock(block);
    sends_.Forget(sequence_id, send_id);
    throw;
  }
}

void KVSender::RequireNoSends(IntSpan sequence_ids) const {
  for (size_t i = 0; i < sequence_ids.size; ++i) {
    auto it = table_->sequences().find(sequence_ids.data[i]);
    if (it == table_->sequences().end() || it->second.send == nullptr) continue;
    Raise(kValueError, "sequence ", it->first,
          " is being sent; it cannot have a token tree meanwhile");
  }
}

std::vector<int64_t> KVSender::MakeBlocks() {
  if (peers_.empty()) return {};
  std::vector<const Sequence*> sequences;
  for (const auto& [id, sequence] : table_->sequences()) {
    if (sequence.send != nullptr) sequences.push_back(&sequence);
  }
  std::sort(sequences.begin(), sequences.end(),
            [](const Sequence* a, const Sequence* b) { return a->id < b->id; });
  return MakeBlocks(sequences);
}

std::vector<int64_t> KVSender::MakeBlocks(const std::vector<const Sequence*>& sequences) {
  std::vector<int64_t> ids;
  std::map<int64_t, SendBlock> blocks;
  for (const Sequence* sequence : sequences) {
    if (sends_.ReadyEnd(*sequence) <= sequence->send->next) continue;
    ids.push_back(last_id_ + 1 + static_cast<int64_t>(ids.size()));
    blocks.emplace(ids.back(), sends_.Plan(*sequence));
  }
  // What follows cannot fail.
  for (const auto& [id, block] : blocks) sends_.Commit(block);
  last_id_ += static_cast<int64_t>(ids.size());
  blocks_.merge(blocks);
  return ids;
}

void KVSender::Announce(const std::vector<int64_t>& blocks) {
  // Whoever reads the rows does so in another thread or process, or by hardware of its own.
  if (!blocks.empty()) step_->stream_order().Synchronize();
  std::exception_ptr first_error;
  for (int64_t id : blocks) {
    auto it = blocks_.find(id);
    if (it == blocks_.end()) continue;  // an earlier handler has disconnected this one's peer
    const ffi::Function handler = peers_.at(it->second.peer).handler;
    try {
      handler(id);
    } catch (...) {  // the other receivers must hear of their rows all the same
      if (first_error == nullptr) first_error = std::current_exception();
    }
  }
  if (first_error != nullptr) std::rethrow_exception(first_error);
}

ffi::Shape KVSender::FirstToSend(int64_t sequence_id, int64_t begin, int64_t end) const {
  step_->phase().RequireIdle("first_to_send");
  const Sequence& sequence = table_->At(sequence_id);
  if (begin < 0 || begin >= end || end > std::numeric_limits<int32_t>::max()) {
    Raise(kValueError, "cannot send positions ", begin, " to ", end);
  }
  return ffi::Shape(sends_.FirstToSend(sequence, begin, end));
}

int64_t KVSender::IdOf(int64_t sequence_id) const {
  const Sequence& sequence = table_->At(sequence_id);
  return sequence.send ? sequence.send->id : 0;
}

void KVSender::Cancel(int64_t sequence_id, int64_t send_id) {
  step_->phase().RequireNotChanging("cancel_send");
  table_->At(sequence_id);
  sends_.Forget(sequence_id, send_id);
}

ffi::Map<ffi::String, ffi::Any> KVSender::DescribeBlock(int64_t block_id) const {
  auto it = blocks_.find(block_id);
  if (it == blocks_.end()) Raise(kKeyError, "no block ", block_id, " is ready to be sent");
  const SendBlock& block = it->second;
  ffi::Array<ffi::Any> runs;
  for (const std::vector<CopyRun>& group : block.runs) {
    runs.push_back(RunsTensor(group, step_->storage().counter()));
  }
  return {{"send_id", block.send_id},
          {"sequence_id", block.sequence_id},
          {"begin", block.begin},
          {"end", block.end},
          {"runs", runs}};
}

void KVSender::ReleaseBlock(int64_t block_id) {
  if (blocks_.count(block_id) == 0) {
    Raise(kKeyError, "no block ", block_id, " is ready to be sent");
  }
  step_->phase().RequireNotChanging("release_send_block");
  DropBlock(block_id);
}

void KVSender::DropBlock(int64_t block_id) noexcept {
  auto it = blocks_.find(block_id);
  if (it == blocks_.end()) return;
  sends_.Release(it->second);
  blocks_.erase(it);
}

}  // namespace pagedkv
