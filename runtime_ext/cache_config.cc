// SPDX-License-Identifier: Apache-2.0
/*!
 * \file cache_config.cc
 * \brief Named and positional creation, read into one structure.
 */
#include "cache_config.h"

#include <tvm/ffi/dtype.h>
#include <tvm/runtime/device_api.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "error.h"
#include "sequence_table.h"

namespace pagedkv {

namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxPageSize = 256;
constexpr int64_t kMaxHeads = 4096;
constexpr int64_t kMaxHeadDim = 4096;

using NamedValues = ffi::Map<ffi::String, ffi::Any>;

/*! \brief The fields of a map, by name; one that nobody knows is an error. */
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

int64_t CheckRange(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    Raise(kValueError, name, " must be between ", low, " and ", high, ", got ", value);
  }
  return value;
}

DLDataType ParseDtype(const char* name, const std::string& text) {
  if (text == "float32") return {kDLFloat, 32, 1};
  if (text == "float16") return {kDLFloat, 16, 1};
  if (text == "bfloat16") return {kDLBfloat, 16, 1};
  Raise(kValueError, name, " must be one of float32, float16, bfloat16; got '", text, "'");
}

bool CanOffsetPointers(DLDevice device) {
  if (device.device_type == kDLCPU) return true;
  return tvm::runtime::DeviceAPI::Get(device)->SupportsDevicePointerArithmeticsOnHost();
}

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

LayerConfig ParseLayer(const NamedValues& map, const std::string& owner) {
  Fields fields(map, owner,
                {"kind", "window", "num_qo_heads", "num_kv_heads", "qk_head_dim", "v_head_dim",
                 "mla_original_qk_head_dim", "mla_original_v_head_dim", "rope_theta", "rope_scale",
                 "kernel_set"});
  auto kind = fields.Get<std::string>("kind");
  if (kind != "mha" && kind != "mha_sliding" && kind != "mla") {
    Raise(kValueError, owner, "['kind'] must be one of mha, mha_sliding, mla; got '", kind, "'");
  }
  LayerConfig layer;
  layer.window = fields.Find<int64_t>("window").value_or(0);
  if (kind == "mha_sliding") {
    CheckRange("window", layer.window, 1, kInt32Max);
  } else if (layer.window != 0) {
    Raise(kValueError, owner, "['window'] belongs to kind 'mha_sliding' only");
  }
  layer.kind = kind == "mla" ? LayerKind::kMLA : LayerKind::kMHA;
  layer.num_qo_heads = fields.Get<int64_t>("num_qo_heads");
  layer.num_kv_heads = layer.is_mla() ? fields.Find<int64_t>("num_kv_heads").value_or(1)
                                      : fields.Get<int64_t>("num_kv_heads");
  layer.original_qk_head_dim = fields.Find<int64_t>("mla_original_qk_head_dim").value_or(0);
  layer.original_v_head_dim = fields.Find<int64_t>("mla_original_v_head_dim").value_or(0);
  layer.qk_head_dim = fields.Get<int64_t>("qk_head_dim");
  layer.v_head_dim = fields.Find<int64_t>("v_head_dim").value_or(layer.qk_head_dim);
  layer.rope_theta = fields.Find<double>("rope_theta").value_or(10000.0);
  layer.rope_scale = fields.Find<double>("rope_scale").value_or(1.0);
  layer.kernel_set = fields.Find<int64_t>("kernel_set").value_or(0);
  return layer;
}

void RequireKernels(const LayerConfig& layer, const KernelSet& kernels) {
  std::string missing;
  auto require = [&](KernelName name) {
    if (!kernels.Has(name)) missing += (missing.empty() ? "" : ", ") + std::string(ToString(name));
  };
  if (layer.is_mla()) {
    if (kernels.IsFlashInfer(KernelName::kPrefillRagged)) {
      Raise(kNotImplementedError, "FlashInfer's functions for MLA layers");
    }
    require(KernelName::kTransposeAppendMLA);
    require(KernelName::kMLAPrefill);
  } else {
    if (!kernels.Has(KernelName::kRopeAppend)) {
      require(KernelName::kTransposeAppend);
      require(KernelName::kSplitRotary);
    }
    require(layer.prefill());
    require(layer.decode());
  }
  require(KernelName::kCopySinglePage);
  if (!missing.empty()) Raise(kValueError, "the cache needs kernels that are missing: ", missing);
  if (layer.window > 0 && (kernels.IsStock(layer.prefill()) || kernels.IsStock(layer.decode()))) {
    Raise(kNotImplementedError, "layers with a sliding window over the stock cache's kernels");
  }
}

