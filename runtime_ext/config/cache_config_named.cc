// SPDX-License-Identifier: Apache-2.0
/*!
 * \file cache_config_named.cc
 * \brief Named creation, by a program or in a model: maps checked by name.
 */
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "base/cpu_features.h"
#include "base/error.h"
#include "config/cache_config.h"
#include "config/cache_config_checks.h"
#include "device/device_memory.h"

namespace pagedkv {

namespace {

using NamedValues = ffi::Map<ffi::String, ffi::Any>;

/*! \brief The fields of a map, by name. Unknown fields are an error. */
class Fields {
 public:
  Fields(NamedValues map, std::string owner, std::initializer_list<const char*> known)
      : map_(std::move(map)), owner_(std::move(owner)) {
    std::string names;
    for (const char* name : known) names += (names.empty() ? "" : ", ") + std::string(name);
    for (const auto& [key, value] : map_) {
      bool is_known = false;
      for (const char* name : known) is_known = is_known || key == name;
      if (!is_known) {
        Raise(kValueError, "unknown field '", std::string(key), "' in ", owner_,
              "; known: ", names);
      }
    }
  }

  template <typename T>
  std::optional<T> Find(const char* name) const {
    auto it = map_.find(name);
    if (it == map_.end() || (*it).second == nullptr) return std::nullopt;
    std::optional<T> value = (*it).second.template try_cast<T>();
    if (!value) {
      Raise(kTypeError, owner_, "['", name, "'] has the wrong type: ", (*it).second.GetTypeKey());
    }
    return value;
  }

  template <typename T>
  T Get(const char* name) const {
    std::optional<T> value = Find<T>(name);
    if (!value) Raise(kValueError, owner_, " lacks the field '", name, "'");
    return *std::move(value);
  }

