// SPDX-License-Identifier: Apache-2.0
/*!
 * \file kv_transfer.cc
 * \brief Slot maps, and what SequenceTable does for transfers.
 */
#include "state/kv_transfer.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "base/error.h"
#include "state/sequence_table.h"

namespace pagedkv {

namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

void CheckDisjoint(SlotRuns runs, size_t group) {
  std::sort(runs.begin(), runs.end(),
            [](const SlotRun& a, const SlotRun& b) { return a.slot < b.slot; });
  for (size_t i = 1; i < runs.size(); ++i) {
    if (runs[i - 1].slot == kNotWanted) continue;
    if (runs[i].slot < runs[i - 1].slot + runs[i - 1].length) {
      Raise(kValueError, "the position map of group ", group, " has slot ", runs[i].slot, " twice");
    }
  }
}

}  // namespace

void AppendRun(SlotRuns* runs, int64_t slot, int64_t length) {
  if (length == 0) return;
  if (!runs->empty() && runs->back().slot + runs->back().length == slot && slot > 0 &&
      runs->back().slot != kNotWanted) {
    runs->back().length += length;
  } else {
    runs->push_back({slot, length});
  }
}

int64_t NumPositions(const SlotRuns& runs) {
  int64_t total = 0;
  for (const SlotRun& run : runs) total += run.length;
  return total;
}

std::vector<SlotRuns> ParseSlotMap(const int64_t* data, size_t size,
                                   const std::vector<int64_t>& num_slots,
                                   const std::vector<bool>& has_window) {
  std::vector<SlotRuns> maps(num_slots.size());
  size_t at = 0;
  for (size_t g = 0; g < maps.size(); ++g) {
    if (at == size) {
      Raise(kValueError, "the position map has ", g, " groups, but the cache has ", maps.size(),
            " groups of layers");
    }
    const int64_t count = data[at++];
    if (count < 1 || static_cast<uint64_t>(count) > (size - at) / 2) {
      Raise(kValueError, "the position map of group ", g, " should have ", count,
            " runs, but there are ", size - at, " more numbers");
    }
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i, at += 2) {
      const SlotRun run{data[at], data[at + 1]};
      const bool may_skip = has_window[g] && i == 0 && run.slot == kNotWanted;
      const int64_t limit = may_skip ? kInt32Max : num_slots[g];
      if (!may_skip && (run.slot < 0 || run.slot >= limit)) {
        Raise(kValueError, "slot ", run.slot, " in the position map of group ", g,
              " is not in [0, ", limit, ")");
      }
      if (run.length < 1 || run.length > limit - std::max<int64_t>(run.slot, 0)) {
        Raise(kValueError, "the position map of group ", g, " has a run of ", run.length,
              " slots from ", run.slot, ", of ", limit);
      }
      total += run.length;
      if (total > kInt32Max) {
        Raise(kValueError, "the position map of group ", g, " has more than 2^31 - 1 positions");
      }
      maps[g].push_back(run);
    }
    CheckDisjoint(maps[g], g);
    if (total != NumPositions(maps[0])) {
      Raise(kValueError, "the position map of group ", g, " has ", total,
            " positions, that of group 0 has ", NumPositions(maps[0]));
    }
  }
  if (at != size) {
    Raise(kValueError, "the position map has ", size - at, " numbers after its ", maps.size(),
          maps.size() == 1 ? " group" : " groups");
  }
  return maps;
}

void SequenceTable::RequireNoWindow(const Sequence& sequence, const char* what) const {
  if (!sequence.window.IsSet()) return;
  Raise(kValueError, "sequence ", sequence.id, " cannot ", what, ": it has ",
        sequence.window.size > 0 ? "a sliding window" : "dropped positions behind its sinks");
}

