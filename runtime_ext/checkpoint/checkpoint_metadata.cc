// SPDX-License-Identifier: Apache-2.0
/*!
 * \file checkpoint_metadata.cc
 * \brief Writes and reads the metadata of a checkpoint.
 */
#include "checkpoint/checkpoint_metadata.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/text_stream.h"
#include "checkpoint/json_reader.h"

namespace pagedkv {

namespace {

constexpr int64_t kFormatVersion = 1;
constexpr const char* kCacheType = "pagedkv.KVCache";
constexpr const char* kStockCacheType = "relax.vm.PagedAttentionKVCache";
constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

/*! \brief The fields of the metadata: some are common, some only in stock or only in our files. */
struct Fields {
  int64_t format_version = 0;
  std::string cache_type, dtype, layout_hash;
  int64_t page_size = 0, num_layers = 0, length = 0;
  std::vector<std::string> kinds;
  // Of `logical_pages`: their number, the tokens of the first page, and the tokens of all pages.
  int64_t num_logical_pages = 0, first_length = 0, num_covered = 0;
  struct Group {
    int64_t index = 0, layer_begin = 0, layer_end = 0, num_pages = 0, num_bytes = 0;
    int64_t first_position = 0, state_length = 0;
    std::string dtype, kv_dtype;  // the latter with a codec only
    std::vector<int64_t> shape;
  };
  std::vector<Group> groups;
  // Stock only.
  std::string rope_mode;
  double theta = 0, scale = 0;
  int64_t num_kv_heads = 0, qk_head_dim = 0, v_head_dim = 0;
  bool has_rope_factors = false;
  // Ours only.
  std::optional<std::string> layout;
};

/*! \brief Text of a checkpoint, cut for an error message. */
std::string Shown(const std::string& text) {
  constexpr size_t kMaxShown = 1000;
  return text.size() > kMaxShown ? text.substr(0, kMaxShown) + "..." : text;
}

Fields::Group ReadGroup(JsonReader* reader) {
  Fields::Group group;
  auto integer = [&](int64_t* field) { return [=] { *field = reader->Integer(); }; };
  reader->Object(
      {{"group_index", integer(&group.index)},
       {"layer_begin", integer(&group.layer_begin)},
       {"layer_end", integer(&group.layer_end)},
       {"first_position", integer(&group.first_position), false},
       {"state_length", integer(&group.state_length), false},
       {"num_logical_pages", integer(&group.num_pages)},
       {"dtype", [&] { group.dtype = reader->String(); }},
       {"kv_dtype", [&] { group.kv_dtype = reader->String(); }, false},
       {"shape", [&] { reader->Array([&] { group.shape.push_back(reader->Integer()); }); }},
       {"nbytes", integer(&group.num_bytes)}});
  return group;
}

/*! \brief Pages are consecutive, and all but the last one are full. */
void ReadLogicalPage(JsonReader* reader, Fields* fields) {
  int64_t index = 0, start = 0, length = 0;
  reader->Object({{"logical_page_index", [&] { index = reader->Integer(); }},
                  {"start_pos", [&] { start = reader->Integer(); }},
                  {"length", [&] { length = reader->Integer(); }}});
  if (index == 0) fields->first_length = std::min(length, kInt32Max);
  const int64_t num_before = fields->num_logical_pages;
  if (index != num_before || start != fields->num_covered || length < 1 ||
      length > fields->first_length || start != num_before * fields->first_length) {
    reader->Fail("logical page " + std::to_string(index) + " does not follow the one before");
  }
  ++fields->num_logical_pages;
  fields->num_covered += length;
}

Fields ReadFields(std::string_view text) {
  JsonReader reader("checkpoint metadata", text);
  Fields fields;
  auto integer = [&](int64_t* field) { return [&reader, field] { *field = reader.Integer(); }; };
  auto number = [&](double* field) { return [&reader, field] { *field = reader.Number(); }; };
  auto string = [&](std::string* field) { return [&reader, field] { *field = reader.String(); }; };
  auto boolean = [&](bool* field) { return [&reader, field] { *field = reader.Boolean(); }; };
  // Fields that do not decide whether the checkpoint fits only need the right type.
  int64_t other;
  std::string other_text;
  bool other_flag;
  reader.Object(
      {{"format_version", integer(&fields.format_version)},
       {"cache_type", string(&fields.cache_type)},
       {"page_size", integer(&fields.page_size)},
       {"num_layers", integer(&fields.num_layers)},
       {"dtype", string(&fields.dtype)},
       {"attn_kinds", [&] { reader.Array([&] { fields.kinds.push_back(reader.String()); }); }},
       {"layout_hash", string(&fields.layout_hash)},
       {"seq_id", integer(&other)},
       {"seq_length", integer(&fields.length)},
       {"logical_pages", [&] { reader.Array([&] { ReadLogicalPage(&reader, &fields); }); }},
       {"groups", [&] { reader.Array([&] { fields.groups.push_back(ReadGroup(&reader)); }); }},
       {"layout", [&] { fields.layout = reader.String(); }, false},
       {"layer_begin", integer(&other), false},
       {"layer_end", integer(&other), false},
       {"num_qo_heads", integer(&other), false},
       {"num_kv_heads", integer(&fields.num_kv_heads), false},
       {"qk_head_dim", integer(&fields.qk_head_dim), false},
       {"v_head_dim", integer(&fields.v_head_dim), false},
       {"reserved_num_seqs", integer(&other), false},
       {"num_total_pages", integer(&other), false},
       {"prefill_chunk_size", integer(&other), false},
       {"rope_mode", string(&fields.rope_mode), false},
       {"rotary_scale", number(&fields.scale), false},
       {"rotary_theta", number(&fields.theta), false},
       {"has_rope_ext_factors", boolean(&fields.has_rope_factors), false},
       {"support_sliding_window", boolean(&other_flag), false},
       {"support_layer_sliding_window", boolean(&other_flag), false},
       {"page_group_layout", string(&other_text), false}});
  reader.End();
  return fields;
}

/*! \brief The layout of a stock cache, whose layers all have one shape. */
CheckpointLayout StockLayout(const Fields& fields) {
  CheckpointLayout layout;
  layout.page_size = fields.page_size;
  std::string rope = RopeText(fields.rope_mode, fields.theta, fields.scale,
                              fields.has_rope_factors ? "unknown factors" : "");
  for (const std::string& kind : fields.kinds) {
    layout.layers.push_back({kind, 0, fields.num_kv_heads, fields.qk_head_dim, fields.v_head_dim,
                             rope, fields.dtype, 1, 0});
  }
  return layout;
}

/*! \brief The types in the text of a layout, and the text without them. */
std::pair<std::string, std::string> SplitTypes(const std::string& layout) {
  const std::string key = " dtype=";
  const size_t begin = layout.find(key), end = layout.find(';', begin);
  if (begin == std::string::npos || end == std::string::npos) return {"", layout};
  const size_t types = begin + key.size();
  return {layout.substr(types, end - types), layout.substr(0, begin) + layout.substr(end)};
}

/*! \brief The advice where two layouts differ only in how they keep K and V. */
std::string ConversionHint(const std::string& checkpoint, const std::string& cache) {
  const auto [theirs, their_rest] = SplitTypes(checkpoint);
  const auto [ours, our_rest] = SplitTypes(cache);
  if (theirs == ours || their_rest != our_rest) return "";
  return "; they differ only in kv_dtype, " + Shown(theirs) + " and " + ours +
         ": KVCache.load(..., convert=True) converts a file";
}

void CheckLayout(const Fields& fields, const CheckpointLayout& layout) {
  if (fields.format_version != kFormatVersion) {
    Raise(kValueError, "checkpoint metadata: format_version must be ", kFormatVersion, ", got ",
          fields.format_version);
  }
  const bool is_stock = fields.cache_type == kStockCacheType;
  if (!is_stock && fields.cache_type != kCacheType) {
    Raise(kValueError, "checkpoint metadata: cache_type must be '", kCacheType, "' or '",
          kStockCacheType, "', got '", Shown(fields.cache_type), "'");
  }
  if (!is_stock && !fields.layout) Raise(kValueError, "checkpoint metadata: 'layout' is missing");
  const std::string expected = layout.Text();
  const std::string actual = is_stock ? StockLayout(fields).Text() : *fields.layout;
  const std::string hash = layout.Hash();
  if (actual != expected || (!is_stock && fields.layout_hash != hash)) {
    Raise(kValueError, "the checkpoint has another layout than the cache: ", Shown(actual),
          " (hash ", Shown(fields.layout_hash), "), but the cache has ", expected, " (hash ", hash,
          ")", ConversionHint(actual, expected));
  }
  // The layout of our own checkpoints has been compared already, but the fields must agree.
  bool agrees = fields.page_size == layout.page_size && fields.num_layers == layout.num_layers() &&
                fields.dtype == layout.Types() && fields.kinds.size() == layout.layers.size();
  for (size_t i = 0; agrees && i < fields.kinds.size(); ++i) {
    agrees = fields.kinds[i] == layout.layers[i].kind;
  }
  if (!agrees) Raise(kValueError, "checkpoint metadata: the fields do not agree with the layout");
}

/*! \brief A page group as it must be: of a layer, or of its states. */
struct ExpectedGroup {
  int64_t index, layer, num_positions, page_size;
  std::string dtype, kv_dtype;

