// SPDX-License-Identifier: Apache-2.0
/*!
 * \file inspector.cc
 * \brief The description and statistics of a cache.
 */
#include "inspect/inspector.h"

#include <tvm/ffi/dtype.h>

#include <algorithm>

#include "base/error.h"
#include "storage/page_io.h"

namespace pagedkv {

using StringMap = ffi::Map<ffi::String, ffi::Any>;

namespace {

/*! \brief Pages of one pool, or of several. */
struct PoolCounts {
  int64_t total = 0, free = 0, cached = 0, reclaimed = 0, used = 0, shared = 0, retained = 0;

  void Add(const PagePool& pool) {
    total += pool.num_pages();
    free += pool.num_free();
    cached += pool.num_cached();
    reclaimed += pool.num_reclaimed();
    used += pool.num_used();
    shared += pool.num_shared();
    retained += pool.num_retained();
  }
  void AddTo(StringMap* stats) const {
    stats->Set("num_pages", total);
    stats->Set("num_free_pages", free);
    stats->Set("num_cached_pages", cached);
    stats->Set("num_reclaimed_pages", reclaimed);
    stats->Set("num_used_pages", used);
    stats->Set("num_shared_pages", shared);
    stats->Set("num_retained_pages", retained);
  }
};

}  // namespace

StringMap Inspector::Stats() const {
  const Step& step = *parts_.step;
  StringMap stats;
  int64_t aux_bytes = 0, aux_bytes_copied = 0;
  for (const AuxData* arrays : {&step.arrays().data(), step.past().data(),
                                parts_.tree_commit.arrays(), parts_.copier.arrays()}) {
    if (arrays == nullptr) continue;
    aux_bytes += arrays->num_bytes();
    aux_bytes_copied += arrays->num_bytes_copied();
  }
  stats.Set("page_pool_bytes", storage().num_bytes());
  stats.Set("workspace_bytes", step.workspaces().num_bytes());
  stats.Set("scratch_bytes", step.scratch().num_bytes());
  stats.Set("aux_bytes", aux_bytes);
  stats.Set("allocated_bytes", storage().counter()->load());

  ffi::Array<ffi::Any> groups;
  PoolCounts all;
  for (int32_t g = 0; g < table_->num_groups(); ++g) {
    const LayerGroup& group = storage().groups()[g];
    StringMap about{{"num_layers", static_cast<int64_t>(group.layers.size())},
                    {"window", group.shape.window},
                    {"kv_dtype", ffi::String(group.shape.kv_dtype())},
                    {"page_bytes", storage().layers()[group.layers[0]].layout.page_bytes}};
    PoolCounts counts;
    counts.Add(table_->pool(g));
    counts.AddTo(&about);
    all.Add(table_->pool(g));
    groups.push_back(about);
  }
  all.AddTo(&stats);
  stats.Set("groups", groups);
  stats.Set("state_groups", StateGroups());

  int64_t num_importing = 0, num_uncommitted = 0, num_windows = 0, num_dropped = 0;
  for (const auto& [id, sequence] : table_->sequences()) {
    num_importing += sequence.import != nullptr;
    num_uncommitted += sequence.tree.size();
    num_windows += sequence.window.size > 0;
    num_dropped += sequence.window.num_dropped;
  }
  stats.Set("num_sequences", table_->num_sequences());
  stats.Set("num_importing_sequences", num_importing);
  stats.Set("total_tokens", table_->total_length());
  stats.Set("num_windowed_sequences", num_windows);
  stats.Set("num_dropped_tokens", num_dropped);
  const PrefixCache& prefixes = table_->prefixes();
  stats.Set("num_prefix_lookups", prefixes.counts().lookups);
  stats.Set("num_prefix_hits", prefixes.counts().hits);
  stats.Set("num_looked_up_tokens", prefixes.counts().tokens);
  stats.Set("num_reused_tokens", prefixes.counts().reused_tokens);
  stats.Set("num_findable_tokens", prefixes.tree().num_tokens());
  const StringMap tiers = parts_.lower_tiers.Stats();
  if (!tiers.empty()) stats.Set("prefix_tiers", tiers);
  stats.Set("num_forwards", step.number());
  stats.Set("num_pinned_pages", table_->pins().num_pins() - prefixes.hints().num_pins());
  stats.Set("num_hints", prefixes.hints().num_hints());
  stats.Set("num_hint_pinned_pages", prefixes.hints().num_pins());
  stats.Set("num_send_blocks", parts_.sender.num_blocks());
  stats.Set("cow_page_copies", parts_.copier.num_copies());
  stats.Set("copied_inputs", step.tensors().num_copied());
  stats.Set("aux_bytes_copied", aux_bytes_copied);
  stats.Set("pages_read", step.pages_read().with_sharing);
  stats.Set("pages_read_without_sharing", step.pages_read().without_sharing);
  stats.Set("step_pages_read", step.step_pages_read().with_sharing);
  stats.Set("step_pages_read_without_sharing", step.step_pages_read().without_sharing);
  stats.Set("uncommitted_tree_nodes", num_uncommitted);
  stats.Set("committed_tree_nodes", parts_.tree_commit.counts().committed);
  stats.Set("dropped_tree_nodes", parts_.tree_commit.counts().dropped);
  stats.Set("moved_tree_nodes", parts_.tree_commit.counts().moved);
  return stats;
}

ffi::Array<ffi::Any> Inspector::StateGroups() const {
  const PageGeometry& geometry = table_->geometry();
  ffi::Array<ffi::Any> groups;
  for (int32_t s = 0; s < geometry.num_state_groups(); ++s) {
    const LayerGroup& group = storage().groups()[geometry.state_group(s).ingredients];
    const ffi::Tensor& states = storage().layers()[group.layers[0]].states;
    StringMap about{{"num_layers", static_cast<int64_t>(group.layers.size())},
                    {"interval", geometry.state_group(s).interval},
                    {"ingredient_group", static_cast<int64_t>(geometry.state_group(s).ingredients)},
                    {"page_bytes", BytesOfState(states)}};
    PoolCounts counts;
    counts.Add(table_->pool(geometry.StatePool(s)));
    counts.AddTo(&about);
    groups.push_back(about);
  }
  return groups;
}

namespace {

/*! \brief [begin, row_bytes, first_row, num_rows] of each section of a page. */
ffi::Array<ffi::Any> SectionsOf(const SlotLayout& layout) {
  ffi::Array<ffi::Any> sections;
  for (const SlotLayout::Section& section : layout.sections) {
    if (section.num_rows == 0) continue;
    sections.push_back(
        ffi::Array<int64_t>{section.begin, section.row_bytes, section.first_row, section.num_rows});
  }
  return sections;
}

}  // namespace

StringMap Inspector::DescribeLayer(const StoredLayer& layer) const {
  const LayerConfig& config = layer.config;
  return {{"id", config.id},
          {"kind", ffi::String(ToString(config))},
          {"window", config.window},
          {"group", layer.group},
          {"page_group", layer.index},
          {"num_qo_heads", config.num_qo_heads},
          {"num_kv_heads", config.num_kv_heads},
          {"qk_head_dim", config.qk_head_dim},
          {"v_head_dim", config.v_head_dim},
          {"mla_original_qk_head_dim", config.original_qk_head_dim},
          {"mla_original_v_head_dim", config.original_v_head_dim},
          {"rope_mode", static_cast<int64_t>(config.rope_mode)},
          {"rope_theta", config.rope_theta},
          {"rope_scale", config.rope_scale},
          {"kernel_set", config.kernel_set},
          {"sink_logits", config.has_sink_logits},
          {"kv_dtype", ffi::String(config.kv_dtype())},
          {"row_dtype", ffi::DLDataTypeToString(storage().RowDtype(config))},
          {"is_quantized", config.codec.has_value()},
          {"codec_revision", config.codec ? config.codec->revision : 0},
          {"kv_scales", ffi::String(parts_.page_groups.layout().layers[layer.index].kv_scales)},
          {"sections", SectionsOf(layer.layout)},
          {"page_bytes", layer.layout.page_bytes}};
}

StringMap Inspector::DescribeRecurrent(const StoredLayer& layer) const {
  const RecurrentShape& shape = *layer.config.recurrent;
  return {{"id", layer.config.id},
          {"kind", ffi::String(ToString(layer.config))},
          {"is_quantized", false},
          {"group", layer.group},
          {"state_group", layer.state_group},
          {"page_group", layer.index},
          {"kv_dtype", ffi::String(layer.config.kv_dtype())},
          {"row_width", layer.config.qk_head_dim},
          {"sections", SectionsOf(layer.layout)},
          {"page_bytes", layer.layout.page_bytes},
          {"num_heads", shape.num_heads},
          {"num_key_heads", shape.num_key_heads},
          {"key_dim", shape.key_dim},
          {"value_dim", shape.value_dim},
          {"has_channel_decay", shape.decays_by_channel},
          {"has_beta", shape.has_beta},
          {"checkpoint_tokens", shape.interval},
          {"state_dtype", ffi::DLDataTypeToString(shape.state_dtype)},
          {"state_bytes", shape.state_bytes()}};
}

StringMap Inspector::Describe() const {
  const CacheConfig& config = storage().config();
  ffi::Array<ffi::Any> layers, recurrent_layers, conv_layers;
  for (const StoredLayer& layer : storage().layers()) {
    if (layer.config.is_attention()) layers.push_back(DescribeLayer(layer));
    if (layer.config.recurrent) recurrent_layers.push_back(DescribeRecurrent(layer));
    if (layer.config.kind == LayerKind::kConv) {
      conv_layers.push_back(StringMap{{"id", layer.config.id},
                                      {"kind", ffi::String(ToString(layer.config))},
                                      {"is_quantized", false},
                                      {"group", layer.group},
                                      {"page_group", layer.index},
                                      {"kv_dtype", ffi::String(layer.config.kv_dtype())},
                                      {"row_width", layer.config.qk_head_dim},
                                      {"sections", SectionsOf(layer.layout)},
                                      {"page_bytes", layer.layout.page_bytes},
                                      {"channels", layer.config.qk_head_dim},
                                      {"width", layer.config.window},
                                      {"has_bias", layer.config.has_bias}});
    }
  }
  return {{"max_num_sequences", config.max_num_sequences},
          {"max_total_tokens", config.max_total_tokens},
          {"prefill_chunk_size", config.prefill_chunk_size},
          {"page_size", config.page_size},
          {"dtype", ffi::DLDataTypeToString(config.dtype)},
          {"kv_dtype", ffi::String(config.kv_dtype)},
          {"rope_mode", static_cast<int64_t>(config.rope_mode)},
          {"share_prefix", config.share_prefix},
          {"sliding_window", config.has_sequence_windows},
          {"enable_kv_transfer", config.enable_kv_transfer},
          {"aux_manager", ffi::String(parts_.step->arrays().is_merged() ? "merged" : "plain")},
          {"layout", ffi::String(parts_.page_groups.layout().Text())},
          {"device", config.device},
          {"layers", layers},
          {"recurrent_layers", recurrent_layers},
          {"conv_layers", conv_layers},
          {"layer_indptr", ffi::Shape(config.stage.layer_indptr)},
          {"stage", config.stage.index}};
}

std::vector<int64_t> Inspector::SequenceIds() const {
  std::vector<int64_t> ids;
  for (const auto& [id, sequence] : table_->sequences()) {
    if (sequence.import == nullptr) ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  return ids;
}

void Inspector::CheckGroup(int64_t group) const {
  if (group < 0 || group >= table_->num_groups()) {
    Raise(kIndexError, "group ", group, " is not in [0, ", table_->num_groups(), ")");
  }
}

std::vector<int64_t> Inspector::PageTable(int64_t sequence_id, int64_t group) const {
  CheckGroup(group);
  const std::vector<int32_t>& pages = table_->Peek(sequence_id).pages[group];
  return {pages.begin(), pages.end()};
}

std::vector<int64_t> Inspector::StateTable(int64_t sequence_id, int64_t state_group) const {
  if (state_group < 0 || state_group >= table_->num_state_groups()) {
    Raise(kIndexError, "state group ", state_group, " is not in [0, ", table_->num_state_groups(),
          ")");
  }
  const SequenceStates& states = table_->Peek(sequence_id).states[state_group];
  std::vector<int64_t> numbers{states.length, states.first_page};
  numbers.insert(numbers.end(), states.pages.begin(), states.pages.end());
  return numbers;
}

std::vector<int64_t> Inspector::CachedPages(int64_t pool) const {
  if (pool < table_->num_groups() || pool >= table_->geometry().num_pools()) CheckGroup(pool);
  const std::vector<int32_t> pages = table_->pool(static_cast<int32_t>(pool)).cached_pages().List();
  return {pages.begin(), pages.end()};
}

int64_t Inspector::FirstPosition(int64_t sequence_id, int64_t group) const {
  CheckGroup(group);
  return table_->geometry().FirstPosition(table_->Peek(sequence_id), static_cast<int32_t>(group));
}

std::vector<int64_t> Inspector::Window(int64_t sequence_id) const {
  const SequenceWindow& window = table_->Peek(sequence_id).window;
  return {window.size, window.num_sinks, window.num_dropped};
}

void Inspector::CheckIntegrity() const {
  table_->CheckIntegrity(/*has_slid=*/!parts_.step->IsInForward());
  parts_.lower_tiers.CheckIntegrity();
}

void Inspector::ShuffleFreePages(int64_t seed) {
  parts_.step->phase().RequireIdle("shuffle_free_pages");
  for (int32_t g = 0; g < table_->num_groups(); ++g) {
    table_->pool(g).ShuffleFree(static_cast<uint64_t>(seed));
  }
}

void Inspector::PoisonFreePages() {
  const StreamOrder::Call on_stream(&parts_.step->stream_order());
  for (int32_t g = 0; g < table_->num_groups(); ++g) {
    const std::vector<bool> is_held = HeldSlots(g);
    for (int64_t index : storage().groups()[g].layers) {
      PoisonSlots(storage().layers()[index], is_held);
    }
  }
  const PageGeometry& geometry = table_->geometry();
  for (int32_t s = 0; s < geometry.num_state_groups(); ++s) {
    const PagePool& pool = table_->pool(geometry.StatePool(s));
    for (int64_t index : storage().groups()[geometry.state_group(s).ingredients].layers) {
      for (int32_t page : pool.free_pages()) PoisonState(storage().layers()[index].states, page);
    }
  }
}

std::vector<bool> Inspector::HeldSlots(int32_t group) const {
  const int64_t page_size = table_->page_size();
  const PagePool& pool = table_->pool(group);
  std::vector<bool> is_held(pool.num_pages() * page_size, false);
  auto hold = [&](int32_t page) {
    std::fill_n(is_held.begin() + page * page_size, page_size, true);
  };
  for (const auto& [id, sequence] : table_->sequences()) {
    HoldSequence(sequence, group, &is_held);
    if (sequence.receive == nullptr) continue;
    const Receive::Group& backup = sequence.receive->groups[group];
    for (int32_t page : backup.gone) hold(page);
    if (backup.replaced >= 0) hold(backup.replaced);
  }
  for (int32_t page = 0; page < pool.num_pages(); ++page) {
    const bool is_known = pool.NumKeepers(page) > 0 || pool.cached_pages().Contains(page);
    if (is_known || table_->pins().IsPinned(group, page)) hold(page);
  }
  return is_held;
}

void Inspector::HoldSequence(const Sequence& sequence, int32_t group,
                             std::vector<bool>* is_held) const {
  const int64_t page_size = table_->page_size();
  const SequenceWindow& window = sequence.window;
  const int64_t text_length = window.TextLength(sequence.length);
  for (size_t i = 0; i < sequence.pages[group].size(); ++i) {
    const int64_t begin = table_->geometry().PageBegin(sequence, group, static_cast<int64_t>(i));
    for (int64_t text = begin; text < std::min(text_length, begin + page_size); ++text) {
      // Layers with a window of their own may see what the sequence has dropped.
      const bool is_dropped = !table_->geometry().HasWindow(group) && text >= window.num_sinks &&
                              text < window.num_sinks + window.num_dropped;
      if (is_dropped) continue;
      (*is_held)[sequence.pages[group][i] * page_size + text - begin] = true;
    }
  }
}

}  // namespace pagedkv
