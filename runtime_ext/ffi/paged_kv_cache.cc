// SPDX-License-Identifier: Apache-2.0
/*!
 * \file paged_kv_cache.cc
 * \brief The cache object: making, sequences, and the step.
 */
#include "ffi/paged_kv_cache.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"

namespace pagedkv {

namespace {

int64_t ItemSize(DLDataType dtype) { return dtype.bits / 8; }

}  // namespace

PagedKVCacheObj::PagedKVCacheObj(CacheConfig config)
    : config_(std::move(config)),
      stream_order_(config_.device),
      allocated_bytes_(std::make_shared<std::atomic<int64_t>>(0)),
      groups_(MakeGroups(config_)),
      layers_(MakeLayers()),
      checkpoint_layout_(MakeCheckpointLayout()),
      table_(config_.max_num_sequences, static_cast<int32_t>(config_.page_size),
             NumPages(config_, groups_), Windows(groups_)),
      plan_(&table_, config_.prefill_chunk_size),
      page_pool_bytes_(*allocated_bytes_) {
  const int64_t min_saved_positions =
      config_.device.device_type == kDLCPU ? kMinSavedPositions : kMinSavedPositionsOnDevice;
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (!CanSharePrefixes(groups_[g])) continue;
    plan_.SharePrefixes(static_cast<int32_t>(g), min_saved_positions);
  }
  AllocateWorkspaces();
  array_sizes_ = InitialArraySizes();
  static_assert(kTreeOrder == 0);
  aux_ = std::make_unique<AuxData>(config_.has_merged_aux, config_.device, array_sizes_,
                                   allocated_bytes_, std::vector<std::vector<int64_t>>{{2}});
  MakeCopyArrays();
  if (FlashInferBackend::IsNeededBy(config_)) {
    flashinfer_ = std::make_unique<FlashInferBackend>(config_, groups_.size(), allocated_bytes_);
  }
  if (StockWindowBackend::IsNeededBy(config_)) {
    stock_window_ = std::make_unique<StockWindowBackend>(config_, groups_.size(), allocated_bytes_);
  }
}

std::vector<PagedKVCacheObj::Group> PagedKVCacheObj::MakeGroups(const CacheConfig& config) {
  std::vector<Group> groups;
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const LayerConfig& layer = config.layers[i];
    size_t g = 0;
    while (g < groups.size() && !groups[g].shape.SharesGroupWith(layer)) ++g;
    if (g == groups.size()) {
      groups.push_back({layer,
                        {},
                        StepView(config.dtype, {layer.num_qo_heads, layer.qk_head_dim}),
                        StepView(config.dtype, {layer.num_kv_heads, layer.qk_head_dim}),
                        StepView(config.dtype, {layer.num_kv_heads, layer.v_head_dim}),
                        StepView(kFloat32, {layer.num_qo_heads})});
    }
    groups[g].layers.push_back(static_cast<int64_t>(i));
  }
  return groups;
}

std::vector<int32_t> PagedKVCacheObj::NumPages(const CacheConfig& config,
                                               const std::vector<Group>& groups) {
  std::vector<int32_t> num_pages;
  for (const Group& group : groups) {
    num_pages.push_back(static_cast<int32_t>(config.NumPages(group.shape)));
  }
  return num_pages;
}

std::vector<int64_t> PagedKVCacheObj::Windows(const std::vector<Group>& groups) {
  std::vector<int64_t> windows;
  for (const Group& group : groups) windows.push_back(group.shape.window);
  return windows;
}

std::vector<PagedKVCacheObj::Layer> PagedKVCacheObj::MakeLayers() {
  RequireMemory();
  std::vector<Layer> layers(config_.layers.size());
  const bool is_shared = config_.enable_kv_transfer && config_.device.device_type == kDLCPU;
  if (is_shared) {
    int64_t num_bytes = 0;
    for (const LayerConfig& layer : config_.layers) num_bytes += PoolBytes(layer);
    shared_pages_ = std::make_shared<SharedMemory>(num_bytes);
  }
  int64_t offset = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    for (int64_t i : groups_[g].layers) {
      const LayerConfig& layer = config_.layers[i];
      std::vector<int64_t> shape{config_.NumPages(layer), config_.page_size, layer.qk_head_dim};
      if (!layer.is_mla()) shape.insert(shape.begin() + 1, {2, layer.num_kv_heads});
      ffi::Tensor pages = is_shared ? TensorIn(shared_pages_, offset, ffi::Shape(shape),
                                               config_.kv_dtype, allocated_bytes_)
                                    : AllocateTensor(ffi::Shape(shape), config_.kv_dtype,
                                                     config_.device, allocated_bytes_);
      offset += PoolBytes(layer);
      layers[i] = {layer, static_cast<int32_t>(g), std::move(pages)};
    }
  }
  return layers;
}

