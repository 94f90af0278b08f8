// SPDX-License-Identifier: Apache-2.0
/*!
 * \file cache_config_positional.cc
 * \brief The stock constructor's form: 28 or 29 arguments, each known by its index.
 */
#include <tvm/ffi/dtype.h>

#include <optional>
#include <string>
#include <utility>

#include "cache_config.h"
#include "cache_config_checks.h"
#include "error.h"

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

/*!
 * \brief Index 24: a plain function, or ["pagedkv", split_rotary, rope_append, page_size], then the
 * kernels that the arguments have no place for: a name and a function of each.
 */
void SetRotary(const ffi::AnyView& value, int64_t page_size, KernelSet* kernels) {
  constexpr size_t kNumFixed = 4;
  auto array = value.as<ffi::Array<ffi::Any>>();
  if (!array || array->size() < kNumFixed) {
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
  if (array->size() % 2) Raise(kTypeError, "argument 24 must end in pairs of a name and a kernel");
  for (size_t i = kNumFixed; i < array->size(); i += 2) {
    auto name = (*array)[i].try_cast<ffi::String>();
    if (!name) {
      Raise(kTypeError, "argument 24 needs a kernel's name, got ", (*array)[i].GetTypeKey());
    }
    kernels->Set(KernelNameOf(*name), (*array)[i + 1]);
  }
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

}  // namespace

CacheConfig CacheConfig::FromPositional(ffi::PackedArgs args) {
  if (args.size() != 28 && args.size() != 29) {
    Raise(kTypeError, "paged_attention_kv_cache_create takes 28 or 29 arguments, got ",
          args.size());
  }
  auto sizes = ShapeArgument(args, 0, "cache sizes", 5);
  auto layer_indptr = ShapeArgument(args, 1, "layer_indptr", 2);
  auto kinds = ShapeArgument(args, 6, "attention kinds", 1);
  CheckPositionalLayers(layer_indptr, kinds);
  auto enable_kv_transfer = Argument<int64_t>(args, 7, "enable_kv_transfer");
  auto prototype = Argument<ffi::Tensor>(args, 12, "a tensor of the cache's type and device");
  if (!prototype.defined()) Raise(kTypeError, "argument 12 must be a tensor, got None");

  CacheConfig result;
  result.max_num_sequences = sizes[0];
  result.max_total_tokens = sizes[1];
  result.prefill_chunk_size = sizes[2];
  result.page_size = sizes[3];
  result.has_sequence_windows =
      CheckRange("the 5th cache size (sliding_window)", sizes[4], 0, 1) == 1;
  result.enable_kv_transfer = enable_kv_transfer != 0;
  result.device = prototype.device();
  CheckDevice(result.device);
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

}  // namespace pagedkv
