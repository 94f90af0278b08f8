// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sequence_table.cc
 * \brief Sequences and their pages.
 */
#include "state/table/sequence_table.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/text_stream.h"

namespace pagedkv {

namespace {

constexpr int64_t kMaxSpare = 1024;  // removed sequences whose allocations are kept

std::vector<PagePool> MakePools(const std::vector<int32_t>& num_pages,
                                const std::vector<int32_t>& num_states) {
  std::vector<PagePool> pools;
  pools.reserve(num_pages.size() + num_states.size());
  for (int32_t n : num_pages) pools.emplace_back(n);
  for (int32_t n : num_states) pools.emplace_back(n);
  return pools;
}

}  // namespace

SequenceTable::SequenceTable(int64_t max_num_sequences, int32_t page_size,
                             const std::vector<int32_t>& num_pages, std::vector<int64_t> windows,
                             std::vector<StateGroup> state_groups,
                             const std::vector<int32_t>& num_states, int64_t capacity_pages)
    : max_num_sequences_(max_num_sequences),
      capacity_pages_(capacity_pages >= 0 ? capacity_pages
                      : num_pages.empty() ? 0
                                          : *std::max_element(num_pages.begin(), num_pages.end())),
      geometry_(page_size, num_pages.size(), std::move(windows), std::move(state_groups)),
      pools_(MakePools(num_pages, num_states)),
      pins_(&pools_),
      states_(&geometry_, &pools_),
      histories_(&geometry_, &pools_, &states_),
      prefixes_(&geometry_, &pools_, &pins_, &histories_, &states_) {
  spare_.reserve(std::min(max_num_sequences, kMaxSpare));
}

Sequence* SequenceTable::Find(int64_t id) {
  auto it = sequences_.find(id);
  return it == sequences_.end() ? nullptr : &it->second;
}

const Sequence& SequenceTable::Peek(int64_t id) const {
  auto it = sequences_.find(id);
  if (it == sequences_.end()) Raise(kKeyError, "no sequence ", id, " in the cache");
  return it->second;
}

void SequenceTable::RequireArrived(const Sequence& sequence) const {
  if (sequence.import == nullptr) return;
  Raise(kValueError, "sequence ", sequence.id,
        " is being imported: finish_import makes it usable, ", "remove_sequence gives it up");
}

const Sequence& SequenceTable::At(int64_t id) const {
  const Sequence& sequence = Peek(id);
  RequireArrived(sequence);
  return sequence;
}

Sequence& SequenceTable::At(int64_t id) {
  return const_cast<Sequence&>(static_cast<const SequenceTable*>(this)->At(id));
}

Sequence& SequenceTable::Use(Sequence* sequence) {
  RequireArrived(*sequence);
  return *sequence;
}

Sequence* SequenceTable::Insert(int64_t id) {
  if (sequences_.count(id)) Raise(kValueError, "sequence ", id, " is in the cache already");
  if (!spare_.empty()) {
    Sequences::node_type node = std::move(spare_.back());
    spare_.pop_back();
    node.key() = node.mapped().id = id;
    return KeepHistories(&sequences_.insert(std::move(node)).position->second);
  }
  Sequence sequence;
  sequence.id = id;
  const auto num_groups = static_cast<size_t>(geometry_.num_groups());
  sequence.pages.resize(num_groups);
  sequence.first_pages.resize(num_groups, 0);
  sequence.histories.resize(num_groups);
  sequence.states.resize(static_cast<size_t>(num_state_groups()));
  return KeepHistories(&sequences_.emplace(id, std::move(sequence)).first->second);
}

Sequence* SequenceTable::KeepHistories(Sequence* sequence) noexcept {
  for (int32_t g = 0; g < num_groups(); ++g) {
    sequence->histories[g].SetKeeper(KeeperOf(g), &pools_[g]);
  }
  for (int32_t s = 0; s < num_state_groups(); ++s) {
    sequence->states[s].history.SetKeeper(Keeper::kReturn, &pools_[geometry_.StatePool(s)]);
  }
  return sequence;
}

void SequenceTable::Add(int64_t id) { Insert(id); }

int64_t SequenceTable::AddWithPrefix(int64_t id, const std::string& salt, TokenSpan tokens,
                                     std::vector<PageLoad>* loads) {
  Sequence* sequence = Insert(id);
  try {
    Grow(sequence, prefixes_.Begin(sequence, salt, tokens, loads));
  } catch (...) {
    Recycle(id);
    throw;
  }
  return sequence->length;
}

void SequenceTable::FinishLoads(int64_t id, const std::vector<PageLoad>& loads) noexcept {
  prefixes_.FinishLoads(Find(id), loads);
}

void SequenceTable::CancelLoads(int64_t id, const std::vector<PageLoad>& loads) noexcept {
  prefixes_.CancelLoads(Find(id), loads);
  RemoveOne(id);
}

void SequenceTable::ForgetTexts() noexcept {
  prefixes_.hints().Clear();  // before their texts go
  for (auto& [id, sequence] : sequences_) prefixes_.Drop(&sequence);
  prefixes_.Clear();
  if (prefixes_.host_memory() != nullptr) prefixes_.host_memory()->Clear();
}

void SequenceTable::Remove(int64_t id) {
  std::shared_ptr<SequenceImport> import = Peek(id).import;
  if (import == nullptr) return RemoveOne(id);
  for (int64_t each : import->ids) RemoveOne(each);
}

void SequenceTable::RemoveOne(int64_t id) {
  Sequence& sequence = sequences_.at(id);
  FinishReceive(&sequence);
  prefixes_.Finish(&sequence);
  for (int32_t g = 0; g < num_groups(); ++g) {
    // From the end, so that the beginning, which other texts may share, is reclaimed last.
    pools_[g].ReleaseFrom(0, &sequence.pages[g]);
    sequence.histories[g].Clear(&pools_[g]);
  }
  states_.Release(&sequence);
  total_length_ -= sequence.length;
  Recycle(id);
}

void SequenceTable::Recycle(int64_t id) noexcept {
  ++num_removals_;
  Sequences::node_type node = sequences_.extract(id);
  if (spare_.size() == spare_.capacity()) return;
  Sequence& old = node.mapped();
  Sequence fresh;
  fresh.tree = std::move(old.tree);
  fresh.tree.Truncate(0);
  fresh.pages = std::move(old.pages);  // empty vectors with capacity
  fresh.histories = std::move(old.histories);
  fresh.first_pages = std::move(old.first_pages);
  fresh.states = std::move(old.states);
  std::fill(fresh.first_pages.begin(), fresh.first_pages.end(), 0);
  old = std::move(fresh);
  spare_.push_back(std::move(node));
}

void SequenceTable::Fork(int64_t parent, int64_t child, int64_t position) {
  const Sequence& source = At(parent);
  if (position < -1 || position > source.length) {
    Raise(kValueError, "fork position ", position, " of sequence ", parent, " is not in [0, ",
          source.length, "], nor -1 for its end");
  }
  if (position == -1) position = source.length;
  if (position > source.committed_length()) {
    Raise(kValueError, "cannot fork sequence ", parent, " at position ", position,
          ": positions from ", source.committed_length(),
          " on are token tree nodes that are not committed");
  }
  histories_.Require(source, position, "fork");
  const SequenceWindow window = source.window.Prefix(position);
  std::vector<std::vector<int32_t>> pages(source.pages.size());
  std::vector<int64_t> first_pages(pages.size(), 0);
  for (int32_t g = 0; g < num_groups() && position > 0; ++g) {
    const int64_t first = source.first_pages[g];
    if (geometry_.HasWindow(g)) {
      const int64_t text_length = source.window.TextLength(position);
      first_pages[g] = histories_.FirstPageAt(source, g, text_length);
      const int64_t end = std::min(first, geometry_.PagesFor(text_length));
      for (int64_t i = first_pages[g]; i < end; ++i)
        pages[g].push_back(histories_.PageBehind(source, g, i));
    } else if (window.IsSet()) {
      first_pages[g] = first;
    }
    auto begin = source.pages[g].begin();
    pages[g].insert(pages[g].end(), begin, begin + geometry_.NumPages(source, g, position));
  }

  std::unique_ptr<TokenRecord> tokens = prefixes_.ReserveFork(source);
  Sequence* target = Insert(child);
  try {
    for (int32_t s = 0; s < num_state_groups(); ++s) {
      target->states[s].pages.reserve(std::max<size_t>(source.states[s].pages.size(), 1));
    }
  } catch (...) {
    Recycle(child);
    throw;
  }
  // What follows cannot fail.
  for (int32_t g = 0; g < num_groups(); ++g) {
    for (int32_t page : pages[g]) pools_[g].AddOwner(page);
  }
  FinishReceive(&At(parent));
  for (int32_t g = 0; g < num_groups() && position > 0; ++g) {
    const int64_t num_taken_back = std::max<int64_t>(source.first_pages[g] - first_pages[g], 0);
    target->histories[g].CopyWithoutLast(source.histories[g], num_taken_back, &pools_[g]);
  }
  states_.Share(source, target, window.TextLength(position));
  target->window = window;
  if (window.TextLength(position) > source.first_unwritten) {
    target->first_unwritten = source.first_unwritten;
  }
  if (window.TextLength(position) > source.first_span) target->first_span = source.first_span;
  target->pages = std::move(pages);
  target->first_pages = std::move(first_pages);
  Grow(target, position);
  prefixes_.Fork(source, std::move(tokens), target);
}

void SequenceTable::CheckPop(int64_t id, int64_t count) const {
  const Sequence& sequence = At(id);
  if (count < 0 || count > sequence.length) {
    Raise(kValueError, "cannot pop ", count, " positions of sequence ", id, ", which has ",
          sequence.length);
  }
  const int64_t length = sequence.length - count;
  if (sequence.receive && length == sequence.receive->begin) return;  // it is cancelled
  histories_.Require(sequence, std::min(length, sequence.committed_length()), "pop");
}

void SequenceTable::Pop(int64_t id, int64_t count) {
  CheckPop(id, count);
  Sequence& sequence = At(id);
  const int64_t length = sequence.length - count;
  if (sequence.receive && length == sequence.receive->begin) return CancelReceive(&sequence);
  const int64_t num_committed = std::min(length, sequence.committed_length());
  const int64_t text_length = sequence.window.TextLength(num_committed);
  histories_.ReserveTakeBack(&sequence, text_length);
  states_.Reserve(&sequence);
  sequence.tree.Truncate(std::max<int64_t>(length - sequence.committed_length(), 0));
  FinishReceive(&sequence);
  histories_.TakeBack(&sequence, text_length);
  states_.Truncate(&sequence, text_length);
  Truncate(&sequence, length);
  // A block has rows that the sequence no longer has.
  const bool was_handed_over = sequence.send && sequence.send->next > sequence.send->begin;
  if (was_handed_over && length < sequence.send->next) sequence.send.reset();
}

void SequenceTable::CommitNodes(Sequence* sequence, const std::vector<int32_t>& path) noexcept {
  const int64_t first = sequence->committed_length();
  const int64_t length = first + static_cast<int64_t>(path.size());
  if (sequence->first_unwritten >= first) {
    // The mark moves to the first unwritten node of the path, which is in the order of the nodes.
    const auto node = std::lower_bound(path.begin(), path.end(), sequence->first_unwritten - first);
    sequence->first_unwritten = first + (node - path.begin());
  }
  sequence->tree.Truncate(0);
  Truncate(sequence, length);
  Slide(sequence);
}

void SequenceTable::NoteUnwritten(Sequence* sequence, int64_t position) noexcept {
  const int64_t text_position = sequence->window.TextPosition(position);
  sequence->first_unwritten = std::min(sequence->first_unwritten, text_position);
  prefixes_.Truncate(sequence, sequence->publishable_length());
}

void SequenceTable::NoteWritten(Sequence* sequence, int64_t begin, int64_t end) noexcept {
  const SequenceWindow& window = sequence->window;
  const int64_t first = sequence->first_unwritten;
  if (first < window.TextPosition(begin) || first >= window.TextLength(end)) return;
  sequence->first_unwritten =
      end == sequence->length ? Sequence::kAllWritten : window.TextLength(end);
}

void SequenceTable::Truncate(Sequence* sequence, int64_t length) noexcept {
  SequenceWindow& window = sequence->window;
  if (window.TextLength(length) <= sequence->first_unwritten) {
    sequence->first_unwritten = Sequence::kAllWritten;
  }
  sequence->ForgetSpansFrom(window.TextLength(length));
  const bool has_lost_window = length <= window.num_sinks;
  for (int32_t g = 0; g < num_groups(); ++g) {
    const int64_t num_pages = geometry_.NumPages(*sequence, g, length);
    pools_[g].ReleaseFrom(static_cast<size_t>(num_pages), &sequence->pages[g]);
    if (length == 0 || (has_lost_window && !geometry_.HasWindow(g))) sequence->first_pages[g] = 0;
  }
  if (has_lost_window) {
    window.num_dropped = 0;
    if (window.size == 0) window.num_sinks = 0;
  }
  Grow(sequence, length - sequence->length);
  prefixes_.Truncate(sequence, length);
}

void SequenceTable::Clear() {
  ++num_removals_;
  prefixes_.hints().Clear();
  for (auto& [id, sequence] : sequences_) {
    FinishReceive(&sequence);
    prefixes_.Drop(&sequence);
    for (int32_t g = 0; g < num_groups(); ++g) {
      pools_[g].ReleaseFrom(0, &sequence.pages[g]);
      sequence.histories[g].Clear(&pools_[g]);
    }
    states_.Release(&sequence);
  }
  prefixes_.Clear();
  sequences_.clear();
  total_length_ = 0;
}

void SequenceTable::FinishReceive(Sequence* sequence) noexcept {
  if (sequence->receive == nullptr) return;
  for (int32_t g = 0; g < num_groups(); ++g) {
    const Receive::Group& group = sequence->receive->groups[g];
    if (group.replaced >= 0) pools_[g].Release(group.replaced);
    if (geometry_.HasWindow(g)) histories_.LeaveReceiveBehind(sequence, g);
  }
  states_.DropReplaced(sequence->receive.get());
  sequence->receive.reset();
}

void SequenceTable::CancelReceive(Sequence* sequence) noexcept {
  if (sequence->receive == nullptr) return;
  Grow(sequence, sequence->receive->begin - sequence->length);
  for (int32_t g = num_groups() - 1; g >= 0; --g) {
    Receive::Group& group = sequence->receive->groups[g];
    std::vector<int32_t>& pages = sequence->pages[g];
    pools_[g].ReleaseFrom(group.num_retained, &pages);
    // Receives::Acquire has reserved the capacity.
    if (group.replaced >= 0) pages.push_back(group.replaced);
    pages.insert(pages.begin(), group.gone.begin(), group.gone.end());
    sequence->first_pages[g] = group.first_page;
  }
  states_.RestoreReplaced(sequence);
  sequence->receive.reset();
}

void SequenceTable::RaiseFull(int32_t group, int64_t num_needed, const char* what) const {
  constexpr size_t kNumNamed = 3;
  std::vector<std::pair<size_t, int64_t>> holders;
  const int32_t s = group - num_groups();
  for (const auto& [id, sequence] : sequences_) {
    const size_t num_pages = (s < 0 ? sequence.pages[group] : sequence.states[s].pages).size();
    if (num_pages > 0) holders.emplace_back(num_pages, id);
  }
  std::sort(holders.rbegin(), holders.rend());
  ClassicText who;
  for (size_t i = 0; i < std::min(kNumNamed, holders.size()); ++i) {
    who << (i == 0 ? "; most are held by sequence " : ", ") << holders[i].second << " ("
        << holders[i].first << ")";
  }
  std::string where = num_groups() > 1 ? " in layer group " + std::to_string(group) : "";
  if (s >= 0) where = " in state group " + std::to_string(s) + ", for states of recurrent layers";
  const int64_t num_hinted = prefixes_.hints().num_pins();
  if (num_hinted > 0) who << "; hints pin " << num_hinted << " pages in all groups";
  Raise(kCacheFullError, what, " needs ", num_needed, " pages, but ", pools_[group].num_available(),
        " of ", pools_[group].num_pages(), " are available", where, who.str());
}

}  // namespace pagedkv
