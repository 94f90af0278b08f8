// SPDX-License-Identifier: Apache-2.0
/*!
 * \file receives.cc
 * \brief Positions of sequences that another cache writes.
 */
#include "state/table/receives.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/error.h"

namespace pagedkv {

int64_t Receives::FirstPage(const Sequence& sequence, int32_t group, int64_t end) const {
  const PageGeometry& geometry = table_->geometry();
  int64_t first = geometry.FirstPageToKeep(group, end);
  const int32_t s = geometry.StateGroupOf(group);
  if (s >= 0 && first * geometry.page_size() <= sequence.length) {
    // The states of the sequence are enough, and need the ingredients behind the last full one.
    const int64_t interval = geometry.state_group(s).interval;
    first = std::min(first, geometry.PageOf(sequence.states[s].length / interval * interval));
  }
  return std::max(sequence.first_pages[group], first);
}

ReceivePlan Receives::Acquire(Sequence* sequence, int64_t count) const {
  constexpr int64_t kMaxPositions = std::numeric_limits<int32_t>::max();
  if (count < 1) {
    Raise(kValueError, "the number of positions to receive must be at least 1, got ", count);
  }
  if (sequence->tree.size() > 0) {
    Raise(kValueError, "sequence ", sequence->id,
          " cannot receive: its last positions are token tree nodes that are not committed");
  }
  RequireNoWindow(*sequence, "receive");
  if (count > kMaxPositions - sequence->length) {
    Raise(kValueError, "sequence ", sequence->id, " of length ", sequence->length,
          " cannot receive ", count, " positions: no more than 2^31 - 1 fit");
  }
  const PageGeometry& geometry = table_->geometry();
  const int64_t page_size = geometry.page_size();
  const auto num_groups = static_cast<size_t>(table_->num_groups());
  const int64_t begin = sequence->length, end = begin + count;
  ReceivePlan plan;
  plan.sequence = sequence;
  plan.count = count;
  plan.receive = std::make_unique<Receive>();
  plan.receive->begin = begin;
  plan.pages.resize(num_groups);
  plan.first_pages.resize(num_groups);
  for (int32_t g = 0; g < table_->num_groups(); ++g) {
    const PagePool& pool = table_->pool(g);
    const std::vector<int32_t>& old = sequence->pages[g];
    Receive::Group group;
    group.first_page = sequence->first_pages[g];
    const int64_t first = FirstPage(*sequence, g, end);
    const auto num_old = static_cast<int64_t>(old.size());
    const int64_t num_gone = std::min(first - group.first_page, num_old);
    int64_t num_retained = num_old - num_gone;
    int64_t num_needed = geometry.PagesFor(end) - first - num_retained;
    if (num_retained > 0 && begin % page_size != 0 && ShouldCopy(pool, old.back(), num_needed)) {
      group.replaced = old.back();
      --num_retained;
      ++num_needed;
      // The copy is the first page that is allocated.
      plan.copies.push_back(
          {sequence, g, num_retained, group.replaced, -1, static_cast<int32_t>(begin % page_size)});
    }
    if (num_needed > pool.num_available()) table_->RaiseFull(g, num_needed, "the receive");
    group.gone.assign(old.begin(), old.begin() + num_gone);
    group.num_retained = static_cast<size_t>(num_retained);
    plan.first_pages[g] = first;
    plan.pages[g].reserve(std::max(num_retained + num_needed, num_old));
    plan.pages[g].assign(old.begin() + num_gone, old.begin() + num_gone + num_retained);
    plan.receive->groups.push_back(std::move(group));
  }
  for (int32_t s = 0; s < table_->num_state_groups(); ++s) {
    plan.receive->states.emplace_back();
    plan.states.emplace_back();
    const int64_t position = geometry.StateToReceive(s, begin, end);
    if (position == 0) continue;
    const int32_t p = geometry.StatePool(s);
    if (table_->pool(p).num_available() < 1) table_->RaiseFull(p, 1, "the receive");
    SequenceStates& states = plan.states[s].emplace();
    states.length = position;
    states.first_page = position / geometry.state_group(s).interval - 1;
    states.pages.reserve(1);
  }
  // What follows cannot fail.
  for (int32_t s = 0; s < table_->num_state_groups(); ++s) {
    if (!plan.states[s]) continue;
    plan.states[s]->pages.push_back(table_->pool(geometry.StatePool(s)).Allocate());
  }
  for (int32_t g = 0; g < table_->num_groups(); ++g) {
    const auto num_pages = static_cast<size_t>(geometry.PagesFor(end) - plan.first_pages[g]);
    while (plan.pages[g].size() < num_pages) plan.pages[g].push_back(table_->pool(g).Allocate());
  }
  for (PageCopy& copy : plan.copies) copy.destination = plan.pages[copy.group][copy.index];
  return plan;
}

void Receives::Release(const ReceivePlan& plan) const noexcept {
  for (int32_t s = table_->num_state_groups() - 1; s >= 0; --s) {
    if (!plan.states[s]) continue;
    table_->pool(table_->geometry().StatePool(s)).Unallocate(plan.states[s]->pages[0]);
  }
  for (int32_t g = table_->num_groups() - 1; g >= 0; --g) {
    PagePool& pool = table_->pool(g);
    const Receive::Group& group = plan.receive->groups[g];
    for (size_t i = plan.pages[g].size(); i > group.num_retained; --i) {
      const int32_t page = plan.pages[g][i - 1];
      const bool is_copy = group.replaced >= 0 && i - 1 == group.num_retained;
      is_copy ? pool.Release(page) : pool.Unallocate(page);
    }
  }
}

void Receives::Commit(ReceivePlan plan, int64_t id) const noexcept {
  Sequence* sequence = plan.sequence;
  table_->FinishReceive(sequence);
  const bool is_mid_page = sequence->length % table_->page_size() != 0;
  for (int32_t g = 0; g < table_->num_groups() && is_mid_page; ++g) {
    const Receive::Group& group = plan.receive->groups[g];
    if (group.replaced >= 0 || group.num_retained == 0) continue;
    table_->pool(g).Overwrite(plan.pages[g][group.num_retained - 1]);
  }
  sequence->pages = std::move(plan.pages);
  sequence->first_pages = std::move(plan.first_pages);
  for (size_t s = 0; s < plan.states.size(); ++s) {
    if (!plan.states[s]) continue;
    plan.receive->states[s] = std::move(sequence->states[s]);
    sequence->states[s] = std::move(*plan.states[s]);
  }
  sequence->receive = std::move(plan.receive);
  sequence->receive->id = id;
  table_->Grow(sequence, plan.count);
}

bool Receives::MustShorten(const Sequence& sequence, int32_t group, int64_t first) const {
  const Receive& receive = *sequence.receive;
  const PageGeometry& geometry = table_->geometry();
  const int64_t page_size = geometry.page_size();
  const int64_t wanted = std::max(receive.begin, sequence.first_pages[group] * page_size);
  if (first <= wanted) return false;
  const bool is_possible = geometry.HasWindow(group) &&
                           first <= geometry.FirstPageToSee(group, sequence.length) * page_size;
  if (is_possible && first % page_size == 0) return true;
  Raise(kValueError, "sequence ", sequence.id, " receives positions ", wanted, " to ",
        sequence.length, " of layer group ", group, "; it cannot do without those before ", first);
}

bool Receives::MustMove(const Sequence& sequence, int32_t s, int64_t length) const {
  const Receive& receive = *sequence.receive;
  const int64_t wanted = receive.states[s] ? sequence.states[s].length : 0;
  if (length == 0 || length == wanted) return false;
  const int64_t interval = table_->geometry().state_group(s).interval;
  const bool is_later = length > std::max(wanted, receive.begin) && length <= sequence.length;
  if (is_later && length % interval == 0) return true;
  Raise(kValueError, "sequence ", sequence.id, " receives positions ", receive.begin, " to ",
        sequence.length, " and the state behind ", wanted, "; it cannot take the one behind ",
        length, " in its place");
}

std::vector<SequenceStates> Receives::ReserveStates(const Sequence& sequence,
                                                    const std::vector<int64_t>& firsts) {
  const PageGeometry& geometry = table_->geometry();
  HoldPages(sequence);
  Pages& held = held_.at(sequence.receive->id);
  std::vector<SequenceStates> reserved(sequence.states.size());
  for (int32_t s = 0; s < table_->num_state_groups(); ++s) {
    const int32_t p = geometry.StatePool(s);
    if (!MustMove(sequence, s, firsts[p]) || sequence.receive->states[s]) continue;
    if (table_->pool(p).num_available() < 1) table_->RaiseFull(p, 1, "the receive");
    reserved[s].pages.reserve(1);
    held[p].reserve(1);
  }
  for (int32_t s = 0; s < table_->num_state_groups(); ++s) {  // cannot fail
    const int32_t p = geometry.StatePool(s);
    if (reserved[s].pages.capacity() == 0) continue;
    reserved[s].pages.push_back(table_->pool(p).Allocate());
    table_->pins().Pin(p, reserved[s].pages[0]);
    held[p].push_back(reserved[s].pages[0]);
  }
  return reserved;
}

std::vector<int32_t> Receives::Shorten(Sequence* sequence, const std::vector<int64_t>& firsts) {
  const PageGeometry& geometry = table_->geometry();
  Receive& receive = *sequence->receive;
  if (static_cast<int32_t>(firsts.size()) != geometry.num_pools()) {
    Raise(kValueError, "expected a position for each of ", geometry.num_pools(),
          " groups of layers and of states, got ", firsts.size());
  }
  std::vector<int64_t> first_of(firsts.begin(), firsts.begin() + table_->num_groups());
  for (int32_t s = 0; s < table_->num_state_groups(); ++s) {
    const int64_t length = firsts[geometry.StatePool(s)];
    // Ingredients before a state are of no use, and those behind it are needed.
    first_of[geometry.state_group(s).ingredients] = MustMove(*sequence, s, length) ? length : 0;
  }
  std::vector<bool> is_shorter(first_of.size());
  for (int32_t g = 0; g < table_->num_groups(); ++g) {
    const bool has_states = geometry.StateGroupOf(g) >= 0;
    is_shorter[g] = has_states ? first_of[g] > 0 : MustShorten(*sequence, g, first_of[g]);
    std::vector<int32_t>& gone = receive.groups[g].gone;
    if (is_shorter[g]) gone.reserve(gone.size() + receive.groups[g].num_retained + 1);
  }
  std::vector<int32_t> pages(sequence->states.size(), -1);
  std::vector<SequenceStates> reserved = ReserveStates(*sequence, firsts);
  // What follows cannot fail.
  for (int32_t s = 0; s < table_->num_state_groups(); ++s) {
    SequenceStates& states = sequence->states[s];
    if (!reserved[s].pages.empty()) {
      receive.states[s] = std::move(states);
      states = std::move(reserved[s]);
    }
    const int64_t length = first_of[geometry.state_group(s).ingredients];
    if (length > 0) {
      states.length = length;
      states.first_page = length / geometry.state_group(s).interval - 1;
    }
    if (receive.states[s]) pages[s] = states.pages[0];
  }
  for (int32_t g = 0; g < table_->num_groups(); ++g) {
    if (is_shorter[g]) DropPages(sequence, g, first_of[g]);
  }
  return pages;
}

void Receives::DropPages(Sequence* sequence, int32_t group, int64_t first) const noexcept {
  const int64_t first_page = table_->geometry().PageOf(first);
  Receive::Group& backup = sequence->receive->groups[group];
  std::vector<int32_t>& pages = sequence->pages[group];
  const auto end =
      pages.begin() + static_cast<ptrdiff_t>(first_page - sequence->first_pages[group]);
  const auto own_end = pages.begin() + static_cast<ptrdiff_t>(backup.num_retained);
  // The sequence's own pages come back when the receive is cancelled. A copy of one does not.
  backup.gone.insert(backup.gone.end(), pages.begin(), own_end);  // within its capacity
  if (backup.replaced >= 0) backup.gone.push_back(std::exchange(backup.replaced, -1));
  backup.num_retained = 0;
  for (auto page = own_end; page != end; ++page) table_->pool(group).Release(*page);
  pages.erase(pages.begin(), end);
  sequence->first_pages[group] = first_page;
}

void Receives::HoldPages(const Sequence& sequence) {
  const Receive& receive = *sequence.receive;
  if (held_.count(receive.id)) return;
  const PageGeometry& geometry = table_->geometry();
  Pages written(geometry.num_pools());
  for (int32_t g = 0; g < table_->num_groups(); ++g) {
    const int64_t begin = std::max(receive.begin, geometry.FirstPosition(sequence, g));
    if (begin >= sequence.length) continue;
    const std::vector<int32_t>& pages = sequence.pages[g];
    written[g].assign(pages.begin() + geometry.PageIndex(sequence, g, begin), pages.end());
  }
  for (int32_t s = 0; s < table_->num_state_groups(); ++s) {
    if (receive.states[s]) written[geometry.StatePool(s)] = sequence.states[s].pages;
  }
  const Pages& kept = held_.emplace(receive.id, std::move(written)).first->second;
  for (int32_t p = 0; p < geometry.num_pools(); ++p) {
    for (int32_t page : kept[p]) table_->pins().Pin(p, page);
  }
}

bool Receives::ReleasePages(int64_t receive_id) noexcept {
  auto it = held_.find(receive_id);
  if (it == held_.end()) return false;
  for (int32_t p = table_->geometry().num_pools() - 1; p >= 0; --p) {
    const std::vector<int32_t>& pages = it->second[p];
    for (auto page = pages.rbegin(); page != pages.rend(); ++page) table_->pins().Unpin(p, *page);
  }
  held_.erase(it);
  return true;
}

SlotMap Receives::SlotsOf(const ReceivePlan& plan) const {
  const int64_t page_size = table_->page_size();
  const int64_t begin = plan.receive->begin, end = begin + plan.count;
  SlotMap map{std::vector<SlotRuns>(table_->num_groups()),
              std::vector<StateSlot>(table_->num_state_groups())};
  for (int32_t g = 0; g < table_->num_groups(); ++g) {
    const int64_t first = std::clamp(plan.first_pages[g] * page_size, begin, end);
    AppendRun(&map.groups[g], kNotWanted, first - begin);
    for (int64_t position = first; position < end;) {
      const int64_t page_end = std::min(end, (position / page_size + 1) * page_size);
      const int64_t index = position / page_size - plan.first_pages[g];
      const int64_t slot = int64_t{plan.pages[g][index]} * page_size + position % page_size;
      AppendRun(&map.groups[g], slot, page_end - position);
      position = page_end;
    }
  }
  for (size_t s = 0; s < plan.states.size(); ++s) {
    if (plan.states[s]) map.states[s] = {plan.states[s]->pages[0], plan.states[s]->length};
  }
  return map;
}

}  // namespace pagedkv