// Arguments of the positional form.
template <typename T>
T Argument(ffi::PackedArgs args, int index, const char* name) {
  std::optional<T> value = args[index].try_cast<T>();
  if (!value) {
    Raise(kTypeError, "argument ", index, " (", name,
          ") has the wrong type: ", args[index].GetTypeKey());
  }
  return *std::move(value);
}

ffi::Shape ShapeArgument(ffi::PackedArgs args, int index, const char* name, size_t min_size) {
  auto shape = Argument<ffi::Shape>(args, index, name);
  if (shape.size() < min_size) {
    Raise(kValueError, "argument ", index, " (", name, ") needs ", min_size, " numbers, got ",
          shape.size());
  }
  return shape;
}

/*! \brief Index 24: a plain function, or ["pagedkv", split_rotary, rope_append, page_size]. */
void SetRotary(const ffi::AnyView& value, int64_t page_size, KernelSet* kernels) {
  auto array = value.as<ffi::Array<ffi::Any>>();
  if (!array || array->size() != 4) {
    kernels->Set(KernelName::kSplitRotary, value);
    return;
  }
  auto built_page_size = (*array)[3].try_cast<int64_t>();
  if (!built_page_size || *built_page_size != page_size) {
    Raise(kValueError, "the kernels are built for pages of ",
          built_page_size ? std::to_string(*built_page_size) : "unknown",
          " slots, but page_size is ", page_size);
  }
  kernels->Set(KernelName::kSplitRotary, (*array)[1]);
  kernels->Set(KernelName::kRopeAppend, (*array)[2]);
}

KernelSet PositionalKernels(ffi::PackedArgs args, int64_t page_size) {
  constexpr KernelName kFrom16[] = {
      KernelName::kPrefill,       KernelName::kDecode,    KernelName::kPrefillSliding,
      KernelName::kDecodeSliding, KernelName::kTreePaged, KernelName::kTree,
      KernelName::kMLAPrefill,
  };
  KernelSet kernels;
  kernels.Set(KernelName::kTransposeAppend, args[13]);
  kernels.Set(KernelName::kTransposeAppendMLA, args[14]);
  int index = 16;
  for (KernelName name : kFrom16) kernels.Set(name, args[index++]);
  auto merge = Argument<ffi::Array<ffi::Any>>(args, 23, "merge functions");
  if (!merge.empty()) kernels.Set(KernelName::kMerge, merge.back());
  SetRotary(args[24], page_size, &kernels);
  kernels.Set(KernelName::kCopySinglePage, args[25]);
  kernels.Set(KernelName::kDebugGetKV, args[26]);
  kernels.Set(KernelName::kCompactCopy, args[27]);
  return kernels;
}

void CheckPositionalLayers(const ffi::Shape& layer_indptr, const ffi::Shape& kinds) {
  if (layer_indptr.size() > 2) Raise(kNotImplementedError, "pipeline stages");
  if (layer_indptr[0] != 0 || layer_indptr[1] != static_cast<int64_t>(kinds.size())) {
    Raise(kValueError, "argument 1 (layer_indptr) must be [0, ", kinds.size(), "], got [",
          layer_indptr[0], ", ", layer_indptr[1], "]");
  }
  for (int64_t kind : kinds) {
    if (kind == 2) Raise(kNotImplementedError, "linear attention layers");
    if (kind != 0 && kind != 1 && kind != 3) {
      Raise(kValueError, "argument 6 (attention kinds) has an unknown kind: ", kind);
    }
    // The arguments have room for the shape of one kind.
    if ((kind == 1) != (kinds[0] == 1)) {
      Raise(kNotImplementedError, "MHA and MLA layers in one positional call; use pagedkv.create");
    }
  }
}

/*! \brief Index 15: as all kernels; or, of MLA layers, [tag, function, qk head dim, v head dim]. */
void SetRagged(const ffi::AnyView& value, LayerConfig* layer, KernelSet* kernels) {
  auto array = value.as<ffi::Array<ffi::Any>>();
  if (!layer->is_mla() || !array || array->size() != 4) {
    kernels->Set(KernelName::kPrefillRagged, value);
    return;
  }
  std::optional<int64_t> dims[] = {(*array)[2].try_cast<int64_t>(),
                                   (*array)[3].try_cast<int64_t>()};
  if (!dims[0] || !dims[1]) {
    Raise(kTypeError, "argument 15 (prefill_ragged) must end in two head dims");
  }
  layer->original_qk_head_dim = *dims[0];
  layer->original_v_head_dim = *dims[1];
  ffi::Array<ffi::Any> tagged{(*array)[0], (*array)[1]};
  kernels->Set(KernelName::kPrefillRagged, tagged);
}

