// SPDX-License-Identifier: Apache-2.0
/*!
 * \file checkpoint_writer.cc
 * \brief Sequences out of a cache.
 */
#include "checkpoint/checkpoint_writer.h"

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "storage/page_io.h"

namespace pagedkv {

// Whatever Sequence gains must pass through this and CheckpointReader::ImportedFrom.
SequenceState CheckpointWriter::StateOf(const Sequence& sequence, bool with_history) const {
  if (sequence.receive != nullptr) {
    Raise(kValueError, "sequence ", sequence.id, " is receiving positions from ",
          sequence.receive->begin, " on; a checkpoint needs them received first");
  }
  if (sequence.tree.size() > 0) {
    Raise(kValueError, "sequence ", sequence.id, " has ", sequence.tree.size(),
          " tree nodes that are not committed; a checkpoint needs them committed first");
  }
  if (sequence.window.IsSet()) {
    Raise(kValueError, "sequence ", sequence.id, " has ",
          sequence.window.size > 0 ? "a sliding window" : "dropped positions behind its sinks",
          "; there are no checkpoints of such sequences");
  }
  RequireWritten(sequence, sequence.length, "be saved");
  SequenceState state{sequence.length, {}, {}};
  for (const PageGroup& group : page_groups_.groups()) {
    int64_t end_page = table_.geometry().PagesFor(sequence.length);
    if (group.has_states) {
      const SequenceStates& states = sequence.states[group.layer->state_group];
      end_page = states.end_page();
      state.state_lengths.push_back(states.length);
    }
    const auto num_pages = static_cast<int64_t>(PagesOf(sequence, group, with_history).size());
    state.first_pages.push_back(end_page - num_pages);
  }
  return state;
}

std::vector<int64_t> CheckpointWriter::PagesOf(const Sequence& sequence, const PageGroup& group,
                                               bool with_history) const {
  std::vector<int64_t> pages;
  if (with_history) {
    const PagePool& pool = table_.pool(group.pool);
    const PageHistory& history = group.HistoryOf(sequence);
    for (int64_t distance = 1; history.Find(distance, pool) >= 0; ++distance) {
      pages.push_back(history.Find(distance, pool));
    }
    std::reverse(pages.begin(), pages.end());
  }
  const std::vector<int32_t>& held = group.PagesOf(sequence);
  pages.insert(pages.end(), held.begin(), held.end());
  return pages;
}

std::string CheckpointWriter::MetadataWith(int64_t sequence_id, bool with_history) const {
  step_->phase().RequireIdle("get_checkpoint_metadata");
  return WriteMetadata(page_groups_.layout(), sequence_id,
                       StateOf(table_.At(sequence_id), with_history));
}

std::vector<int64_t> CheckpointWriter::PagesWith(int64_t sequence_id, int64_t page_group,
                                                 bool with_history) const {
  step_->phase().RequireIdle("checkpoint_pages");
  const Sequence& sequence = table_.At(sequence_id);
  return PagesOf(sequence, page_groups_.At(page_group, "page group"), with_history);
}

void CheckpointWriter::ExportPageGroup(int64_t sequence_id, int64_t page_group,
                                       ffi::Tensor out) const {
  step_->phase().RequireIdle("export_page_group");
  const Sequence& sequence = table_.At(sequence_id);
  StateOf(sequence, /*with_history=*/false);  // throws where there is no checkpoint of it
  const PageGroup& group = page_groups_.At(page_group, "page group");
  const std::vector<int64_t> pages = PagesOf(sequence, group, /*with_history=*/false);
  page_groups_.CheckTensor("out", out, page_group, static_cast<int64_t>(pages.size()));
  const int64_t page_size = table_.page_size();
  std::vector<int64_t> num_slots(pages.size(), page_size);
  if (!pages.empty()) {
    num_slots.back() =
        sequence.length - (table_.geometry().PagesFor(sequence.length) - 1) * page_size;
  }
  const StreamOrder::Call on_stream(&step_->stream_order());
  if (group.has_states) return ReadStates(*group.layer, pages, out);
  ReadPages(*group.layer, pages, num_slots, out);
}

void CheckpointWriter::ExportPages(int64_t page_group, IntSpan pages, IntSpan num_slots,
                                   ffi::Tensor out) const {
  step_->phase().RequireIdle("export_pages");
  const PageGroup& group = page_groups_.At(page_group, "layer");
  if (pages.size != num_slots.size) {
    Raise(kValueError, "export_pages needs a number of slots for each page, got ", pages.size,
          " pages and ", num_slots.size, " numbers");
  }
  const int64_t num_pool = table_.pool(group.pool).num_pages();
  for (size_t i = 0; i < pages.size; ++i) {
    if (pages.data[i] < 0 || pages.data[i] >= num_pool) {
      Raise(kIndexError, "page ", pages.data[i], " is not in [0, ", num_pool, ")");
    }
    if (num_slots.data[i] < 0 || num_slots.data[i] > table_.page_size()) {
      Raise(kValueError, "a page has 0 to ", table_.page_size(), " slots in use, got ",
            num_slots.data[i]);
    }
  }
  page_groups_.CheckTensor("out", out, page_group, static_cast<int64_t>(pages.size));
  const StreamOrder::Call on_stream(&step_->stream_order());
  const std::vector<int64_t> ids(pages.data, pages.data + pages.size);
  if (group.has_states) return ReadStates(*group.layer, ids, out);
  ReadPages(*group.layer, ids, {num_slots.data, num_slots.data + num_slots.size}, out);
}

}  // namespace pagedkv
