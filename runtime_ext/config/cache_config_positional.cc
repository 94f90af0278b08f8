// SPDX-License-Identifier: Apache-2.0
/*!
 * \file cache_config_positional.cc
 * \brief Positional creation: the 28 or 29 arguments of the stock constructor.
 */
#include <tvm/ffi/dtype.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "config/cache_config.h"
#include "config/cache_config_checks.h"
#include "config/positional_named.h"
#include "device/device_memory.h"

namespace pagedkv {

namespace {

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

/*! \brief The value when it is an array of `size` that begins with "pagedkv". */
std::optional<ffi::Array<ffi::Any>> OwnArray(const ffi::AnyView& value, size_t size) {
  auto array = value.as<ffi::Array<ffi::Any>>();
  if (!array || array->size() != size) return std::nullopt;
  auto tag = (*array)[0].try_cast<ffi::String>();
  return tag && *tag == "pagedkv" ? array : std::nullopt;
}

/*! \brief The value for layers of a kind: the value itself, or one of ["pagedkv", MHA, MLA]. */
ffi::Any OfKind(const ffi::AnyView& value, LayerKind kind) {
  auto array = OwnArray(value, 3);
  if (!array) return value;
  return (*array)[kind == LayerKind::kMLA ? 2 : 1];
}

/*! \brief Index 15: as all kernels; or ["pagedkv", function, qk head dim, v head dim] of MLA
 * layers; or ["pagedkv", of MHA, of MLA, qk head dim, v head dim], both dims those of MLA. */
void SetRagged(const ffi::AnyView& value, LayerConfig* layer, KernelSet* kernels) {
  auto array = value.as<ffi::Array<ffi::Any>>();
  const size_t size = array ? array->size() : 0;
  const bool is_of_both = OwnArray(value, 5).has_value();
  if (!is_of_both && !(size == 4 && layer->is_mla())) {
    kernels->Set(KernelName::kPrefillRagged, value);
    return;
  }
  const int index = is_of_both && layer->is_mla() ? 2 : 1;
  kernels->Set(KernelName::kPrefillRagged, ffi::Array<ffi::Any>{(*array)[0], (*array)[index]});
  if (!layer->is_mla()) return;
  std::optional<int64_t> dims[] = {(*array)[size - 2].try_cast<int64_t>(),
                                   (*array)[size - 1].try_cast<int64_t>()};
  if (!dims[0] || !dims[1]) {
    Raise(kTypeError, "argument 15 (prefill_ragged) must end in two head dims");
  }
  layer->original_qk_head_dim = *dims[0];
  layer->original_v_head_dim = *dims[1];
}

/*! \brief Index 23: the merge kernels of attention and of the fine-grained API. MLA uses the
 * latter. */
void SetMerge(ffi::PackedArgs args, bool is_mixed, LayerKind kind, KernelSet* kernels) {
  auto merge = Argument<ffi::Array<ffi::Any>>(args, 23, "merge functions");
  if (merge.empty()) return;
  const bool is_first = is_mixed && kind == LayerKind::kMHA;
  kernels->Set(KernelName::kMerge, is_first ? merge.front() : merge.back());
}

/*! \brief The kernels of layers like `layer`. Sets the head dims of `layer` that come with them. */
KernelSet PositionalKernels(ffi::PackedArgs args, int64_t page_size, bool is_mixed,
                            LayerConfig* layer) {
  constexpr KernelName kFrom16[] = {
      KernelName::kPrefill,       KernelName::kDecode,    KernelName::kPrefillSliding,
      KernelName::kDecodeSliding, KernelName::kTreePaged, KernelName::kTree,
      KernelName::kMLAPrefill,
  };
  KernelSet kernels;
  kernels.Set(KernelName::kTransposeAppend, args[13]);
  kernels.Set(KernelName::kTransposeAppendMLA, args[14]);
  SetRagged(args[15], layer, &kernels);
  int index = 16;
  for (KernelName name : kFrom16) {
    const ffi::AnyView value = args[index++];
    kernels.Set(name, name == KernelName::kTree ? OfKind(value, layer->kind) : ffi::Any(value));
  }
  SetMerge(args, is_mixed, layer->kind, &kernels);
  SetRotary(args[24], page_size, layer, &kernels);
  kernels.Set(KernelName::kCopySinglePage, OfKind(args[25], layer->kind));
  const KernelName read = layer->is_mla() ? KernelName::kDebugGetKVMLA : KernelName::kDebugGetKV;
  kernels.Set(read, OfKind(args[26], layer->kind));
  kernels.Set(KernelName::kCompactCopy, OfKind(args[27], layer->kind));
  return kernels;
}

/*! \brief A layer of a kind, with the dimensions that all layers share. */
LayerConfig PositionalLayer(ffi::PackedArgs args, LayerKind kind, bool is_mixed) {
  LayerConfig layer;
  layer.kind = kind;
  layer.num_qo_heads = Argument<int64_t>(args, 2, "num_qo_heads");
  // Models pass the number of KV heads before absorption.
  layer.num_kv_heads = layer.is_mla() ? 1 : Argument<int64_t>(args, 3, "num_kv_heads");
  layer.qk_head_dim = Argument<int64_t>(args, 4, "qk_head_dim");
  // Among MLA layers the two dims are those of MLA: a row of MHA is as wide as a latent one.
  const bool is_mha_among_mla = is_mixed && !layer.is_mla();
  layer.v_head_dim =
      is_mha_among_mla ? layer.qk_head_dim : Argument<int64_t>(args, 5, "v_head_dim");
  layer.rope_scale = Argument<double>(args, 9, "rope_scale");
  layer.rope_theta = Argument<double>(args, 10, "rope_theta");
  return layer;
}

/*! \brief Index 8: one RoPE mode, or one per layer, which only models of our front end pass. */
std::vector<RopeMode> RopeModes(const ffi::AnyView& value, size_t num_layers) {
  auto mode_of = [](int64_t mode) {
    return static_cast<RopeMode>(CheckRange("rope_mode", mode, 0, 2));
  };
  if (auto mode = value.try_cast<int64_t>()) {
    return std::vector<RopeMode>(num_layers, mode_of(*mode));
  }
  auto modes = value.try_cast<ffi::Shape>();
  if (!modes) {
    Raise(kTypeError, "argument 8 (rope_mode) must be an integer, or a shape with one per layer, ",
          "got ", value.GetTypeKey());
  }
  if (modes->size() != num_layers) {
    Raise(kValueError, "argument 8 (rope_mode) must have one mode for each of ", num_layers,
          " layers, got ", modes->size());
  }
  std::vector<RopeMode> result;
  for (int64_t mode : *modes) result.push_back(mode_of(mode));
  return result;
}

// Behind those of the stock cache.
constexpr int64_t kChunkedKind = 4;
constexpr int64_t kIndexKind = 5;
constexpr int64_t kSlidingMLAKind = 6;

int64_t PositionalWindow(const ffi::Shape& sizes) {
  if (sizes.size() < 6) {
    Raise(kValueError, "argument 0 (cache sizes) needs a 6th number, the window of the layers ",
          "with one; got ", sizes.size(), " numbers");
  }
  return CheckRange("the layers' window", sizes[5], 1, kInt32Max);
}

bool Holds(const ffi::Shape& kinds, std::initializer_list<int64_t> some) {
  return std::any_of(kinds.begin(), kinds.end(), [&](int64_t kind) {
    return std::find(some.begin(), some.end(), kind) != some.end();
  });
}

/*!
 * \brief The pages that engines count on beyond max_total_tokens: one, and two for each sequence
 * that may have a window. Rows of a step whose windows have not slid yet need more; nobody is told
 * of these.
 */
void GiveSparePages(CacheConfig* config) {
  config->num_spare_pages = 1;
  if (!config->has_sequence_windows) return;
  config->num_spare_pages += 2 * config->max_num_sequences;
  config->num_reserved_pages = config->MaxStepPages();
}

}  // namespace

CacheConfig CacheConfig::FromPositional(ffi::PackedArgs args) {
  if (args.size() != 28 && args.size() != 29) {
    Raise(kTypeError, "paged_attention_kv_cache_create takes 28 or 29 arguments, got ",
          args.size());
  }
  auto sizes = ShapeArgument(args, 0, "cache sizes", 5);
  auto layer_indptr = ShapeArgument(args, 1, "layer_indptr", 2);
  auto kinds = ShapeArgument(args, 6, "attention kinds", 1);
  auto enable_kv_transfer = Argument<int64_t>(args, 7, "enable_kv_transfer");
  auto prototype = Argument<ffi::Tensor>(args, 12, "a tensor of the cache's type and device");
  if (!prototype.defined()) Raise(kTypeError, "argument 12 must be a tensor, got None");

  CacheConfig result;
  result.max_num_sequences = sizes[0];
  result.max_total_tokens = sizes[1];
  result.prefill_chunk_size = sizes[2];
  result.page_size = sizes[3];
  const bool has_windows = CheckRange("the 5th cache size (sliding_window)", sizes[4], 0, 1) == 1;
  if (sizes.size() > 6) {  // only the models of our front end pass it
    result.sliding_window_includes_self =
        CheckRange("the 7th cache size (sliding_window_includes_self)", sizes[6], 0, 1) == 1;
  }
  result.enable_kv_transfer = enable_kv_transfer != 0;
  result.device = prototype.device();
  CheckDevice(result.device);
  result.dtype = ParseDtype("dtype", ffi::DLDataTypeToString(prototype.dtype()));
  result.has_merged_aux = CanOffsetPointers(result.device);
  const std::vector<RopeMode> rope_modes = RopeModes(args[8], kinds.size());
  result.rope_mode = rope_modes[0];
  // Front ends pass a number when there are no factors.
  if (auto factors = args[11].as<ffi::Tensor>()) result.rope_ext_factors = *factors;

  result.ignores_sequence_windows = Holds(kinds, {3, kChunkedKind, kSlidingMLAKind});
  result.has_sequence_windows = has_windows && !result.ignores_sequence_windows;
  result.CheckSizes();
  GiveSparePages(&result);
  const bool has_mha = Holds(kinds, {0, 3, kChunkedKind});
  const bool has_mla = Holds(kinds, {1, kSlidingMLAKind});
  const bool is_mixed = has_mha && has_mla;
  if (has_mha && Holds(kinds, {kSlidingMLAKind})) {
    Raise(kValueError, "argument 6 (attention kinds) has MLA layers with a window (",
          kSlidingMLAKind, ") beside layers with K and V, whose kernels have the same names");
  }
  auto with_kernels = [&](LayerKind kind) {
    LayerConfig layer = PositionalLayer(args, kind, is_mixed);
    layer.page_dtype = result.dtype;
    layer.kernel_set = static_cast<int64_t>(result.kernel_sets.size());
    result.kernel_sets.push_back(PositionalKernels(args, result.page_size, is_mixed, &layer));
    return layer;
  };
  LayerConfig mha, mla, lane, linear;
  if (has_mha) mha = with_kernels(LayerKind::kMHA);
  if (has_mla) mla = with_kernels(LayerKind::kMLA);
  if (Holds(kinds, {kIndexKind})) lane = IndexLane(args[24], &result);
  linear.kind = LayerKind::kLinear;
  linear.page_dtype = result.dtype;
  for (size_t i = 0; i < kinds.size(); ++i) {
    const int64_t kind = kinds[i];
    if (kind < 0 || kind > kSlidingMLAKind) {
      Raise(kValueError, "argument 6 (attention kinds) has an unknown kind: ", kind);
    }
    if (kind == kIndexKind) {
      result.layers.push_back(lane);
      continue;
    }
    const bool is_mla = kind == 1 || kind == kSlidingMLAKind;
    result.layers.push_back(is_mla ? mla : kind == 2 ? linear : mha);
    result.layers.back().rope_mode = rope_modes[i];
    result.layers.back().is_chunked = kind == kChunkedKind;
    if (kind >= 3) result.layers.back().window = PositionalWindow(sizes);
  }
  result.kv_dtype = (has_mha ? mha : has_mla ? mla : linear).kv_dtype();
  SetRopes(args[24], &result);
  SetScales(args[24], &result);
  result.SettleRope();
  result.KeepStage({layer_indptr.begin(), layer_indptr.end()}, std::nullopt);
  result.Validate();
  return result;
}

}  // namespace pagedkv