void CheckLayer(const LayerConfig& layer) {
  CheckRange("num_qo_heads", layer.num_qo_heads, 1, kMaxHeads);
  CheckRange("num_kv_heads", layer.num_kv_heads, 1, kMaxHeads);
  CheckRange("qk_head_dim", layer.qk_head_dim, 1, kMaxHeadDim);
  if (layer.num_qo_heads % layer.num_kv_heads) {
    Raise(kValueError, "num_qo_heads (", layer.num_qo_heads,
          ") must be a multiple of num_kv_heads (", layer.num_kv_heads, ")");
  }
  if (layer.is_mla()) {
    if (layer.num_kv_heads != 1) {
      Raise(kValueError, "num_kv_heads of an MLA layer must be 1, got ", layer.num_kv_heads,
            ": all query heads share the latent rows");
    }
    CheckRange("v_head_dim of an MLA layer", layer.v_head_dim, 1, layer.qk_head_dim);
  } else if (layer.v_head_dim != layer.qk_head_dim) {
    Raise(kValueError, "v_head_dim (", layer.v_head_dim, ") must equal qk_head_dim (",
          layer.qk_head_dim, "): a page keeps K and V rows of one width");
  }
  const int64_t original_qk = layer.original_qk_head_dim, original_v = layer.original_v_head_dim;
  CheckRange("mla_original_qk_head_dim", original_qk, 0, layer.is_mla() ? kMaxHeadDim : 0);
  CheckRange("mla_original_v_head_dim", original_v, 0, layer.is_mla() ? kMaxHeadDim : 0);
  if ((original_qk == 0) != (original_v == 0)) {
    Raise(kValueError, "mla_original_qk_head_dim (", original_qk, ") and mla_original_v_head_dim (",
          original_v, ") must be given together");
  }
  if (!(std::isfinite(layer.rope_theta) && layer.rope_theta > 0 &&
        std::isfinite(layer.rope_scale) && layer.rope_scale > 0)) {
    Raise(kValueError, "rope_theta and rope_scale must be positive, got ", layer.rope_theta,
          " and ", layer.rope_scale);
  }
}

}  // namespace

const char* ToString(LayerKind kind) { return kind == LayerKind::kMLA ? "mla" : "mha"; }

const char* ToString(const LayerConfig& layer) {
  return layer.window ? "mha_sliding" : ToString(layer.kind);
}

CacheConfig CacheConfig::FromNamed(const NamedValues& config, const ffi::AnyView& kernels,
                                   DLDevice device) {
  Fields fields(config, "config",
                {"max_num_sequences", "max_total_tokens", "prefill_chunk_size", "page_size",
                 "dtype", "kv_dtype", "rope_mode", "aux_manager", "rope_ext_factors", "layers"});
  CacheConfig result;
  result.device = device;
  result.max_num_sequences = fields.Get<int64_t>("max_num_sequences");
  result.max_total_tokens = fields.Get<int64_t>("max_total_tokens");
  result.prefill_chunk_size = fields.Get<int64_t>("prefill_chunk_size");
  result.page_size = fields.Get<int64_t>("page_size");
  auto dtype = fields.Get<std::string>("dtype");
  result.dtype = ParseDtype("dtype", dtype);
  result.kv_dtype = ParseDtype("kv_dtype", fields.Find<std::string>("kv_dtype").value_or(dtype));
  result.rope_mode =
      static_cast<RopeMode>(CheckRange("rope_mode", fields.Get<int64_t>("rope_mode"), 0, 2));
  result.has_merged_aux =
      ParseAuxManager(fields.Find<std::string>("aux_manager").value_or("auto"), device);
  if (auto factors = fields.Find<ffi::Tensor>("rope_ext_factors")) {
    result.rope_ext_factors = *factors;
  }
  auto layers = fields.Get<ffi::Array<ffi::Any>>("layers");
  for (size_t i = 0; i < layers.size(); ++i) {
    std::string owner = "config['layers'][" + std::to_string(i) + "]";
    auto layer = layers[i].try_cast<NamedValues>();
    if (!layer) Raise(kTypeError, owner, " must be a map, got ", layers[i].GetTypeKey());
    result.layers.push_back(ParseLayer(*layer, owner));
  }
  if (auto map = kernels.try_cast<NamedValues>()) {
    result.kernel_sets.push_back(KernelSet::FromMap(*map));
  } else if (auto maps = kernels.try_cast<ffi::Array<NamedValues>>()) {
    for (const NamedValues& each : *maps) result.kernel_sets.push_back(KernelSet::FromMap(each));
  } else {
    Raise(kTypeError, "kernels must be a map or an array of maps, got ", kernels.GetTypeKey());
  }
  result.Validate();
  return result;
}

