// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sends.cc
 * \brief Positions of sequences that go to other caches.
 */
#include "state/table/sends.h"

#include <algorithm>
#include <string>

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
      const bool has_states = geometry.StateGroupOf(g) >= 0;
      Raise(kValueError, "position ", wanted, " of sequence ", sequence.id,
            " is gone: ", has_states ? "recurrent layers" : "layers with a window of ",
            has_states ? std::string() : std::to_string(geometry.window(g)),
            " keep positions from ", geometry.FirstPosition(sequence, g), " on only");
    }
  }
  RequireStates(sequence, mark);
}

int64_t Sends::StateToSend(const Sequence& sequence, int32_t s, int64_t begin, int64_t end) const {
  const PageGeometry& geometry = table_->geometry();
  const int64_t wanted = geometry.StateToReceive(s, begin, end);
  const int64_t interval = geometry.state_group(s).interval;
  const int64_t first = geometry.FirstPosition(sequence, geometry.state_group(s).ingredients);
  const bool has_own = wanted == 0 && begin > 0;  // the receiver, with ingredients up to `begin`
  if (has_own && first <= begin) return wanted;
  const int64_t earliest = has_own ? begin / interval * interval + interval : wanted;
  const int64_t last = std::min(end, sequence.states[s].length);
  for (int64_t length = earliest; length <= last; length += interval) {
    const bool has_state = length == 0 || StatePage(sequence, s, length) >= 0;
    if (length >= first && has_state) return length;
  }
  return wanted;  // a step will compute it, or it is gone
}

int64_t Sends::FirstOfWindow(const Sequence& sequence, int32_t group, int64_t begin,
                             int64_t end) const {
  const PageGeometry& geometry = table_->geometry();
  const int64_t page_size = geometry.page_size();
  const int64_t wanted = std::max(begin, geometry.FirstPageToKeep(group, end) * page_size);
  const int64_t first = geometry.FirstPosition(sequence, group);
  const bool is_there = first <= wanted || wanted >= sequence.length;
  return is_there || first > geometry.FirstPageToSee(group, end) * page_size ? wanted : first;
}

std::vector<int64_t> Sends::FirstToSend(const Sequence& sequence, int64_t begin,
                                        int64_t end) const {
  const PageGeometry& geometry = table_->geometry();
  std::vector<int64_t> firsts(static_cast<size_t>(geometry.num_pools()), begin);
  for (int32_t g = 0; g < table_->num_groups(); ++g) {
    if (geometry.HasWindow(g)) firsts[g] = FirstOfWindow(sequence, g, begin, end);
  }
  for (int32_t s = 0; s < table_->num_state_groups(); ++s) {
    const int64_t length = StateToSend(sequence, s, begin, end);
    firsts[geometry.StatePool(s)] = length;
    firsts[geometry.state_group(s).ingredients] = std::max(begin, length);
  }
  return firsts;
}

void Sends::RequireStates(const Sequence& sequence, const SendMark& mark) const {
  for (int32_t s = 0; s < table_->num_state_groups(); ++s) {
    const StateSlot& wanted = mark.states[s];
    const int64_t first = table_->geometry().StateToReceive(s, mark.begin, mark.end);
    const int64_t position = wanted.position;
    const bool is_later = position > first && position <= mark.end &&
                          position % table_->geometry().state_group(s).interval == 0;
    if (position != first && !is_later) {
      Raise(kValueError, "the position map asks for the state behind ", position,
            " positions, but with positions ", mark.begin, " to ", mark.end,
            " the one to send is behind ", first);
    }
    const bool is_late = position > 0 && mark.end <= sequence.length;
    if (is_late && StatePage(sequence, s, position) < 0) {
      Raise(kValueError, "the state of recurrent layers behind position ", position,
            " of sequence ", sequence.id, " is gone; mark a sequence before its last step");
    }
  }
}

int32_t Sends::StatePage(const Sequence& sequence, int32_t s, int64_t position) const {
  const int64_t interval = table_->geometry().state_group(s).interval;
  return table_->states().FindPage(sequence, s, position / interval - 1);
}

int64_t Sends::ReadyEnd(const Sequence& sequence) const {
  const SendMark& mark = *sequence.send;
  int64_t end = std::min(sequence.publishable_length(), mark.end);
  for (int32_t s = 0; s < table_->num_state_groups(); ++s) {
    const int64_t position = mark.states[s].position;
    if (position <= mark.next || position > end) continue;
    if (StatePage(sequence, s, position) < 0) end = position - 1;
  }
  return end;
}

SendBlock Sends::Plan(const Sequence& sequence) const {
  const int64_t page_size = table_->page_size();
  const PageGeometry& geometry = table_->geometry();
  const auto num_pools = static_cast<size_t>(geometry.num_pools());
  const SendMark& mark = *sequence.send;
  const int64_t end = ReadyEnd(sequence);
  SendBlock block{mark.id, sequence.id, mark.peer, mark.next, end, {}, {}};
  block.runs.resize(num_pools);
  block.pages.resize(num_pools);
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
  for (int32_t s = 0; s < table_->num_state_groups(); ++s) {
    const StateSlot& wanted = mark.states[s];
    if (wanted.position <= mark.next || wanted.position > end) continue;
    const int32_t p = geometry.StatePool(s), page = StatePage(sequence, s, wanted.position);
    block.runs[p].push_back({page, wanted.page, 1});
    block.pages[p].push_back(page);
  }
  return block;
}

void Sends::Commit(const SendBlock& block) const noexcept {
  for (int32_t p = 0; p < table_->geometry().num_pools(); ++p) {
    for (int32_t page : block.pages[p]) table_->pins().Pin(p, page);
  }
  Sequence* sequence = table_->Find(block.sequence_id);
  sequence->send->next = block.end;
  if (block.end == sequence->send->end) sequence->send.reset();
}

void Sends::Release(const SendBlock& block) const noexcept {
  for (int32_t p = table_->geometry().num_pools() - 1; p >= 0; --p) {
    for (auto it = block.pages[p].rbegin(); it != block.pages[p].rend(); ++it) {
      table_->pins().Unpin(p, *it);
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
