// SPDX-License-Identifier: Apache-2.0
/*!
 * \file checkpoint_reader.cc
 * \brief Sequences into a cache.
 */
#include "checkpoint/checkpoint_reader.h"

#include <numeric>
#include <utility>

#include "base/error.h"
#include "storage/page_io.h"
#include "storage/row_io.h"

namespace pagedkv {

ImportedSequence CheckpointReader::ImportedFrom(int64_t sequence_id,
                                                const std::string& metadata) const {
  const SequenceState state = ReadMetadata(metadata, page_groups_.layout());
  ImportedSequence imported{sequence_id, state.length, {}, {}, {}};
  for (const LayerGroup& group : step_->storage().groups()) {
    const int64_t first = state.first_pages[group.layers[0]];
    for (int64_t layer : group.layers) {
      if (state.first_pages[layer] == first) continue;
      Raise(kValueError, "checkpoint metadata: layers ", group.layers[0], " and ", layer,
            " have the same window and must have the same first_position");
    }
    imported.first_pages.push_back(first);
    imported.page_numbers.emplace_back();
  }
  // States of layers in one state group have the same pages.
  const std::vector<PageGroup>& groups = page_groups_.groups();
  const size_t num_layers = step_->storage().layers().size();
  for (size_t i = num_layers; i < groups.size(); ++i) {
    const auto s = static_cast<size_t>(groups[i].layer->state_group);
    const int64_t first = state.first_pages[i], length = state.state_lengths[i - num_layers];
    if (s == imported.state_lengths.size()) {
      imported.first_pages.push_back(first);
      imported.state_lengths.push_back(length);
      imported.page_numbers.emplace_back();
    } else if (imported.first_pages[groups[i].pool] != first ||
               imported.state_lengths[s] != length) {
      Raise(kValueError, "checkpoint metadata: the states of layer ", groups[i].layer->index,
            " must be those of the same positions as in other layers of its shape");
    }
  }
  return imported;
}

void CheckpointReader::Prepare(int64_t sequence_id, const std::string& metadata) {
  step_->phase().RequireIdle("prepare_import");
  ImportedSequence imported = ImportedFrom(sequence_id, metadata);
  for (int32_t g = 0; g < table_->geometry().num_pools(); ++g) {
    // Compare before the vector grows: the metadata may claim any length.
    const int64_t num_kept = imports_.NumPages(imported, g);
    if (num_kept > table_->pool(g).num_available()) table_->RaiseFull(g, num_kept, "the import");
    imported.page_numbers[g].resize(num_kept);
    std::iota(imported.page_numbers[g].begin(), imported.page_numbers[g].end(), 0);
  }
  imports_.Begin({std::move(imported)}, page_groups_.groups().size());
}

void CheckpointReader::PrepareMany(
    IntSpan sequence_ids, const std::vector<std::string>& metadata,
    const std::vector<std::vector<std::vector<int64_t>>>& page_numbers) {
  step_->phase().RequireIdle("prepare_imports");
  if (metadata.size() != sequence_ids.size || page_numbers.size() != sequence_ids.size) {
    Raise(kValueError, "prepare_imports needs metadata and page numbers for each of ",
          sequence_ids.size, " sequences, got ", metadata.size(), " and ", page_numbers.size());
  }
  const auto num_groups = static_cast<size_t>(table_->geometry().num_pools());
  std::vector<ImportedSequence> imported;
  for (size_t i = 0; i < sequence_ids.size; ++i) {
    imported.push_back(ImportedFrom(sequence_ids.data[i], metadata[i]));
    if (page_numbers[i].size() != num_groups) {
      Raise(kValueError, "sequence ", sequence_ids.data[i], " needs page numbers for each of ",
            num_groups, " layer groups, got ", page_numbers[i].size());
    }
    imported.back().page_numbers = page_numbers[i];
  }
  imports_.Begin(std::move(imported), page_groups_.groups().size());
}

void CheckpointReader::ImportPageGroup(int64_t sequence_id, int64_t page_group, ffi::Tensor data) {
  const SequenceImport& import = imports_.At(sequence_id);
  const PageGroup& group = page_groups_.At(page_group, "page group");
  if (import.num_arrived[page_group] > 0) {
    Raise(kValueError, "page group ", page_group, " of sequence ", sequence_id,
          " is there already");
  }
  const auto num_pages = static_cast<int64_t>(import.pages[group.pool].size());
  page_groups_.CheckTensor("data", data, page_group, num_pages);
  ImportPages(sequence_id, page_group, std::move(data));
}

void CheckpointReader::ImportPages(int64_t sequence_id, int64_t page_group, ffi::Tensor data) {
  step_->phase().RequireIdle("the import of pages");
  SequenceImport& import = imports_.At(sequence_id);
  const PageGroup& group = page_groups_.At(page_group, "layer");
  if (!data.defined()) Raise(kTypeError, "data must be a tensor, got None");
  const int64_t num_pages = data.ndim() > 1 ? data.size(1) : 0;
  page_groups_.CheckTensor("data", data, page_group, num_pages);
  const std::vector<int64_t> pages = NextPages(import, page_group, num_pages);
  const StreamOrder::Call on_stream(&step_->stream_order());
  group.has_states ? WriteStates(*group.layer, pages, data) : WritePages(*group.layer, pages, data);
  import.num_arrived[page_group] += num_pages;
}

std::vector<int64_t> CheckpointReader::NextPages(const SequenceImport& import, int64_t page_group,
                                                 int64_t num_pages) const {
  const std::vector<int32_t>& pages = import.pages[page_groups_.groups()[page_group].pool];
  const int64_t num_arrived = import.num_arrived[page_group];
  const int64_t num_missing = static_cast<int64_t>(pages.size()) - num_arrived;
  if (num_pages > num_missing) {
    Raise(kValueError, "layer ", page_group, " lacks ", num_missing, " pages, got ", num_pages);
  }
  const auto begin = pages.begin() + num_arrived;
  return {begin, begin + num_pages};
}

void CheckpointReader::ImportRows(int64_t sequence_id, int64_t layer_index, ffi::Tensor k,
                                  ffi::Optional<ffi::Tensor> v) {
  step_->phase().RequireIdle("the import of rows");
  SequenceImport& import = imports_.At(sequence_id);
  const PageGroup& group = page_groups_.At(layer_index, "layer");
  const StoredLayer& layer = *group.layer;
  const LayerConfig& config = layer.config;
  if (group.has_states || !config.is_attention()) {
    Raise(kValueError, "layer ", layer_index, " has no rows of K and V");
  }
  if (!k.defined()) Raise(kTypeError, "k must be a tensor, got None");
  if (v.has_value() == config.is_mla()) {
    Raise(kTypeError, "v must be ", config.is_mla() ? "None for an MLA layer" : "a tensor");
  }
  const int64_t page_size = table_->page_size(), num_rows = k.ndim() > 0 ? k.size(0) : 0;
  if (num_rows % page_size) {
    Raise(kValueError, "the rows of whole pages are a multiple of ", page_size, ", got ", num_rows);
  }
  TensorChecks& tensors = step_->tensors();
  const DLDataType dtype = step_->storage().RowDtype(config);
  LayerRows rows{std::move(k), v.value_or(ffi::Tensor())};
  if (config.is_mla()) {
    tensors.CheckInput("k", rows.k, {num_rows, config.qk_head_dim}, dtype);
    tensors.MakeCompact({&rows.k}, Alignment::kElement);
  } else {
    tensors.CheckInput("k", rows.k, {num_rows, config.num_kv_heads, config.qk_head_dim}, dtype);
    tensors.CheckInput("v", rows.v, {num_rows, config.num_kv_heads, config.v_head_dim}, dtype);
    tensors.MakeCompact({&rows.k, &rows.v}, Alignment::kElement);
  }
  std::vector<int32_t> slots;
  for (int64_t page : NextPages(import, layer_index, num_rows / page_size)) {
    for (int64_t i = 0; i < page_size; ++i) {
      slots.push_back(page < 0 ? -1 : static_cast<int32_t>(page * page_size + i));
    }
  }
  const StreamOrder::Call on_stream(&step_->stream_order());
  const StepPhase::Change change(&step_->phase());
  WriteRows(layer, slots, rows);
  import.num_arrived[layer_index] += num_rows / page_size;
}

void CheckpointReader::Finish(int64_t sequence_id) {
  step_->phase().RequireIdle("finish_import");
  const SequenceImport& import = imports_.At(sequence_id);
  const std::vector<PageGroup>& groups = page_groups_.groups();
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto num_pages = static_cast<int64_t>(import.pages[groups[i].pool].size());
    const int64_t num_arrived = import.num_arrived[i];
    if (num_arrived == num_pages) continue;
    Raise(kValueError, "the import of sequence ", sequence_id, " lacks page group ", i, ": ",
          num_arrived, " of its ", num_pages, " pages are there");
  }
  imports_.Finish(sequence_id);
}

}  // namespace pagedkv