ReceivePlan SequenceTable::AcquireReceive(Sequence* sequence, int64_t count) {
  if (count < 1) {
    Raise(kValueError, "the number of positions to receive must be at least 1, got ", count);
  }
  if (sequence->tree.size() > 0) {
    Raise(kValueError, "sequence ", sequence->id,
          " cannot receive: its last positions are token tree nodes that are not committed");
  }
  RequireNoWindow(*sequence, "receive");
  if (count > kInt32Max - sequence->length) {
    Raise(kValueError, "sequence ", sequence->id, " of length ", sequence->length,
          " cannot receive ", count, " positions: no more than 2^31 - 1 fit");
  }
  const int64_t begin = sequence->length, end = begin + count;
  ReceivePlan plan;
  plan.sequence = sequence;
  plan.count = count;
  plan.receive = std::make_unique<Receive>();
  plan.receive->begin = begin;
  plan.pages.resize(pools_.size());
  plan.first_pages.resize(pools_.size());
  for (int32_t g = 0; g < num_groups(); ++g) {
    const std::vector<int32_t>& old = sequence->pages[g];
    Receive::Group group;
    group.first_page = sequence->first_pages[g];
    const int64_t first = std::max(group.first_page, FirstPageToKeep(g, end));
    const auto num_old = static_cast<int64_t>(old.size());
    const int64_t num_gone = std::min(first - group.first_page, num_old);
    int64_t num_retained = num_old - num_gone;
    int64_t num_needed = PagesFor(end) - first - num_retained;
    if (num_retained > 0 && begin % page_size_ != 0 && ShouldCopy(g, old.back(), num_needed)) {
      group.replaced = old.back();
      --num_retained;
      ++num_needed;
      // The copy is the first page that is allocated.
      plan.copies.push_back({sequence, g, num_retained, group.replaced, -1,
                             static_cast<int32_t>(begin % page_size_)});
    }
    if (num_needed > pools_[g].num_available()) RaiseFull(g, num_needed, "the receive");
    group.gone.assign(old.begin(), old.begin() + num_gone);
    group.num_retained = static_cast<size_t>(num_retained);
    plan.first_pages[g] = first;
    plan.pages[g].reserve(std::max(num_retained + num_needed, num_old));
    plan.pages[g].assign(old.begin() + num_gone, old.begin() + num_gone + num_retained);
    plan.receive->groups.push_back(std::move(group));
  }
  // What follows cannot fail.
  for (int32_t g = 0; g < num_groups(); ++g) {
    const auto num_pages = static_cast<size_t>(PagesFor(end) - plan.first_pages[g]);
    while (plan.pages[g].size() < num_pages) plan.pages[g].push_back(pools_[g].Allocate());
  }
  for (PageCopy& copy : plan.copies) copy.destination = plan.pages[copy.group][copy.index];
  return plan;
}

void SequenceTable::ReleaseReceive(const ReceivePlan& plan) noexcept {
  for (int32_t g = num_groups() - 1; g >= 0; --g) {
    const Receive::Group& group = plan.receive->groups[g];
    for (size_t i = plan.pages[g].size(); i > group.num_retained; --i) {
      const int32_t page = plan.pages[g][i - 1];
      const bool is_copy = group.replaced >= 0 && i - 1 == group.num_retained;
      is_copy ? pools_[g].Release(page) : pools_[g].Unallocate(page);
    }
  }
}

void SequenceTable::CommitReceive(ReceivePlan plan, int64_t id) noexcept {
  Sequence* sequence = plan.sequence;
  FinishReceive(sequence);
  for (int32_t g = 0; g < num_groups() && sequence->length % page_size_ != 0; ++g) {
    const Receive::Group& group = plan.receive->groups[g];
    if (group.replaced >= 0 || group.num_retained == 0) continue;
    pools_[g].Overwrite(plan.pages[g][group.num_retained - 1]);
  }
  sequence->pages = std::move(plan.pages);
  sequence->first_pages = std::move(plan.first_pages);
  sequence->receive = std::move(plan.receive);
  sequence->receive->id = id;
  Grow(sequence, plan.count);
}

void SequenceTable::FinishReceive(Sequence* sequence) noexcept {
  if (sequence->receive == nullptr) return;
  for (int32_t g = 0; g < num_groups(); ++g) {
    const Receive::Group& group = sequence->receive->groups[g];
    if (group.replaced >= 0) pools_[g].Release(group.replaced);
    if (HasWindow(g)) LeaveReceiveBehind(sequence, g);
  }
  sequence->receive.reset();
}

void SequenceTable::CancelReceive(Sequence* sequence) noexcept {
  if (sequence->receive == nullptr) return;
  Grow(sequence, sequence->receive->begin - sequence->length);
  for (int32_t g = num_groups() - 1; g >= 0; --g) {
    Receive::Group& group = sequence->receive->groups[g];
    ReleasePages(sequence, g, group.num_retained);
    // AcquireReceive has reserved the capacity.
    std::vector<int32_t>& pages = sequence->pages[g];
    if (group.replaced >= 0) pages.push_back(group.replaced);
    pages.insert(pages.begin(), group.gone.begin(), group.gone.end());
    sequence->first_pages[g] = group.first_page;
  }
  sequence->receive.reset();
}

void SequenceTable::HoldReceivePages(const Sequence& sequence) {
  const Receive& receive = *sequence.receive;
  if (receive_pages_.count(receive.id)) return;
  ReceivePages held;
  held.pages.resize(pools_.size());
  for (int32_t g = 0; g < num_groups(); ++g) {
    const int64_t begin = std::max(receive.begin, FirstPosition(sequence, g));
    if (begin >= sequence.length) continue;
    const std::vector<int32_t>& pages = sequence.pages[g];
    held.pages[g].assign(pages.begin() + PageIndex(sequence, g, begin), pages.end());
  }
  const ReceivePages& kept = receive_pages_.emplace(receive.id, std::move(held)).first->second;
  for (int32_t g = 0; g < num_groups(); ++g) {
    for (int32_t page : kept.pages[g]) Pin(g, page);
  }
}

