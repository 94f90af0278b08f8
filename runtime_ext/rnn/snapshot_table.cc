// SPDX-License-Identifier: Apache-2.0
/*!
 * \file snapshot_table.cc
 * \brief Sequences and their snapshots.
 */
#include "rnn/snapshot_table.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "base/error.h"

namespace pagedkv {

SnapshotTable::SnapshotTable(int64_t max_num_sequences, int64_t max_history)
    : max_num_sequences_(max_num_sequences),
      pool_(static_cast<int32_t>(max_num_sequences * max_history)) {}

const SnapshotTable::Sequence& SnapshotTable::At(int64_t id) const {
  auto it = sequences_.find(id);
  if (it == sequences_.end()) Raise(kKeyError, "no sequence ", id, " in the RNN state");
  return it->second;
}

void SnapshotTable::RequireRoom(int64_t id) const {
  if (id < 0) Raise(kValueError, "a sequence id must be at least 0, got ", id);
  if (sequences_.count(id)) Raise(kValueError, "sequence ", id, " is in the RNN state already");
  if (num_sequences() == max_num_sequences_) {
    Raise(kCacheFullError, "the RNN state has ", max_num_sequences_,
          " sequences already, which is reserved_num_seqs");
  }
}

void SnapshotTable::Clear() {
  while (!sequences_.empty()) Remove(sequences_.begin()->first);
}

// Sequences own at most one page each, so there is always one for a sequence without.
int32_t SnapshotTable::Add(int64_t id) {
  RequireRoom(id);
  Sequence& sequence = sequences_[id];
  sequence.page = pool_.Allocate();
  return sequence.page;
}

void SnapshotTable::Remove(int64_t id) {
  Sequence& sequence = At(id);
  Truncate(&sequence, 0);
  pool_.Release(sequence.page);
  sequences_.erase(id);
}

bool SnapshotTable::CanLocate(const Sequence& sequence, int64_t position) const {
  if (position == 0 || position == sequence.length) return true;
  return std::any_of(sequence.kept.begin(), sequence.kept.end(), [&](const Snapshot& snapshot) {
    return snapshot.position == position && IsKept(snapshot);
  });
}

int32_t SnapshotTable::Locate(const Sequence& sequence, int64_t id, int64_t position) const {
  if (!CanLocate(sequence, position)) {
    Raise(kValueError, "the state of sequence ", id, " at position ", position,
          " is not kept: the RNN state has one snapshot at the end of each step, and evicts old "
          "ones when it needs their pages");
  }
  if (position == sequence.length) return sequence.page;
  for (const Snapshot& snapshot : sequence.kept) {
    if (snapshot.position == position && IsKept(snapshot)) return snapshot.page;
  }
  return kNone;
}

int64_t SnapshotTable::ForkPosition(const Sequence& parent, int64_t id, int64_t position) {
  if (position == -1) return parent.length;
  if (position < 0 || position > parent.length) {
    Raise(kValueError, "cannot fork sequence ", id, " of length ", parent.length, " at position ",
          position);
  }
  return position;
}

int64_t SnapshotTable::PositionAfterPop(const Sequence& sequence, int64_t id, int64_t count) {
  if (count < 0 || count > sequence.length) {
    Raise(kValueError, "cannot pop ", count, " tokens of sequence ", id, " of length ",
          sequence.length);
  }
  return sequence.length - count;
}

bool SnapshotTable::CanFork(int64_t parent_id, int64_t position) const {
  const Sequence& parent = At(parent_id);
  return CanLocate(parent, ForkPosition(parent, parent_id, position));
}

bool SnapshotTable::CanPopN(int64_t id, int64_t count) const {
  const Sequence& sequence = At(id);
  return CanLocate(sequence, PositionAfterPop(sequence, id, count));
}

int32_t SnapshotTable::Fork(int64_t parent_id, int64_t child_id, int64_t position) {
  const Sequence& parent = At(parent_id);
  Sequence child;
  child.length = ForkPosition(parent, parent_id, position);
  child.page = Locate(parent, parent_id, child.length);
  RequireRoom(child_id);
  for (const Snapshot& snapshot : parent.kept) {
    if (snapshot.position < child.length && IsKept(snapshot)) child.kept.push_back(snapshot);
  }
  Sequence& added = sequences_[child_id];
  added = std::move(child);
  for (const Snapshot& snapshot : added.kept) pool_.AddKeeper(snapshot.page);
  if (added.page != kNone) {
    pool_.AddOwner(added.page);
    return kNone;
  }
  added.page = pool_.Allocate();
  return added.page;
}

int32_t SnapshotTable::PopN(int64_t id, int64_t count) {
  Sequence& sequence = At(id);
  const int64_t position = PositionAfterPop(sequence, id, count);
  if (count == 0) return kNone;
  const int32_t page = Locate(sequence, id, position);
  if (page != kNone) pool_.AddOwner(page);
  Truncate(&sequence, position);
  pool_.Release(sequence.page);
  sequence.length = position;
  sequence.page = page != kNone ? page : pool_.Allocate();
  return page != kNone ? kNone : sequence.page;
}

void SnapshotTable::Truncate(Sequence* sequence, int64_t position) {
  std::vector<Snapshot>& kept = sequence->kept;
  for (; !kept.empty() && kept.back().position >= position; kept.pop_back()) {
    if (IsKept(kept.back())) pool_.DropKeeper(kept.back().page);
  }
}

void SnapshotTable::DropEvicted(Sequence* sequence) const {
  std::vector<Snapshot>& kept = sequence->kept;
  kept.erase(std::remove_if(kept.begin(), kept.end(),
                            [&](const Snapshot& snapshot) { return !IsKept(snapshot); }),
             kept.end());
}

void SnapshotTable::Begin(IntSpan ids, IntSpan append_lengths) {
  if (ids.size != append_lengths.size) {
    Raise(kValueError, "a step needs one append length for each sequence, got ", ids.size,
          " sequences and ", append_lengths.size, " lengths");
  }
  if (ids.size == 0) Raise(kValueError, "a step needs at least one sequence, got none");
  std::vector<StepItem> items;
  std::unordered_set<int64_t> seen;
  std::unordered_map<int32_t, int32_t> num_in_step;  // owners of a page that are in the step
  for (size_t i = 0; i < ids.size; ++i) {
    const int64_t id = ids.data[i], num_append = append_lengths.data[i];
    const Sequence& sequence = At(id);
    if (!seen.insert(id).second) Raise(kValueError, "sequence ", id, " is twice in the step");
    if (num_append < 1 || num_append > kMaxLength - sequence.length) {
      Raise(kValueError, "the append length of sequence ", id, " must be from 1 to ",
            kMaxLength - sequence.length, ", got ", num_append);
    }
    items.push_back({id, num_append, sequence.page, sequence.page, true});
    ++num_in_step[sequence.page];
  }
  std::unordered_map<int32_t, int32_t> num_left = num_in_step;
  std::unordered_set<int32_t> overwritten;
  for (const StepItem& item : items) {  // now, because End must not fail
    Sequence& sequence = At(item.id);
    DropEvicted(&sequence);
    sequence.kept.reserve(sequence.kept.size() + 1);
  }
  // If all owners of a page are in the step, the last of them may write it in place. The others
  // need a page each, and there is one, because a sequence owns one page and the pool has at least
  // as many pages as there may be sequences.
  allocated_.clear();
  allocated_.reserve(items.size());
  const auto allocate = [&](StepItem* item) {
    item->write = pool_.Allocate();
    allocated_.push_back(item->write);
  };
  std::vector<StepItem*> last_owners;
  last_owners.reserve(items.size());
  for (StepItem& item : items) {
    const int32_t num_others = pool_.RefCount(item.read) - num_in_step[item.read];
    if (--num_left[item.read] == 0 && num_others == 0) {
      last_owners.push_back(&item);
    } else {
      allocate(&item);
    }
  }
  for (StepItem* item : last_owners) {
    if (pool_.num_available() > 0) {
      allocate(item);
    } else {
      overwritten.insert(item->read);
    }
  }
  for (StepItem& item : items) item.keeps_read = overwritten.count(item.read) == 0;
  step_ = std::move(items);
  is_written_ = false;
}

void SnapshotTable::BeginWrite() {
  if (is_written_) return;
  is_written_ = true;
  for (const StepItem& item : step_) {
    if (item.write == item.read) pool_.Overwrite(item.read);
  }
}

bool SnapshotTable::HasWrittenInPlace() const {
  return is_written_ && std::any_of(step_.begin(), step_.end(),
                                    [](const StepItem& item) { return item.write == item.read; });
}

void SnapshotTable::ReturnPages() {
  for (; !allocated_.empty(); allocated_.pop_back()) {
    if (is_written_) {
      pool_.Release(allocated_.back());
    } else {
      pool_.Unallocate(allocated_.back());
    }
  }
}

void SnapshotTable::Abort() {
  ReturnPages();
  step_.clear();
}

void SnapshotTable::End() {
  if (!is_written_) {
    ReturnPages();
    for (StepItem& item : step_) item.write = item.read;
  }
  for (const StepItem& item : step_) {
    Sequence& sequence = At(item.id);
    if (!is_written_ || item.keeps_read) {
      // Steps that write nothing would add snapshots without end.
      if (static_cast<int32_t>(sequence.kept.size()) >= pool_.num_pages()) {
        if (IsKept(sequence.kept.front())) pool_.DropKeeper(sequence.kept.front().page);
        sequence.kept.erase(sequence.kept.begin());
      }
      sequence.kept.push_back({sequence.length, item.read, pool_.Generation(item.read)});
      pool_.AddKeeper(item.read);
    }
    if (item.write != item.read) pool_.Release(item.read);
    sequence.page = item.write;
    sequence.length += item.num_append;
  }
  step_.clear();
}

void SnapshotTable::CheckIntegrity() const {
  std::vector<int32_t> owners(pool_.num_pages(), 0), keepers(pool_.num_pages(), 0);
  for (const auto& [id, sequence] : sequences_) {
    ++owners[sequence.page];
    int64_t last = -1;
    for (const Snapshot& snapshot : sequence.kept) {
      if (snapshot.position <= last || snapshot.position >= sequence.length) {
        Raise(kRuntimeError, "sequence ", id, " has its snapshots out of order");
      }
      last = snapshot.position;
      keepers[snapshot.page] += IsKept(snapshot);
    }
  }
  for (const StepItem& item : step_) {
    if (item.write != item.read) ++owners[item.write];
  }
  pool_.CheckIntegrity(owners, keepers);
}

}  // namespace pagedkv