 private:
  NamedValues map_;
  std::string owner_;
};

bool ParseAuxManager(const std::string& name, DLDevice device) {
  if (name == "auto") return CanOffsetPointers(device);
  if (name == "plain") return false;
  if (name != "merged") {
    Raise(kValueError, "aux_manager must be one of auto, merged, plain; got '", name, "'");
  }
  if (!CanOffsetPointers(device)) {
    Raise(kValueError, "aux_manager 'merged' needs a device that can address into a buffer");
  }
  return true;
}

Codec ParseCodec(const NamedValues& map, const std::string& owner) {
  Fields fields(map, owner,
                {"name", "row_bytes", "scale_bytes", "page_bytes", "revision", "v_row_bytes",
                 "v_scale_bytes"});
  const CodeSizes k{fields.Get<int64_t>("row_bytes"), fields.Get<int64_t>("scale_bytes")};
  return {fields.Get<std::string>("name"),
          k,
          {fields.Find<int64_t>("v_row_bytes").value_or(k.row_bytes),
           fields.Find<int64_t>("v_scale_bytes").value_or(k.scale_bytes)},
          fields.Get<int64_t>("page_bytes"),
          fields.Get<int64_t>("revision")};
}

/*! \brief The type of the layer's pages: a codec, a type of its own, or that of the cache. */
void ParsePageType(const Fields& fields, const std::string& owner, const std::string& kv_dtype,
                   LayerConfig* layer) {
  const std::string name = fields.Find<std::string>("kv_dtype").value_or(kv_dtype);
  if (auto codec = fields.Find<NamedValues>("codec")) {
    layer->codec = ParseCodec(*codec, owner + "['codec']");
    layer->page_dtype = kByte;
    if (layer->codec->name != name) {
      Raise(kValueError, owner, "['codec'] is of kv_dtype '", layer->codec->name, "', not '", name,
            "'");
    }
  } else {
    layer->page_dtype = ParseDtype("kv_dtype", name);
  }
}

/*! \brief A layer that keeps rows of the cache's type. */
LayerConfig RowsLayer(LayerKind kind, const Fields& fields, const std::string& width,
                      const std::string& dtype) {
  LayerConfig layer;
  layer.kind = kind;
  layer.num_qo_heads = layer.num_kv_heads = 1;
  layer.qk_head_dim = layer.v_head_dim = fields.Get<int64_t>(width.c_str());
  layer.history_tokens = fields.Find<int64_t>("history_tokens");
  layer.kernel_set = fields.Find<int64_t>("kernel_set").value_or(0);
  layer.page_dtype = ParseDtype("dtype", dtype);
  return layer;
}

LayerConfig ParseConv(const NamedValues& map, const std::string& owner, const std::string& dtype) {
  Fields fields(map, owner,
                {"kind", "channels", "width", "has_bias", "history_tokens", "kernel_set"});
  LayerConfig layer = RowsLayer(LayerKind::kConv, fields, "channels", dtype);
  layer.window = fields.Get<int64_t>("width");
  layer.has_bias = fields.Find<bool>("has_bias").value_or(false);
  return layer;
}

LayerConfig ParseRecurrent(const NamedValues& map, const std::string& owner,
                           const std::string& dtype) {
  Fields fields(
      map, owner,
      {"kind", "num_heads", "num_key_heads", "key_dim", "value_dim", "decays_by_channel",
       "has_beta", "row_width", "interval", "history_tokens", "kernel_set", "conv", "state_dtype"});
  LayerConfig layer = RowsLayer(LayerKind::kRecurrent, fields, "row_width", dtype);
  const int64_t interval = fields.Get<int64_t>("interval");
  CheckRange("interval", interval, 1, kInt32Max);
  const auto state_dtype = fields.Find<std::string>("state_dtype").value_or("float32");
  layer.recurrent = RecurrentShape{fields.Get<int64_t>("num_heads"),
                                   fields.Get<int64_t>("num_key_heads"),
                                   fields.Get<int64_t>("key_dim"),
                                   fields.Get<int64_t>("value_dim"),
                                   fields.Get<bool>("decays_by_channel"),
                                   fields.Get<bool>("has_beta"),
                                   interval,
                                   ParseDtype("state_dtype", state_dtype)};
  layer.window = interval;
  if (auto conv = fields.Find<NamedValues>("conv")) {
    layer.conv.push_back(ParseConv(*conv, owner + "['conv']", dtype));
  }
  return layer;
}

RopeMode RopeModeOf(int64_t value) {
  return static_cast<RopeMode>(CheckRange("rope_mode", value, 0, 2));
}

LayerConfig ParseLayer(const NamedValues& map, const std::string& owner, const std::string& dtype,
                       const CacheConfig& config) {
  const auto kind_of_map = map.find("kind");
  const auto name =
      kind_of_map == map.end() ? std::nullopt : (*kind_of_map).second.try_cast<ffi::String>();
  if (name && *name == "recurrent") return ParseRecurrent(map, owner, dtype);
  if (name && *name == "conv") return ParseConv(map, owner, dtype);
  Fields fields(map, owner,
                {"kind", "window", "num_qo_heads", "num_kv_heads", "qk_head_dim", "v_head_dim",
                 "mla_original_qk_head_dim", "mla_original_v_head_dim", "rope_mode", "rope_theta",
                 "rope_scale", "rope_details", "kernel_set", "kv_dtype", "codec", "sink_logits",
                 "kv_scales"});
  auto kind = fields.Get<std::string>("kind");
  const bool needs_window = kind == "mha_sliding" || kind == "mha_chunked";
  if (!needs_window && kind != "mha" && kind != "mla" && kind != "linear") {
    Raise(kValueError, owner,
          "['kind'] must be one of mha, mha_sliding, mha_chunked, mla, linear, ",
          "recurrent, conv; got '", kind, "'");
  }
  LayerConfig layer;
  layer.window = fields.Find<int64_t>("window").value_or(0);
  layer.is_chunked = kind == "mha_chunked";
  if (needs_window || (kind == "mla" && layer.window != 0)) {
    CheckRange("window", layer.window, 1, kInt32Max);
  } else if (layer.window != 0) {
    Raise(kValueError, owner,
          "['window'] is required for kinds 'mha_sliding' and 'mha_chunked', and invalid "
          "otherwise, except for 'mla'");
  }
  if (kind == "linear") {
    layer.kind = LayerKind::kLinear;
    return layer;
  }
  layer.kind = kind == "mla" ? LayerKind::kMLA : LayerKind::kMHA;
  layer.num_qo_heads = fields.Get<int64_t>("num_qo_heads");
  layer.num_kv_heads = layer.is_mla() ? fields.Find<int64_t>("num_kv_heads").value_or(1)
                                      : fields.Get<int64_t>("num_kv_heads");
  layer.original_qk_head_dim = fields.Find<int64_t>("mla_original_qk_head_dim").value_or(0);
  layer.original_v_head_dim = fields.Find<int64_t>("mla_original_v_head_dim").value_or(0);
  layer.qk_head_dim = fields.Get<int64_t>("qk_head_dim");
  layer.v_head_dim = fields.Find<int64_t>("v_head_dim").value_or(layer.qk_head_dim);
  const auto rope_mode = fields.Find<int64_t>("rope_mode");
  layer.rope_mode = rope_mode ? RopeModeOf(*rope_mode) : config.rope_mode;
  layer.rope_theta = fields.Find<double>("rope_theta").value_or(layer.rope_theta);
  layer.rope_scale = fields.Find<double>("rope_scale").value_or(layer.rope_scale);
  layer.rope_details = fields.Find<std::string>("rope_details").value_or("");
  layer.kernel_set = fields.Find<int64_t>("kernel_set").value_or(0);
  layer.has_sink_logits = fields.Find<bool>("sink_logits").value_or(false);
  ParsePageType(fields, owner, config.kv_dtype, &layer);
  if (auto scales = fields.Find<ffi::Tensor>("kv_scales")) layer.kv_scales = *scales;
  return layer;
}

/*! \brief Refuses kernels that are compiled for other pages or for another CPU. */
void RequireFit(const Fields& compiled_for, const NamedValues& config) {
  const int64_t built_page_size = compiled_for.Get<int64_t>("page_size");
  const auto named = config.find("page_size");
  const auto page_size = named == config.end() ? std::nullopt : (*named).second.try_cast<int64_t>();
  if (page_size && *page_size != built_page_size) {
    Raise(kValueError, "the model's kernels are compiled for pages of ", built_page_size,
          " slots, but page_size is ", *page_size, ": create the cache with page_size ",
          built_page_size, ", or compile the model with kernel_page_size=", *page_size,
          ", an argument of tvm_pagedkv.PagedKVCache");
  }
  if (auto architecture = compiled_for.Find<std::string>("architecture")) {
    auto features = compiled_for.Get<ffi::Array<ffi::String>>("features");
    RequireCPU("the model's kernels", *architecture, {features.begin(), features.end()});
  }
}

}  // namespace

CacheConfig CacheConfig::ReadNamed(const NamedValues& config, const ffi::AnyView& kernels,
                                   DLDevice device, bool serves_engine) {
  Fields fields(config, "config",
                {"max_num_sequences", "max_total_tokens", "prefill_chunk_size", "page_size",
                 "dtype", "kv_dtype", "rope_mode", "sliding_window", "sliding_window_includes_self",
                 "aux_manager", "rope_ext_factors", "layers", "share_prefix", "enable_kv_transfer",
                 "layer_indptr", "stage"});
  CheckDevice(device);
  CacheConfig result;
  result.device = device;
  result.max_num_sequences = fields.Get<int64_t>("max_num_sequences");
  result.max_total_tokens = fields.Get<int64_t>("max_total_tokens");
  result.prefill_chunk_size = fields.Get<int64_t>("prefill_chunk_size");
  result.page_size = fields.Get<int64_t>("page_size");
  auto dtype = fields.Get<std::string>("dtype");
  result.dtype = ParseDtype("dtype", dtype);
  result.kv_dtype = fields.Find<std::string>("kv_dtype").value_or(dtype);
  result.rope_mode = RopeModeOf(fields.Get<int64_t>("rope_mode"));
  result.has_merged_aux =
      ParseAuxManager(fields.Find<std::string>("aux_manager").value_or("auto"), device);
  result.share_prefix = fields.Find<bool>("share_prefix").value_or(true);
  result.has_sequence_windows = fields.Find<bool>("sliding_window").value_or(false);
  result.sliding_window_includes_self = fields.Find<bool>("sliding_window_includes_self");
  result.enable_kv_transfer = fields.Find<bool>("enable_kv_transfer").value_or(false);
  if (auto factors = fields.Find<ffi::Tensor>("rope_ext_factors")) {
    result.rope_ext_factors = *factors;
  }
  auto layers = fields.Get<ffi::Array<ffi::Any>>("layers");
  for (size_t i = 0; i < layers.size(); ++i) {
    std::string owner = "config['layers'][" + std::to_string(i) + "]";
    auto layer = layers[i].try_cast<NamedValues>();
    if (!layer) Raise(kTypeError, owner, " must be a map, got ", layers[i].GetTypeKey());
    result.layers.push_back(ParseLayer(*layer, owner, dtype, result));
  }
  if (auto map = kernels.try_cast<NamedValues>()) {
    result.kernel_sets.push_back(KernelSet::FromMap(*map));
  } else if (auto maps = kernels.try_cast<ffi::Array<NamedValues>>()) {
    for (const NamedValues& each : *maps) result.kernel_sets.push_back(KernelSet::FromMap(each));
  } else {
    Raise(kTypeError, "kernels must be a map or an array of maps, got ", kernels.GetTypeKey());
  }
  auto layer_indptr = fields.Find<ffi::Shape>("layer_indptr").value_or(ffi::Shape());
  if (serves_engine) result.ServeEngine();
  result.SettleRope();
  result.KeepStage({layer_indptr.begin(), layer_indptr.end()}, fields.Find<int64_t>("stage"));
  result.Validate();
  return result;
}

CacheConfig CacheConfig::FromModel(const NamedValues& config, const ffi::AnyView& kernels,
                                   const ffi::Tensor& prototype, const NamedValues& compiled_for) {
  if (!prototype.defined()) Raise(kTypeError, "the cache's device needs a tensor, got None");
  RequireFit(Fields(compiled_for, "compiled_for", {"page_size", "architecture", "features"}),
             config);
  return ReadNamed(config, kernels, prototype.device(), /*serves_engine=*/true);
}

}  // namespace pagedkv
