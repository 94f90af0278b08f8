// SPDX-License-Identifier: Apache-2.0
/*!
 * \file positional_named.cc
 * \brief Argument 24 of the positional constructor.
 */
#include "config/positional_named.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/cpu_features.h"
#include "base/error.h"
#include "config/cache_config_checks.h"
#include "device/device_memory.h"

namespace pagedkv {

namespace {

/*! \brief The number of fixed items of index 24; pairs of a name and a value follow them. */
constexpr size_t kNumFixed = 4;

/*!
 * \brief A type of numbers by its name, or of a codec its name, row_bytes, scale_bytes, page_bytes,
 * revision, and where V has others v_row_bytes and v_scale_bytes.
 */
void SetPageType(const ffi::Any& value, LayerConfig* layer) {
  if (auto name = value.try_cast<ffi::String>()) {
    layer->page_dtype = ParseDtype("kv_dtype", *name);
    return;
  }
  auto array = value.as<ffi::Array<ffi::Any>>();
  std::optional<ffi::String> name;
  std::vector<int64_t> sizes;
  if (array && (array->size() == 5 || array->size() == 7)) {
    name = (*array)[0].try_cast<ffi::String>();
    for (size_t i = 1; i < array->size(); ++i) {
      if (auto size = (*array)[i].try_cast<int64_t>()) sizes.push_back(*size);
    }
  }
  if (!name || sizes.size() + 1 != array->size()) {
    Raise(kTypeError,
          "argument 24 needs a kv_dtype: a name, or a name, sizes and a revision of a codec");
  }
  const CodeSizes k{sizes[0], sizes[1]};
  layer->page_dtype = kByte;
  layer->codec = Codec{std::string(*name), k, sizes.size() > 4 ? CodeSizes{sizes[4], sizes[5]} : k,
                       sizes[2], sizes[3]};
}

/*! \brief Refuses kernels for another CPU: an architecture, and features with spaces. */
void RequireCPUOf(const ffi::Any& value) {
  auto array = value.as<ffi::Array<ffi::Any>>();
  std::optional<ffi::String> parts[2];
  if (array && array->size() == 2) {
    for (int i = 0; i < 2; ++i) parts[i] = (*array)[i].try_cast<ffi::String>();
  }
  if (!parts[0] || !parts[1]) {
    Raise(kTypeError, "argument 24 needs the CPU of the kernels: an architecture and features");
  }
  RequireCPU("the model's kernels", *parts[0], SplitWords(*parts[1]));
}

}  // namespace

void SetRotary(const ffi::AnyView& value, int64_t page_size, LayerConfig* layer,
               KernelSet* kernels) {
  auto array = value.as<ffi::Array<ffi::Any>>();
  if (!array || array->size() < kNumFixed) {
    kernels->Set(KernelName::kSplitRotary, value);
    return;
  }
  auto built_page_size = (*array)[3].try_cast<int64_t>();
  if (!built_page_size) Raise(kTypeError, "argument 24 needs the page size of the kernels");
  if (*built_page_size != page_size) {
    Raise(kValueError, "the model's kernels are compiled for pages of ", *built_page_size,
          " slots, but page_size is ", page_size, ": create the cache with page_size ",
          *built_page_size, ", or compile the model with kernel_page_size=", page_size,
          ", an argument of tvm_pagedkv.PagedKVCache");
  }
  kernels->Set(KernelName::kSplitRotary, (*array)[1]);
  kernels->Set(KernelName::kRopeAppend, (*array)[2]);
  if (array->size() % 2) Raise(kTypeError, "argument 24 must end in pairs of a name and a kernel");
  for (size_t i = kNumFixed; i < array->size(); i += 2) {
    auto name = (*array)[i].try_cast<ffi::String>();
    if (!name) {
      Raise(kTypeError, "argument 24 needs a kernel's name, got ", (*array)[i].GetTypeKey());
    }
    if (*name == "kv_dtype" || *name == "mla_kv_dtype") {
      if (layer->is_mla() == (*name == "mla_kv_dtype")) SetPageType((*array)[i + 1], layer);
      continue;
    }
    // SetRopes, IndexLane, SetScales
    if (*name == "rope" || *name == "index" || *name == "kv_scales") continue;
    if (*name == "sink_logits") {
      layer->has_sink_logits = true;
      continue;
    }
    if (*name == "cpu") {
      RequireCPUOf((*array)[i + 1]);
      continue;
    }
    kernels->Set(KernelNameOf(*name), (*array)[i + 1]);
  }
}

void SetRopes(const ffi::AnyView& value, CacheConfig* config) {
  auto array = value.as<ffi::Array<ffi::Any>>();
  if (!array) return;
  for (size_t i = kNumFixed; i + 1 < array->size(); i += 2) {
    auto name = (*array)[i].try_cast<ffi::String>();
    if (!name || *name != "rope") continue;
    auto rope = (*array)[i + 1].as<ffi::Array<ffi::Any>>();
    std::optional<ffi::Shape> ids;
    std::optional<double> theta, scale;
    std::optional<ffi::String> details;
    if (rope && rope->size() >= 4 && rope->size() % 2 == 0) {
      ids = (*rope)[0].try_cast<ffi::Shape>();
      theta = (*rope)[1].try_cast<double>();
      scale = (*rope)[2].try_cast<double>();
      details = (*rope)[3].try_cast<ffi::String>();
    }
    if (!ids || !theta || !scale || !details) {
      Raise(kTypeError,
            "argument 24 needs a rope: layers, theta, scale, details, names and kernels");
    }
    std::optional<int64_t> kernel_set;
    for (int64_t id : *ids) {
      CheckRange("a layer of a rope", id, 0, static_cast<int64_t>(config->layers.size()) - 1);
      LayerConfig& layer = config->layers[id];
      if (!layer.is_mha()) Raise(kValueError, "layer ", id, " of a rope has no rotation");
      if (!kernel_set && rope->size() > 4) {
        KernelSet kernels = config->kernel_sets[layer.kernel_set];
        for (size_t k = 4; k < rope->size(); k += 2) {
          auto kernel = (*rope)[k].try_cast<ffi::String>();
          if (!kernel) Raise(kTypeError, "argument 24 needs the name of a rope's kernel");
          kernels.Set(KernelNameOf(*kernel), (*rope)[k + 1]);
        }
        kernel_set = static_cast<int64_t>(config->kernel_sets.size());
        config->kernel_sets.push_back(std::move(kernels));
      }
      layer.rope_theta = *theta;
      layer.rope_scale = *scale;
      layer.rope_details = *details;
      layer.kernel_set = kernel_set.value_or(layer.kernel_set);
    }
  }
}

void SetScales(const ffi::AnyView& value, CacheConfig* config) {
  auto array = value.as<ffi::Array<ffi::Any>>();
  std::optional<ffi::Tensor> scales;
  for (size_t i = kNumFixed; array && i + 1 < array->size(); i += 2) {
    auto name = (*array)[i].try_cast<ffi::String>();
    if (!name || *name != "kv_scales") continue;
    scales = (*array)[i + 1].as<ffi::Tensor>();
    const auto num_layers = static_cast<int64_t>(config->layers.size());
    if (!scales || !scales->defined() || scales->ndim() != 3 || scales->size(0) != num_layers) {
      Raise(kTypeError, "argument 24 needs kv_scales: a tensor [layers, 2, KV heads]");
    }
  }
  for (size_t i = 0; scales && i < config->layers.size(); ++i) {
    if (!config->layers[i].is_mha()) continue;
    config->layers[i].kv_scales =
        scales->as_strided(ffi::ShapeView(scales->shape().data() + 1, 2),
                           ffi::ShapeView(scales->strides().data() + 1, 2),
                           static_cast<int64_t>(i) * scales->strides()[0]);
  }
}

LayerConfig IndexLane(const ffi::AnyView& value, CacheConfig* config) {
  auto array = value.as<ffi::Array<ffi::Any>>();
  std::optional<ffi::Array<ffi::Any>> lane;
  for (size_t i = kNumFixed; array && i + 1 < array->size(); i += 2) {
    auto name = (*array)[i].try_cast<ffi::String>();
    if (name && *name == "index") lane = (*array)[i + 1].as<ffi::Array<ffi::Any>>();
  }
  std::optional<int64_t> num_heads, dim;
  if (lane && lane->size() >= 3 && lane->size() % 2 == 1) {
    num_heads = (*lane)[0].try_cast<int64_t>();
    dim = (*lane)[1].try_cast<int64_t>();
  }
  if (!num_heads || !dim) {
    Raise(
        kTypeError,
        "argument 24 needs the index lane of these layers: heads, width, type, names and kernels");
  }
  LayerConfig layer;
  layer.kind = LayerKind::kMLA;
  layer.num_qo_heads = *num_heads;
  layer.num_kv_heads = 1;
  layer.qk_head_dim = layer.v_head_dim = *dim;
  SetPageType((*lane)[2], &layer);
  KernelSet kernels;
  for (size_t i = 3; i < lane->size(); i += 2) {
    auto kernel = (*lane)[i].try_cast<ffi::String>();
    if (!kernel) Raise(kTypeError, "argument 24 needs the name of an index lane's kernel");
    kernels.Set(KernelNameOf(*kernel), (*lane)[i + 1]);
  }
  layer.kernel_set = static_cast<int64_t>(config->kernel_sets.size());
  config->kernel_sets.push_back(std::move(kernels));
  return layer;
}

}  // namespace pagedkv