bool SequenceTable::ReleaseReceivePages(int64_t receive_id) noexcept {
  auto it = receive_pages_.find(receive_id);
  if (it == receive_pages_.end()) return false;
  for (int32_t g = num_groups() - 1; g >= 0; --g) {
    const std::vector<int32_t>& pages = it->second.pages[g];
    for (auto page = pages.rbegin(); page != pages.rend(); ++page) Unpin(g, *page);
  }
  receive_pages_.erase(it);
  return true;
}

std::vector<SlotRuns> SequenceTable::SlotsOf(const Sequence& sequence, int64_t begin,
                                             int64_t end) const {
  std::vector<SlotRuns> runs(pools_.size());
  for (int32_t g = 0; g < num_groups(); ++g) {
    const int64_t first = std::clamp(FirstPosition(sequence, g), begin, end);
    AppendRun(&runs[g], kNotWanted, first - begin);
    for (int64_t position = first; position < end;) {
      const int64_t page_end = std::min(end, (position / page_size_ + 1) * page_size_);
      const int64_t index = position / page_size_ - sequence.first_pages[g];
      const int64_t slot = int64_t{sequence.pages[g][index]} * page_size_ + position % page_size_;
      AppendRun(&runs[g], slot, page_end - position);
      position = page_end;
    }
  }
  return runs;
}

void SequenceTable::RequireSendable(const Sequence& sequence, const SendMark& mark) const {
  for (int32_t g = 0; g < num_groups(); ++g) {
    const SlotRun& first = mark.slots[g].front();
    const int64_t wanted = mark.begin + (first.slot == kNotWanted ? first.length : 0);
    if (wanted < std::min(mark.end, sequence.length) && wanted < FirstPosition(sequence, g)) {
      Raise(kValueError, "position ", wanted, " of sequence ", sequence.id,
            " is gone: layers with a window of ", windows_[g], " keep positions from ",
            FirstPosition(sequence, g), " on only");
    }
  }
}

SendBlock SequenceTable::AcquireSend(Sequence* sequence) {
  SendMark& mark = *sequence->send;
  const int64_t end = std::min(sequence->length, mark.end);
  SendBlock block{mark.id, sequence->id, mark.peer, mark.next, end, {}, {}};
  block.runs.resize(pools_.size());
  block.pages.resize(pools_.size());
  for (int32_t g = 0; g < num_groups(); ++g) {
    int64_t run_begin = mark.begin;
    for (const SlotRun& run : mark.slots[g]) {
      const int64_t run_end = run_begin + run.length;
      const int64_t last = std::min(run_end, end);
      int64_t position = run.slot == kNotWanted ? last : std::max(run_begin, mark.next);
      while (position < last) {
        const int64_t index = position / page_size_ - sequence->first_pages[g];
        const int32_t page = sequence->pages[g][index];
        const int64_t remote = run.slot + position - run_begin;
        const int64_t left = page_size_ - std::max(position % page_size_, remote % page_size_);
        const int64_t length = std::min(last - position, left);
        block.runs[g].push_back(
            {int64_t{page} * page_size_ + position % page_size_, remote, length});
        if (block.pages[g].empty() || block.pages[g].back() != page) block.pages[g].push_back(page);
        position += length;
      }
      run_begin = run_end;
    }
  }
  for (int32_t g = 0; g < num_groups(); ++g) {
    for (int32_t page : block.pages[g]) Pin(g, page);
  }
  mark.next = end;
  if (end == mark.end) sequence->send.reset();
  return block;
}

void SequenceTable::ReleaseSend(const SendBlock& block) noexcept {
  for (int32_t g = num_groups() - 1; g >= 0; --g) {
    for (auto it = block.pages[g].rbegin(); it != block.pages[g].rend(); ++it) {
      OwnInPlaceOfPin(g, *it);
      pools_[g].Retire(*it);  // its sequence may have been removed meanwhile
    }
  }
}

void SequenceTable::ForgetSend(int64_t sequence_id, int64_t send_id) noexcept {
  auto it = sequences_.find(sequence_id);
  if (it == sequences_.end() || it->second.send == nullptr) return;
  if (it->second.send->id == send_id) it->second.send.reset();
}

void SequenceTable::ForgetSends(int64_t peer) noexcept {
  for (auto& [id, sequence] : sequences_) {
    if (sequence.send && sequence.send->peer == peer) sequence.send.reset();
  }
}

}  // namespace pagedkv
