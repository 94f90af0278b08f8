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
    int64_t first_position = 0;
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

void CheckGroup(const Fields& fields, int64_t layer, const CheckpointLayout& layout) {
  const Fields::Group& group = fields.groups[layer];
  auto check = [&](const char* name, int64_t actual, int64_t expected) {
    if (actual == expected) return;
    Raise(kValueError, "checkpoint metadata: ", name, " of group ", layer, " must be ", expected,
          ", got ", actual);
  };
  check("group_index", group.index, layer);
  check("layer_begin", group.layer_begin, layer);
  check("layer_end", group.layer_end, layer + 1);
  const int64_t first = group.first_position;
  if (first < 0 || first % layout.page_size != 0 || first > fields.length) {
    Raise(kValueError, "checkpoint metadata: first_position of group ", layer,
          " must be that of a page within the ", fields.length, " positions, got ", first);
  }
  check("num_logical_pages", group.num_pages, fields.num_logical_pages - first / layout.page_size);
  check("nbytes", group.num_bytes, group.num_pages * layout.PageBytes(layer));
  const CheckpointLayout::Layer& expected = layout.layers[layer];
  const std::string codec = expected.codec_page_bytes ? expected.kv_dtype : "";
  if (group.dtype != expected.GroupDtype() || group.kv_dtype != codec ||
      group.shape != layout.GroupShape(layer, group.num_pages)) {
    Raise(kValueError, "checkpoint metadata: shape or dtype of group ", layer,
          " does not agree with the layout");
  }
}

}  // namespace

std::string RopeText(const std::string& mode, double theta, double scale,
                     const std::string& details) {
  if (mode == "none") return mode;
  ClassicText text;
  text.precision(std::numeric_limits<double>::max_digits10);
  text << mode << " theta=" << theta << " scale=" << scale;
  if (!details.empty()) text << " " << details;
  return text.str();
}

std::string CheckpointLayout::Layer::Text() const {
  ClassicText text;
  text << kind;
  if (window) text << " window=" << window;
  if (!is_mla()) text << " num_kv_heads=" << num_kv_heads;
  text << " qk_head_dim=" << qk_head_dim << " v_head_dim=" << v_head_dim;
  if (!is_mla()) text << " rope=" << rope;
  return text.str();
}

std::string CheckpointLayout::Types() const {
  ClassicText text;
  for (size_t i = 0, end; i < layers.size(); i = end) {
    for (end = i + 1; end < layers.size() && layers[end].kv_dtype == layers[i].kv_dtype;) ++end;
    if (end - i == layers.size()) return layers[i].kv_dtype;
    text << (i ? ", " : "") << end - i << " x " << layers[i].kv_dtype;
  }
  return text.str();
}

std::string CheckpointLayout::Text() const {
  ClassicText text;
  text << "page_size=" << page_size << " dtype=" << Types();
  for (size_t i = 0, end; i < layers.size(); i = end) {
    const std::string layer = layers[i].Text();
    for (end = i + 1; end < layers.size() && layers[end].Text() == layer;) ++end;
    text << "; " << end - i << " x " << layer;
  }
  if (!part.empty()) text << "; " << part;
  return text.str();
}

std::string CheckpointLayout::Hash() const { return HexHash(Text()); }

std::string HexHash(const std::string& bytes) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (unsigned char c : bytes) hash = (hash ^ c) * 1099511628211u;
  std::string digits(16, '0');
  for (auto it = digits.rbegin(); it != digits.rend(); ++it, hash >>= 4) {
    *it = "0123456789abcdef"[hash & 15];
  }
  return digits;
}

std::vector<int64_t> CheckpointLayout::GroupShape(int64_t layer, int64_t num_pages) const {
  const Layer& l = layers[layer];
  if (l.codec_page_bytes) return {1, num_pages, l.codec_page_bytes};
  if (l.is_mla()) return {1, num_pages, page_size, l.qk_head_dim};
  return {1, num_pages, 2, l.num_kv_heads, page_size, l.qk_head_dim};
}

int64_t CheckpointLayout::PageBytes(int64_t layer) const {
  int64_t bytes = layers[layer].codec_page_bytes ? 1 : layers[layer].item_bytes;
  for (int64_t extent : GroupShape(layer, 1)) bytes *= extent;
  return bytes;
}

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
  for (int64_t l = 0; l < layout.num_layers(); ++l) {
    const int64_t num_kept = num_pages - state.first_pages[l];
    out << (l ? "," : "") << "{\"group_index\":" << l << ",\"layer_begin\":" << l
        << ",\"layer_end\":" << l + 1
        << ",\"first_position\":" << state.first_pages[l] * layout.page_size
        << ",\"num_logical_pages\":" << num_kept
        << ",\"dtype\":" << JsonString(layout.layers[l].GroupDtype());
    if (layout.layers[l].codec_page_bytes) {
      out << ",\"kv_dtype\":" << JsonString(layout.layers[l].kv_dtype);
    }
    out << ",\"shape\":[";
    separator = "";
    for (int64_t extent : layout.GroupShape(l, num_kept)) {
      out << std::exchange(separator, ",") << extent;
    }
    out << "],\"nbytes\":" << num_kept * layout.PageBytes(l) << "}";
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
  if (static_cast<int64_t>(fields.groups.size()) != layout.num_layers()) {
    Raise(kValueError, "checkpoint metadata: expected a group for each of the ",
          layout.num_layers(), " layers, got ", fields.groups.size());
  }
  SequenceState state{fields.length, {}};
  for (int64_t l = 0; l < layout.num_layers(); ++l) {
    CheckGroup(fields, l, layout);
    state.first_pages.push_back(fields.groups[l].first_position / layout.page_size);
  }
  return state;
}

}  // namespace pagedkv
