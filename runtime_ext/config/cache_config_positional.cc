// SPDX-License-Identifier: Apache-2.0
/*!
 * \file cache_config_positional.cc
 * \brief Positional creation: the 28 or 29 arguments of the stock constructor.
 */
#include <tvm/ffi/dtype.h>

#include <optional>
#include <utility>

#include "base/error.h"
#include "config/cache_config.h"
#include "config/cache_config_checks.h"

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

/*! \brief Index 23: merge kernels. The last one serves the fine-grained API, and so all calls. */
void SetMerge(ffi::PackedArgs args, KernelSet* kernels) {
  auto merge = Argument<ffi::Array<ffi::Any>>(args, 23, "merge functions");
  if (!merge.empty()) kernels->Set(KernelName::kMerge, merge.back());
}

/*! \brief The kernels, which all layers share. */
KernelSet PositionalKernels(ffi::PackedArgs args, bool has_mla) {
  constexpr KernelName kFrom13[] = {
      KernelName::kTransposeAppend,
      KernelName::kTransposeAppendMLA,
      KernelName::kPrefillRagged,
      KernelName::kPrefill,
      KernelName::kDecode,
      KernelName::kPrefillSliding,
      KernelName::kDecodeSliding,
      KernelName::kTreePaged,
      KernelName::kTree,
      KernelName::kMLAPrefill,
  };
  KernelSet kernels;
  int index = 13;
  for (KernelName name : kFrom13) kernels.Set(name, args[index++]);
  SetMerge(args, &kernels);
  kernels.Set(KernelName::kSplitRotary, args[24]);
  kernels.Set(KernelName::kCopySinglePage, args[25]);
  kernels.Set(has_mla ? KernelName::kDebugGetKVMLA : KernelName::kDebugGetKV, args[26]);
  kernels.Set(KernelName::kCompactCopy, args[27]);
  return kernels;
}

int64_t PositionalWindow(const ffi::Shape& sizes) {
  if (sizes.size() < 6) {
    Raise(kValueError, "argument 0 (cache sizes) needs a 6th number, the window of the layers ",
          "with one; got ", sizes.size(), " numbers");
  }
  return CheckRange("the layers' window", sizes[5], 1, kInt32Max);
}

/*! \brief A layer of a kind of the stock cache: 0 MHA, 1 MLA, 2 linear, 3 MHA with a window. */
LayerConfig PositionalLayer(ffi::PackedArgs args, int64_t kind, const ffi::Shape& sizes,
                            const CacheConfig& config) {
  if (kind < 0 || kind > 3) {
    Raise(kValueError, "argument 6 (attention kinds) has an unknown kind: ", kind);
  }
  LayerConfig layer;
  layer.page_dtype = config.dtype;
  layer.kind = kind == 1 ? LayerKind::kMLA : kind == 2 ? LayerKind::kLinear : LayerKind::kMHA;
  if (kind == 2) return layer;
  if (kind == 3) layer.window = PositionalWindow(sizes);
  layer.num_qo_heads = Argument<int64_t>(args, 2, "num_qo_heads");
  // Models pass the number of KV heads before absorption.
  layer.num_kv_heads = layer.is_mla() ? 1 : Argument<int64_t>(args, 3, "num_kv_heads");
  layer.qk_head_dim = Argument<int64_t>(args, 4, "qk_head_dim");
  layer.v_head_dim = Argument<int64_t>(args, 5, "v_head_dim");
  layer.rope_mode = config.rope_mode;
  layer.rope_scale = Argument<double>(args, 9, "rope_scale");
  layer.rope_theta = Argument<double>(args, 10, "rope_theta");
  return layer;
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
  auto rope_mode = Argument<int64_t>(args, 8, "rope_mode");
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
  result.kv_dtype = ffi::DLDataTypeToString(prototype.dtype());
  result.dtype = ParseDtype("dtype", result.kv_dtype);
  result.has_merged_aux = CanOffsetPointers(result.device);
  result.rope_mode = static_cast<RopeMode>(CheckRange("rope_mode", rope_mode, 0, 2));
  // Front ends pass a number when there are no factors.
  if (auto factors = args[11].as<ffi::Tensor>()) result.rope_ext_factors = *factors;
  bool has_mla = false, has_attention = false;
  for (int64_t kind : kinds) {
    result.layers.push_back(PositionalLayer(args, kind, sizes, result));
    has_mla = has_mla || result.layers.back().is_mla();
    has_attention = has_attention || result.layers.back().is_attention();
  }
  if (has_attention) result.kernel_sets.push_back(PositionalKernels(args, has_mla));
  result.ServeEngine();
  result.SettleRope();
  result.KeepStage({layer_indptr.begin(), layer_indptr.end()}, std::nullopt);
  result.Validate();
  return result;
}

}  // namespace pagedkv