CacheConfig CacheConfig::FromPositional(ffi::PackedArgs args) {
  if (args.size() != 28 && args.size() != 29) {
    Raise(kTypeError, "paged_attention_kv_cache_create takes 28 or 29 arguments, got ",
          args.size());
  }
  auto sizes = ShapeArgument(args, 0, "cache sizes", 5);
  auto layer_indptr = ShapeArgument(args, 1, "layer_indptr", 2);
  auto kinds = ShapeArgument(args, 6, "attention kinds", 1);
  CheckPositionalLayers(layer_indptr, kinds);
  if (Argument<int64_t>(args, 7, "enable_kv_transfer")) Raise(kNotImplementedError, "KV transfer");
  auto prototype = Argument<ffi::Tensor>(args, 12, "a tensor of the cache's type and device");
  if (!prototype.defined()) Raise(kTypeError, "argument 12 must be a tensor, got None");

  CacheConfig result;
  result.max_num_sequences = sizes[0];
  result.max_total_tokens = sizes[1];
  result.prefill_chunk_size = sizes[2];
  result.page_size = sizes[3];
  result.device = prototype.device();
  result.dtype = ParseDtype("dtype", ffi::DLDataTypeToString(prototype.dtype()));
  result.kv_dtype = result.dtype;
  result.has_merged_aux = CanOffsetPointers(result.device);
  result.rope_mode =
      static_cast<RopeMode>(CheckRange("rope_mode", Argument<int64_t>(args, 8, "rope_mode"), 0, 2));
  // Front ends pass a number where there are no factors.
  if (auto factors = args[11].as<ffi::Tensor>()) result.rope_ext_factors = *factors;

  LayerConfig layer;
  layer.kind = kinds[0] == 1 ? LayerKind::kMLA : LayerKind::kMHA;
  layer.num_qo_heads = Argument<int64_t>(args, 2, "num_qo_heads");
  // Models give the KV heads that they have before absorption.
  layer.num_kv_heads = layer.is_mla() ? 1 : Argument<int64_t>(args, 3, "num_kv_heads");
  layer.qk_head_dim = Argument<int64_t>(args, 4, "qk_head_dim");
  layer.v_head_dim = Argument<int64_t>(args, 5, "v_head_dim");
  layer.rope_scale = Argument<double>(args, 9, "rope_scale");
  layer.rope_theta = Argument<double>(args, 10, "rope_theta");
  layer.kernel_set = 0;
  KernelSet kernels = PositionalKernels(args, result.page_size);
  SetRagged(args[15], &layer, &kernels);
  result.layers.assign(kinds.size(), layer);
  for (size_t i = 0; i < kinds.size(); ++i) {
    if (kinds[i] != 3) continue;
    if (sizes.size() < 6) {
      Raise(kValueError, "argument 0 (cache sizes) needs a 6th number, the window of the layers ",
            "with one; got ", sizes.size(), " numbers");
    }
    result.layers[i].window = CheckRange("the layers' window", sizes[5], 1, kInt32Max);
  }
  result.kernel_sets.push_back(std::move(kernels));
  result.Validate();
  return result;
}

int64_t CacheConfig::NumPages(const LayerConfig& layer) const {
  if (layer.window == 0) return num_pages();
  // Between steps a sequence keeps this many positions, wherever in a page they begin; a step adds
  // most pages when it has many sequences. KVCacheConfig.num_pages_of has the same.
  const int64_t num_kept = layer.window - 1 + kPoppable;
  const int64_t pages_kept = (num_kept + page_size - 2) / page_size + 1;
  const int64_t batch_size = std::min(max_num_sequences, prefill_chunk_size);
  const int64_t pages_added = (prefill_chunk_size - batch_size) / page_size + batch_size;
  return std::min(num_pages(), max_num_sequences * pages_kept + pages_added);
}

void CacheConfig::Validate() const {
  CheckRange("max_num_sequences", max_num_sequences, 1, kInt32Max);
  CheckRange("prefill_chunk_size", prefill_chunk_size, 1, kInt32Max);
  CheckRange("page_size", page_size, 1, kMaxPageSize);
  if (page_size & (page_size - 1)) {
    Raise(kValueError, "page_size must be a power of two, got ", page_size);
  }
  // Slots are int32, those of a last page that is not full included.
  CheckRange("max_total_tokens", max_total_tokens, 1, kInt32Max - kMaxPageSize);
  if (layers.empty()) Raise(kValueError, "a cache needs at least one layer");
  if (kernel_sets.empty()) Raise(kValueError, "a cache needs at least one set of kernels");
  for (const LayerConfig& layer : layers) {
    CheckLayer(layer);
    CheckRange("kernel_set", layer.kernel_set, 0, static_cast<int64_t>(kernel_sets.size()) - 1);
    RequireKernels(layer, kernel_sets[layer.kernel_set]);
  }
  if (rope_ext_factors.defined() && rope_mode != RopeMode::kNormal) {
    Raise(kValueError, "rope_ext_factors need rope_mode 1 (normal)");
  }
}

}  // namespace pagedkv