  static ExpectedGroup Of(const CheckpointLayout& layout, int64_t index, int64_t layer,
                          int64_t length, int64_t state_length) {
    const CheckpointLayout::Layer& about = layout.layers[layer];
    if (index >= layout.num_layers()) {
      return {index, layer, state_length, about.interval, about.state_dtype, ""};
    }
    return {index,
            layer,
            length,
            layout.page_size,
            about.GroupDtype(),
            about.codec_page_bytes ? about.kv_dtype : ""};
  }
  bool has_states(const CheckpointLayout& layout) const { return index >= layout.num_layers(); }
  int64_t NumPages(int64_t first_page) const {
    return (num_positions + page_size - 1) / page_size - first_page;
  }
  std::vector<int64_t> Shape(const CheckpointLayout& layout, int64_t num_pages) const {
    return has_states(layout) ? layout.StatesShape(layer, num_pages)
                              : layout.GroupShape(layer, num_pages);
  }
  /*! \brief Metadata may claim any number of pages, so this may wrap around. */
  int64_t NumBytes(const CheckpointLayout& layout, int64_t num_pages) const {
    if (!has_states(layout)) return num_pages * layout.PageBytes(layer);
    auto num_bytes = static_cast<uint64_t>(layout.layers[layer].state_item_bytes);
    for (int64_t extent : layout.StatesShape(layer, num_pages)) num_bytes *= extent;
    return static_cast<int64_t>(num_bytes);
  }
};

void CheckGroup(const Fields& fields, const CheckpointLayout& layout, int64_t index,
                int64_t layer) {
  const Fields::Group& group = fields.groups[index];
  auto check = [&](const char* name, int64_t actual, int64_t expected) {
    if (actual == expected) return;
    Raise(kValueError, "checkpoint metadata: ", name, " of group ", index, " must be ", expected,
          ", got ", actual);
  };
  check("group_index", group.index, index);
  check("layer_begin", group.layer_begin, layer);
  check("layer_end", group.layer_end, layer + 1);
  const ExpectedGroup expected =
      ExpectedGroup::Of(layout, index, layer, fields.length, group.state_length);
  const int64_t most = expected.has_states(layout) ? fields.length : 0;
  if (group.state_length < 0 || group.state_length > most) {
    Raise(kValueError, "checkpoint metadata: state_length of group ", index,
          " must be between 0 and ", most, ", got ", group.state_length);
  }
  const int64_t first = group.first_position;
  if (first < 0 || first % expected.page_size != 0 || first > expected.num_positions) {
    Raise(kValueError, "checkpoint metadata: first_position of group ", index,
          " must be that of a page within the ", expected.num_positions, " positions, got ", first);
  }
  check("num_logical_pages", group.num_pages, expected.NumPages(first / expected.page_size));
  check("nbytes", group.num_bytes, expected.NumBytes(layout, group.num_pages));
  if (group.dtype != expected.dtype || group.kv_dtype != expected.kv_dtype ||
      group.shape != expected.Shape(layout, group.num_pages)) {
    Raise(kValueError, "checkpoint metadata: shape or dtype of group ", index,
          " does not agree with the layout");
  }
}

}  // namespace

std::string WriteMetadata(const CheckpointLayout& layout, int64_t sequence_id,
                          const SequenceState& state) {
  ClassicText out;
  out << "{\"format_version\":" << kFormatVersion << ",\"cache_type\":" << JsonString(kCacheType)
      << ",\"page_size\":" << layout.page_size << ",\"num_layers\":" << layout.num_layers()
      << ",\"layer_begin\":0,\"layer_end\":" << layout.num_layers()
      << ",\"dtype\":" << JsonString(layout.Types()) << ",\"attn_kinds\":[";
  const char* separator = "";
  for (const CheckpointLayout::Layer& layer : layout.layers) {
    out << std::exchange(separator, ",") << JsonString(layer.kind);
  }
  out << "],\"layout\":" << JsonString(layout.Text())
      << ",\"layout_hash\":" << JsonString(layout.Hash()) << ",\"seq_id\":" << sequence_id
      << ",\"seq_length\":" << state.length << ",\"logical_pages\":[";
  const int64_t num_pages = (state.length + layout.page_size - 1) / layout.page_size;
  for (int64_t i = 0; i < num_pages; ++i) {
    const int64_t start = i * layout.page_size;
    out << (i ? "," : "") << "{\"logical_page_index\":" << i << ",\"start_pos\":" << start
        << ",\"length\":" << std::min(layout.page_size, state.length - start) << "}";
  }
  out << "],\"groups\":[";
  const std::vector<int64_t> of_groups = layout.LayersOfGroups();
  for (size_t i = 0, num_layers = layout.layers.size(); i < of_groups.size(); ++i) {
    const int64_t state_length = i < num_layers ? 0 : state.state_lengths[i - num_layers];
    const ExpectedGroup group = ExpectedGroup::Of(layout, static_cast<int64_t>(i), of_groups[i],
                                                  state.length, state_length);
    const int64_t num_kept = group.NumPages(state.first_pages[i]);
    out << (i ? "," : "") << "{\"group_index\":" << i << ",\"layer_begin\":" << group.layer
        << ",\"layer_end\":" << group.layer + 1
        << ",\"first_position\":" << state.first_pages[i] * group.page_size
        << ",\"num_logical_pages\":" << num_kept << ",\"dtype\":" << JsonString(group.dtype);
    if (group.has_states(layout)) out << ",\"state_length\":" << state_length;
    if (!group.kv_dtype.empty()) out << ",\"kv_dtype\":" << JsonString(group.kv_dtype);
    out << ",\"shape\":[";
    separator = "";
    for (int64_t extent : group.Shape(layout, num_kept)) {
      out << std::exchange(separator, ",") << extent;
    }
    out << "],\"nbytes\":" << group.NumBytes(layout, num_kept) << "}";
  }
  out << "]}";
  return out.str();
}

SequenceState ReadMetadata(std::string_view text, const CheckpointLayout& layout) {
  const Fields fields = ReadFields(text);
  CheckLayout(fields, layout);
  if (fields.length < 0 || fields.length > kInt32Max) {
    Raise(kValueError, "checkpoint metadata: seq_length must be between 0 and ", kInt32Max,
          ", got ", fields.length);
  }
  const int64_t num_pages = (fields.length + layout.page_size - 1) / layout.page_size;
  if (fields.num_covered != fields.length || fields.num_logical_pages != num_pages ||
      (num_pages > 1 && fields.first_length != layout.page_size)) {
    Raise(kValueError, "checkpoint metadata: the ", fields.num_logical_pages,
          " logical pages cover ", fields.num_covered, " positions; expected ", num_pages,
          " that cover ", fields.length);
  }
  const std::vector<int64_t> of_groups = layout.LayersOfGroups();
  if (fields.groups.size() != of_groups.size()) {
    const auto num_states = static_cast<int64_t>(of_groups.size()) - layout.num_layers();
    Raise(kValueError, "checkpoint metadata: expected a group for each of the ",
          layout.num_layers(), " layers",
          num_states ? " and of the " + std::to_string(num_states) + " with states" : "", ", got ",
          fields.groups.size());
  }
  SequenceState state{fields.length, {}, {}};
  for (size_t i = 0; i < of_groups.size(); ++i) {
    CheckGroup(fields, layout, static_cast<int64_t>(i), of_groups[i]);
    const bool has_states = i >= layout.layers.size();
    const int64_t page_size = has_states ? layout.layers[of_groups[i]].interval : layout.page_size;
    state.first_pages.push_back(fields.groups[i].first_position / page_size);
    if (has_states) state.state_lengths.push_back(fields.groups[i].state_length);
  }
  return state;
}

}  // namespace pagedkv
