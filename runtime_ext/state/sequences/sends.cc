// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sends.cc
 * \brief Positions of sequences that go to other caches.
 */
#include "state/sequences/sends.h"

#include <algorithm>

#include "base/error.h"

namespace pagedkv {

void Sends::RequireSendable(const Sequence& sequence, const SendMark& mark) const {
  RequireWritten(sequence, mark.end, "be sent");
  const PageGeometry& geometry = table_->geometry();
  for (int32_t g = 0; g < table_->num_groups(); ++g) {
    const SlotRun& first = mark.slots[g].front();
    const int64_t wanted = mark.begin + (first.slot == kNotWanted ? first.length : 0);
    if (wanted < std::min(mark.end, sequence.length) &&
        wanted < geometry.FirstPosition(sequence, g)) {
      Raise(kValueError, "position ", wanted, " of sequence ", sequence.id,
            " is gone: layers with a window of ", geometry.window(g), " keep positions from ",
            geometry.FirstPosition(sequence, g), " on only");
    }
  }
}

SendBlock Sends::Plan(const Sequence& sequence) const {
  const int64_t page_size = table_->page_size();
  const auto num_groups = static_cast<size_t>(table_->num_groups());
  const SendMark& mark = *sequence.send;
  const int64_t end = std::min(sequence.publishable_length(), mark.end);
  SendBlock block{mark.id, sequence.id, mark.peer, mark.next, end, {}, {}};
  block.runs.resize(num_groups);
  block.pages.resize(num_groups);
  for (int32_t g = 0; g < table_->num_groups(); ++g) {
    int64_t run_begin = mark.begin;
    for (const SlotRun& run : mark.slots[g]) {
      const int64_t run_end = run_begin + run.length;
      const int64_t last = std::min(run_end, end);
      int64_t position = run.slot == kNotWanted ? last : std::max(run_begin, mark.next);
      while (position < last) {
        const int64_t index = position / page_size - sequence.first_pages[g];
        const int32_t page = sequence.pages[g][index];
        const int64_t remote = run.slot + position - run_begin;
        const int64_t left = page_size - std::max(position % page_size, remote % page_size);
        const int64_t length = std::min(last - position, left);
        block.runs[g].push_back({int64_t{page} * page_size + position % page_size, remote, length});
        if (block.pages[g].empty() || block.pages[g].back() != page) block.pages[g].push_back(page);
        position += length;
      }
      run_begin = run_end;
    }
  }
  return block;
}

void Sends::Commit(const SendBlock& block) const noexcept {
  for (int32_t g = 0; g < table_->num_groups(); ++g) {
    for (int32_t page : block.pages[g]) table_->pins().Pin(g, page);
  }
  Sequence* sequence = table_->Find(block.sequence_id);
  sequence->send->next = block.end;
  if (block.end == sequence->send->end) sequence->send.reset();
}

void Sends::Release(const SendBlock& block) const noexcept {
  for (int32_t g = table_->num_groups() - 1; g >= 0; --g) {
    for (auto it = block.pages[g].rbegin(); it != block.pages[g].rend(); ++it) {
      table_->pins().Unpin(g, *it);
    }
  }
}

void Sends::Forget(int64_t sequence_id, int64_t send_id) const noexcept {
  Sequence* sequence = table_->Find(sequence_id);
  if (sequence == nullptr || sequence->send == nullptr) return;
  if (sequence->send->id == send_id) sequence->send.reset();
}

void Sends::ForgetPeer(int64_t peer) const noexcept {
  for (const auto& [id, sequence] : table_->sequences()) {
    if (sequence.send && sequence.send->peer == peer) table_->Find(id)->send.reset();
  }
}

}  // namespace pagedkv