void PagedKVCacheObj::RequireMemory() const {
  if (config_.device.device_type != kDLCPU) return;    // other devices promise what they have
  constexpr double kPoolBytes = 12 * sizeof(int32_t);  // of a page: pool, plan and page tables
  double num_bytes = 0;
  for (const Group& group : groups_) {
    const LayerConfig& shape = group.shape;
    const double page_bytes = static_cast<double>(config_.page_size * shape.rows_per_slot()) *
                              static_cast<double>(shape.qk_head_dim * ItemSize(config_.kv_dtype));
    const double num_pages = static_cast<double>(config_.NumPages(shape));
    num_bytes += num_pages * (kPoolBytes + page_bytes * static_cast<double>(group.layers.size()));
  }
  RequireHostMemory(num_bytes);
}

int64_t PagedKVCacheObj::PoolBytes(const LayerConfig& layer) const {
  constexpr int64_t kAlignment = 4096;  // whole pages of memory
  const int64_t num_rows = config_.NumPages(layer) * layer.rows_per_slot() * config_.page_size;
  const int64_t num_bytes = num_rows * layer.qk_head_dim * ItemSize(config_.kv_dtype);
  return (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
}

void PagedKVCacheObj::AllocateWorkspaces() {
  int64_t q_width = 0, kv_width = 0, num_qo_heads = 0;
  for (const LayerConfig& layer : config_.layers) {
    if (layer.kind != LayerKind::kMHA) continue;  // MLA kernels take and give the model's tensors
    q_width = std::max(q_width, layer.num_qo_heads * layer.qk_head_dim);
    kv_width = std::max(kv_width, layer.num_kv_heads * layer.qk_head_dim);
    num_qo_heads = std::max(num_qo_heads, layer.num_qo_heads);
  }
  auto allocate = [&](int64_t row_bytes) {
    if (row_bytes == 0) return ffi::Tensor();
    return AllocateTensor({config_.prefill_chunk_size * row_bytes}, kByte, config_.device,
                          allocated_bytes_);
  };
  q_workspace_ = allocate(q_width * ItemSize(config_.dtype));
  k_workspace_ = allocate(kv_width * ItemSize(config_.dtype));
  v_workspace_ = allocate(kv_width * ItemSize(config_.dtype));
  lse_workspace_ = allocate(num_qo_heads * ItemSize(kFloat32));
  workspace_bytes_ = *allocated_bytes_ - page_pool_bytes_;
}

std::vector<int64_t> PagedKVCacheObj::InitialArraySizes() const {
  // Enough for every step of sequences that share nothing, with trees of one round;
  // KVCacheConfig.memory_bytes has the same.
  const int64_t num_rows = config_.prefill_chunk_size;
  const int64_t num_sequences = std::min(config_.max_num_sequences, num_rows);
  std::vector<int64_t> sizes(kNumCommonArrays + groups_.size() * kNumGroupArrays);
  sizes[kTreeOrder] = num_rows;
  sizes[kTreeOrderIndptr] = num_sequences + 1;
  sizes[kQueryIndptr] = num_sequences + 1;
  sizes[kQueryPositions] = num_rows;
  sizes[kTextPositions] = num_rows;
  sizes[kPastLengths] = num_sequences;
  for (int32_t g = 0; g < table_.num_groups(); ++g) {
    sizes[ArrayIndex(g, kPageIndptr)] = num_sequences + 1;
    sizes[ArrayIndex(g, kPageValues)] = table_.pool(g).num_pages();
    const bool has_windows = config_.has_sequence_windows && !table_.HasWindow(g);
    sizes[ArrayIndex(g, kLastPageLengths)] = (has_windows ? 4 : 1) * num_sequences;
    sizes[ArrayIndex(g, kFirstPositions)] = num_sequences;
    sizes[ArrayIndex(g, kSlots)] = num_rows;
  }
  return sizes;
}

void PagedKVCacheObj::RequireIdle(const char* what) const {
  if (phase_ != Phase::kIdle) {
    Raise(kValueError, what, " is not possible within a step; call end_forward first");
  }
}

void PagedKVCacheObj::Clear() {
  RequireIdle("clear");
  table_.Clear();
}

void PagedKVCacheObj::AddSequence(int64_t sequence_id) {
  RequireIdle("add_sequence");
  table_.Add(sequence_id);
}

void PagedKVCacheObj::RemoveSequence(int64_t sequence_id) {
  RequireIdle("remove_sequence");
  table_.Remove(sequence_id);
}

void PagedKVCacheObj::ForkSequence(int64_t parent_id, int64_t child_id, int64_t fork_position) {
  RequireIdle("fork_sequence");
  table_.Fork(parent_id, child_id, fork_position);
}

void PagedKVCacheObj::PopN(int64_t sequence_id, int64_t count) {
  RequireIdle("pop_n");
  table_.Pop(sequence_id, count);
}

void PagedKVCacheObj::EnableSlidingWindow(int64_t sequence_id, int64_t window, int64_t num_sinks) {
  RequireIdle("enable_sliding_window");
  if (config_.ignores_sequence_windows) {
    table_.CheckNewWindow(sequence_id, window, num_sinks);
    return;
  }
  if (!config_.has_sequence_windows) {
    Raise(kValueError,
          "the cache was made without sliding_window, so its sequences cannot have one");
  }
  if (std::any_of(layers_.begin(), layers_.end(),
                  [](const Layer& layer) { return layer.config.is_mla(); })) {
    Raise(kValueError,
          "a sliding window of a sequence is not possible with MLA layers: their kernels have no "
          "such mask");
  }
  // Inline rotations count within the window, as the stock cache does for all: what is held, then
  // the row. Where positions are those of the text, the window is that of the model's mask.
  const bool counts_row = config_.rope_mode != RopeMode::kInline;
  table_.EnableWindow(sequence_id, window, num_sinks, counts_row);
}

int64_t PagedKVCacheObj::NumAvailablePages() const {
  // A group with a window is left out while it can serve every step that the others can: as long as
  // no more than max_num_sequences sequences exist. Where sequences have windows too, it may hold
  // more of them than the others.
  int64_t num_available = config_.num_pages();
  bool has_global =
      std::any_of(groups_.begin(), groups_.end(), [](const Group& g) { return !g.shape.window; });
  for (int32_t g = 0; g < table_.num_groups(); ++g) {
    const PagePool& pool = table_.pool(g);
    const bool is_spare = has_global && groups_[g].shape.window && !config_.has_sequence_windows;
    // A step may also copy the last page of sequences that share it.
    if (is_spare && pool.num_available() >= config_.MaxStepPages() + pool.num_shared()) continue;
    num_available = std::min<int64_t>(num_available, pool.num_available());
  }
  return std::max<int64_t>(num_available - config_.num_reserved_pages, 0);
}

void PagedKVCacheObj::BeginForward(ffi::Shape sequence_ids, ffi::Shape append_lengths,
                                   ffi::Optional<ffi::Shape> token_tree_parents) {
  RequireIdle("begin_forward");
  StreamOrder::Call on_stream(&stream_order_);
  std::optional<IntSpan> tree_parents;
  if (token_tree_parents.has_value()) {
    RequireNoSends(sequence_ids);
    tree_parents = {token_tree_parents.value().data(), token_tree_parents.value().size()};
  }
  // A kernel that calls back into the cache finds it busy.
  phase_ = Phase::kPlanning;
  try {
    plan_.Prepare({sequence_ids.data(), sequence_ids.size()},
                  {append_lengths.data(), append_lengths.size()}, tree_parents);
    if (counts_text()) plan_.RequireTextPositions();
    if (plan_.needs_tree_mask()) RequireTreeKernels();
    plan_.Acquire();
    try {
      CopyPages(plan_.copies());
      LayOutArrays();
      FillArrays();
      aux_->Upload();
      SetWorkspaceViews();
    } catch (...) {
      plan_.Release();
      throw;
    }
  } catch (...) {
    phase_ = Phase::kIdle;
    throw;
  }
  num_page_copies_ += static_cast<int64_t>(plan_.copies().size());
  CountPagesRead();
  plan_.Commit();
  ++num_forwards_;
  has_past_arrays_ = false;
  if (flashinfer_ != nullptr) flashinfer_->BeginStep();
  if (stock_window_ != nullptr) stock_window_->BeginStep();
  stream_order_.BeginStep();
  phase_ = Phase::kForward;
}

void PagedKVCacheObj::EndForward() {
  RequireOpenStep("end_forward");
  std::vector<int64_t> blocks = MakeSendBlocks();  // of rows that may leave the windows now
  stream_order_.EndStep();
  plan_.Finish();
  phase_ = Phase::kIdle;
  Announce(blocks);
}

void PagedKVCacheObj::AbortForward() {
  RequireOpenStep("abort_forward");
  stream_order_.EndStep();
  plan_.Abort();
  phase_ = Phase::kIdle;
}

ffi::Shape PagedKVCacheObj::MissingLayers() const {
  RequireForward("missing_layers");
  std::vector<int64_t> ids;
  for (const Layer& layer : layers_) {
    if (layer.last_append != num_forwards_) ids.push_back(layer.config.id);
  }
  return ffi::Shape(ids);
}

void PagedKVCacheObj::RequireOpenStep(const char* what) const {
  if (phase_ == Phase::kAttending) {
    Raise(kValueError, what, " is not possible while a kernel of the step runs");
  }
  if (phase_ != Phase::kForward) Raise(kValueError, what, " without begin_forward");
}

void PagedKVCacheObj::LayOutArrays() {
  const int64_t num_sequences = plan_.num_sequences();
  array_sizes_[kTreeOrder] = plan_.needs_tree_mask() ? plan_.num_tree_nodes() : 0;
  array_sizes_[kTreeOrderIndptr] = plan_.needs_tree_mask() ? num_sequences + 1 : 0;
  array_sizes_[kQueryIndptr] = num_sequences + 1;
  array_sizes_[kQueryPositions] = plan_.num_rows();
  array_sizes_[kTextPositions] = counts_text() ? plan_.num_rows() : 0;
  array_sizes_[kPastLengths] = num_sequences;
  for (int32_t g = 0; g < table_.num_groups(); ++g) {
    array_sizes_[ArrayIndex(g, kPageIndptr)] = num_sequences + 1;
    array_sizes_[ArrayIndex(g, kPageValues)] = plan_.NumPages(g, PageRange::kWithStep);
    array_sizes_[ArrayIndex(g, kLastPageLengths)] = NumLengthRows(g) * num_sequences;
    array_sizes_[ArrayIndex(g, kFirstPositions)] = num_sequences;
    array_sizes_[ArrayIndex(g, kSlots)] = plan_.num_rows();
  }
  SizeSegments();
  aux_->Layout(array_sizes_);
}

int64_t PagedKVCacheObj::NumLengthRows(int32_t group) const {
  constexpr int64_t kWithWindows = 4;
  return plan_.has_windows() && !table_.HasWindow(group) ? kWithWindows : 1;
}

void PagedKVCacheObj::FillLengths(int32_t group, PageRange range, int32_t* out) const {
  plan_.FillLastPageLengths(range, out);
  if (NumLengthRows(group) > 1) plan_.FillWindows(group, out + plan_.num_sequences());
}

void PagedKVCacheObj::FillArrays() {
  if (plan_.needs_tree_mask()) {
    plan_.FillTreeOrderIndptr(aux_->host(kTreeOrderIndptr));
    plan_.FillTreeOrder(PageRange::kWithStep, aux_->host(kTreeOrder));
  }
  plan_.FillQueryIndptr(aux_->host(kQueryIndptr));
  plan_.FillQueryPositions(aux_->host(kQueryPositions));
  if (counts_text()) plan_.FillTextPositions(aux_->host(kTextPositions));
  plan_.FillPastLengths(aux_->host(kPastLengths));
  for (int32_t g = 0; g < table_.num_groups(); ++g) {
    auto host = [&](GroupArray array) { return aux_->host(ArrayIndex(g, array)); };
    plan_.FillPageIndptr(g, PageRange::kWithStep, host(kPageIndptr));
    plan_.FillPageValues(g, PageRange::kWithStep, host(kPageValues));
    FillLengths(g, PageRange::kWithStep, host(kLastPageLengths));
    plan_.FillFirstPositions(g, host(kFirstPositions));
    plan_.FillSlots(g, host(kSlots));
  }
  if (has_segments_) FillSegments();
}

void PagedKVCacheObj::SetWorkspaceViews() {
  for (Group& group : groups_) {
    if (group.shape.is_mla()) continue;
    group.q.Set(q_workspace_, 0, plan_.num_rows());
    group.k.Set(k_workspace_, 0, plan_.num_rows());
    group.v.Set(v_workspace_, 0, plan_.num_rows());
    group.lse.Set(lse_workspace_, 0, plan_.num_rows());
  }
}

}  // namespace pagedkv
