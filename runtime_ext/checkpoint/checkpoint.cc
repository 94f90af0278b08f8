// SPDX-License-Identifier: Apache-2.0
/*!
 * \file checkpoint.cc
 * \brief Checkpoints of sequences: pages out of a cache, and into it in a transaction.
 *
 * prepare_import checks everything and takes the pages; the page groups follow in any order;
 * finish_import makes the sequence usable once all are there. Until then it may be removed only,
 * and everything else in the cache works as ever. An import of several sequences (`load`) brings
 * the pages that they share once.
 */
#include <tvm/ffi/dtype.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "checkpoint/checkpoint_metadata.h"
#include "ffi/paged_kv_cache.h"

namespace pagedkv {

namespace {

/*! \brief For memory that is not the cache's. */
ByteCounter NewCounter() { return std::make_shared<std::atomic<int64_t>>(0); }

const char* ToString(RopeMode mode) {
  constexpr const char* kNames[] = {"none", "normal", "inline"};
  return kNames[static_cast<int>(mode)];
}

bool IsHost(DLDevice device) {
  return device.device_type == kDLCPU || device.device_type == kDLCUDAHost ||
         device.device_type == kDLROCMHost;
}

bool Equal(DLDevice a, DLDevice b) {
  return a.device_type == b.device_type && a.device_id == b.device_id;
}

std::vector<int64_t> Range(size_t count) {
  std::vector<int64_t> numbers(count);
  for (size_t i = 0; i < count; ++i) numbers[i] = static_cast<int64_t>(i);
  return numbers;
}

}  // namespace

/*! \brief What beside theta and scale decides the rotation, in words. */
std::string PagedKVCacheObj::RopeDetails(const LayerConfig& layer) const {
  const ffi::Tensor& factors = config_.rope_ext_factors;
  if (!factors.defined()) return layer.rope_details;
  const auto num_bytes = static_cast<int64_t>(ffi::GetDataSize(*factors.GetDLTensorPtr()));
  std::string bytes(num_bytes, '\0');
  ffi::Tensor host = AllocateTensor({num_bytes}, kByte, {kDLCPU, 0}, NewCounter());
  void* stream = CurrentStream(config_.device);
  CopyBytes(factors, 0, host, 0, num_bytes, stream);
  if (!IsHost(config_.device)) Synchronize(config_.device, stream);
  std::memcpy(bytes.data(), host.data_ptr(), num_bytes);
  return layer.rope_details + " factors=" + HexHash(bytes);
}

CheckpointLayout PagedKVCacheObj::MakeCheckpointLayout() const {
  CheckpointLayout layout;
  layout.page_size = config_.page_size;
  layout.dtype = ffi::DLDataTypeToString(config_.kv_dtype);
  layout.item_bytes = config_.kv_dtype.bits / 8;
  for (const Layer& layer : layers_) {
    const LayerConfig& config = layer.config;
    layout.layers.push_back({pagedkv::ToString(config), config.window, config.num_kv_heads,
                             config.qk_head_dim, config.v_head_dim,
                             RopeText(ToString(config_.rope_mode), config.rope_theta,
                                      config.rope_scale, RopeDetails(config))});
  }
  // Layers of one stage may look like those of another.
  if (layout.num_layers() < config_.stage.num_layers()) {
    layout.part = "of " + std::to_string(config_.stage.num_layers()) + " layers:";
    for (const Layer& layer : layers_) layout.part += " " + std::to_string(layer.config.id);
  }
  return layout;
}

// --- the state of a sequence: whatever Sequence gains must pass through these two ----------------

SequenceState PagedKVCacheObj::StateOf(const Sequence& sequence) const {
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
  SequenceState state{sequence.length, {}};
  for (const Layer& layer : layers_) {
    state.first_pages.push_back(sequence.first_pages[layer.group]);
  }
  return state;
}

ImportedSequence PagedKVCacheObj::ImportedFrom(int64_t sequence_id,
                                               const std::string& metadata) const {
  const SequenceState state = ReadMetadata(metadata, checkpoint_layout_);
  ImportedSequence imported{sequence_id, state.length, {}, {}};
  for (const Group& group : groups_) {
    const int64_t first = state.first_pages[group.layers[0]];
    for (int64_t layer : group.layers) {
      if (state.first_pages[layer] == first) continue;
      Raise(kValueError, "checkpoint metadata: layers ", group.layers[0], " and ", layer,
            " have the same window and must have the same first_position");
    }
    imported.first_pages.push_back(first);
    imported.page_numbers.emplace_back();
  }
  return imported;
}

// --- page groups --------------------------------------------------------------------------------

void PagedKVCacheObj::CheckPageGroup(const char* name, const ffi::Tensor& tensor, int64_t layer,
                                     int64_t num_pages) const {
  if (!tensor.defined()) Raise(kTypeError, name, " must be a tensor, got None");
  const std::vector<int64_t> expected = checkpoint_layout_.GroupShape(layer, num_pages);
  ffi::ShapeView actual = tensor.shape();
  if (!std::equal(actual.begin(), actual.end(), expected.begin(), expected.end())) {
    auto text = [](const auto& shape) {
      std::string list;
      for (int64_t extent : shape) list += (list.empty() ? "" : ", ") + std::to_string(extent);
      return "[" + list + "]";
    };
    Raise(kValueError, name, " must have shape ", text(expected), ", got ", text(actual));
  }
  const std::string dtype = ffi::DLDataTypeToString(tensor.dtype());
  if (dtype != checkpoint_layout_.dtype) {
    Raise(kValueError, name, " must be ", checkpoint_layout_.dtype, ", got ", dtype);
  }
  if (!IsHost(tensor.device()) && !Equal(tensor.device(), config_.device)) {
    Raise(kValueError, name, " must be on the cache's device (type ", config_.device.device_type,
          ", id ", config_.device.device_id, ") or on the host, got type ",
          tensor.device().device_type, ", id ", tensor.device().device_id);
  }
  if (!tensor.IsContiguous()) Raise(kValueError, name, " must be contiguous");
}

void PagedKVCacheObj::CheckLayerId(int64_t layer, const char* what) const {
  if (layer >= 0 && layer < checkpoint_layout_.num_layers()) return;
  Raise(kIndexError, what, " ", layer, " is not in [0, ", checkpoint_layout_.num_layers(),
        "): there is one for each layer");
}

/*! \brief Calls copy(first of the pages, count) for every run of pages that follow one another. */
template <typename PageId, typename Copy>
void PagedKVCacheObj::CopyRuns(const PageId* pages, int64_t num_pages, const ffi::Tensor& tensor,
                               Copy copy) const {
  for (int64_t begin = 0, end; begin < num_pages; begin = end) {
    for (end = begin + 1; end < num_pages && pages[end] == pages[end - 1] + 1;) ++end;
    copy(begin, end - begin);
  }
  // Memory of the host is the caller's own at once.
  if (Equal(tensor.device(), config_.device) || IsHost(config_.device)) return;
  Synchronize(config_.device, CurrentStream(config_.device));
}

template <typename PageId>
void PagedKVCacheObj::ReadPages(int64_t layer, const PageId* pages, int64_t num_pages,
                                const std::vector<int64_t>& num_slots,
                                const ffi::Tensor& out) const {
  const int64_t page_bytes = checkpoint_layout_.PageBytes(layer);
  const ffi::Tensor& pool = layers_[layer].pages;
  const StreamOrder::Call on_stream(&stream_order_);
  void* stream = CurrentStream(config_.device);
  CopyRuns(pages, num_pages, out, [&](int64_t begin, int64_t count) {
    CopyBytes(pool, pages[begin] * page_bytes, out, begin * page_bytes, count * page_bytes, stream);
  });
  // What was never written does not leave the cache: slots that are not in use are zero.
  const LayerConfig& config = layers_[layer].config;
  const int64_t row_bytes = config.qk_head_dim * checkpoint_layout_.item_bytes;
  const int64_t block_bytes = config_.page_size * row_bytes;
  ffi::Tensor zeros = AllocateTensor({block_bytes}, kByte, {kDLCPU, 0}, NewCounter());
  std::fill_n(static_cast<char*>(zeros.data_ptr()), block_bytes, '\0');
  for (int64_t i = 0; i < num_pages; ++i) {
    const int64_t used = num_slots[i] * row_bytes;
    for (int64_t block = 0; block < config.rows_per_slot() && used < block_bytes; ++block) {
      const int64_t offset = i * page_bytes + block * block_bytes + used;
      if (IsHost(out.device())) {
        auto* host = static_cast<char*>(out.data_ptr()) + out.byte_offset();
        std::memset(host + offset, 0, block_bytes - used);
      } else {
        CopyBytes(zeros, 0, out, offset, block_bytes - used, stream);
      }
    }
  }
}

void PagedKVCacheObj::WritePages(int64_t layer, const int32_t* pages, int64_t num_pages,
                                 const ffi::Tensor& data) {
  const int64_t page_bytes = checkpoint_layout_.PageBytes(layer);
  const StreamOrder::Call on_stream(&stream_order_);
  void* stream = CurrentStream(config_.device);
  CopyRuns(pages, num_pages, data, [&](int64_t begin, int64_t count) {
    CopyBytes(data, begin * page_bytes, layers_[layer].pages, pages[begin] * page_bytes,
              count * page_bytes, stream);
  });
}

// --- out of the cache ---------------------------------------------------------------------------

ffi::String PagedKVCacheObj::LayoutHash() const { return checkpoint_layout_.Hash(); }

ffi::String PagedKVCacheObj::CheckpointMetadata(int64_t sequence_id) const {
  RequireIdle("get_checkpoint_metadata");
  return WriteMetadata(checkpoint_layout_, sequence_id, StateOf(table_.At(sequence_id)));
}

void PagedKVCacheObj::ExportPageGroup(int64_t sequence_id, int64_t layer, ffi::Tensor out) const {
  RequireIdle("export_page_group");
  const Sequence& sequence = table_.At(sequence_id);
  StateOf(sequence);  // throws where there is no checkpoint of it
  CheckLayerId(layer, "page group");
  const int32_t group = layers_[layer].group;
  const std::vector<int32_t>& pages = sequence.pages[group];
  const auto num_pages = static_cast<int64_t>(pages.size());
  CheckPageGroup("out", out, layer, num_pages);
  std::vector<int64_t> num_slots(pages.size(), config_.page_size);
  if (num_pages > 0) {
    num_slots.back() = sequence.length - (table_.PagesFor(sequence.length) - 1) * config_.page_size;
  }
  ReadPages(layer, pages.data(), num_pages, num_slots, out);
}

void PagedKVCacheObj::ExportPages(int64_t layer, ffi::Shape pages, ffi::Shape num_slots,
                                  ffi::Tensor out) const {
  RequireIdle("export_pages");
  CheckLayerId(layer, "layer");
  if (pages.size() != num_slots.size()) {
    Raise(kValueError, "export_pages needs a number of slots for each page, got ", pages.size(),
          " pages and ", num_slots.size(), " numbers");
  }
  const int64_t num_pool = table_.pool(layers_[layer].group).num_pages();
  for (size_t i = 0; i < pages.size(); ++i) {
    if (pages[i] < 0 || pages[i] >= num_pool) {
      Raise(kIndexError, "page ", pages[i], " is not in [0, ", num_pool, ")");
    }
    if (num_slots[i] < 0 || num_slots[i] > config_.page_size) {
      Raise(kValueError, "a page has 0 to ", config_.page_size, " slots in use, got ",
            num_slots[i]);
    }
  }
  CheckPageGroup("out", out, layer, static_cast<int64_t>(pages.size()));
  ReadPages(layer, pages.data(), static_cast<int64_t>(pages.size()),
            {num_slots.begin(), num_slots.end()}, out);
}

// --- into it ------------------------------------------------------------------------------------

void PagedKVCacheObj::PrepareImport(int64_t sequence_id, ffi::String metadata) {
  RequireIdle("prepare_import");
  ImportedSequence imported = ImportedFrom(sequence_id, metadata);
  const int64_t num_pages = table_.PagesFor(imported.length);
  for (size_t g = 0; g < groups_.size(); ++g) {
    // Before there are as many numbers: the text may claim any length.
    const auto num_kept = static_cast<size_t>(num_pages - imported.first_pages[g]);
    if (num_kept > static_cast<size_t>(table_.pool(g).num_available())) {
      table_.RaiseFull(static_cast<int32_t>(g), static_cast<int64_t>(num_kept), "the import");
    }
    imported.page_numbers[g] = Range(num_kept);
  }
  table_.BeginImport({std::move(imported)}, layers_.size());
}

void PagedKVCacheObj::PrepareImports(ffi::Shape sequence_ids, ffi::Array<ffi::String> metadata,
                                     ffi::Array<ffi::Array<ffi::Shape>> page_numbers) {
  RequireIdle("prepare_imports");
  if (metadata.size() != sequence_ids.size() || page_numbers.size() != sequence_ids.size()) {
    Raise(kValueError, "prepare_imports needs metadata and page numbers for each of ",
          sequence_ids.size(), " sequences, got ", metadata.size(), " and ", page_numbers.size());
  }
  std::vector<ImportedSequence> imported;
  for (size_t i = 0; i < sequence_ids.size(); ++i) {
    imported.push_back(ImportedFrom(sequence_ids[i], metadata[i]));
    if (page_numbers[i].size() != groups_.size()) {
      Raise(kValueError, "sequence ", sequence_ids[i], " needs page numbers for each of ",
            groups_.size(), " layer groups, got ", page_numbers[i].size());
    }
    for (size_t g = 0; g < groups_.size(); ++g) {
      ffi::Shape numbers = page_numbers[i][g];
      imported.back().page_numbers[g].assign(numbers.begin(), numbers.end());
    }
  }
  table_.BeginImport(std::move(imported), layers_.size());
}

void PagedKVCacheObj::ImportPageGroup(int64_t sequence_id, int64_t layer, ffi::Tensor data) {
  const SequenceImport& import = table_.ImportOf(sequence_id);
  CheckLayerId(layer, "page group");
  if (import.num_arrived[layer] > 0) {
    Raise(kValueError, "page group ", layer, " of sequence ", sequence_id, " is there already");
  }
  const auto num_pages = static_cast<int64_t>(import.pages[layers_[layer].group].size());
  CheckPageGroup("data", data, layer, num_pages);
  ImportPages(sequence_id, layer, std::move(data));
}

void PagedKVCacheObj::ImportPages(int64_t sequence_id, int64_t layer, ffi::Tensor data) {
  RequireIdle("the import of pages");
  SequenceImport& import = table_.ImportOf(sequence_id);
  CheckLayerId(layer, "layer");
  if (!data.defined()) Raise(kTypeError, "data must be a tensor, got None");
  const std::vector<int32_t>& pages = import.pages[layers_[layer].group];
  const int64_t num_pages = data.ndim() > 1 ? data.size(1) : 0;
  CheckPageGroup("data", data, layer, num_pages);
  const int64_t num_missing = static_cast<int64_t>(pages.size()) - import.num_arrived[layer];
  if (num_pages > num_missing) {
    Raise(kValueError, "layer ", layer, " lacks ", num_missing, " pages, got ", num_pages);
  }
  WritePages(layer, pages.data() + import.num_arrived[layer], num_pages, data);
  import.num_arrived[layer] += num_pages;
}

void PagedKVCacheObj::FinishImport(int64_t sequence_id) {
  RequireIdle("finish_import");
  const SequenceImport& import = table_.ImportOf(sequence_id);
  for (size_t l = 0; l < layers_.size(); ++l) {
    const auto num_pages = static_cast<int64_t>(import.pages[layers_[l].group].size());
    if (import.num_arrived[l] == num_pages) continue;
    Raise(kValueError, "the import of sequence ", sequence_id, " lacks page group ", l, ": ",
          import.num_arrived[l], " of its ", num_pages, " pages are there");
  }
  table_.FinishImport(sequence_id);
}

}  // namespace pagedkv
