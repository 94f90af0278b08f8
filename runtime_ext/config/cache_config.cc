// SPDX-License-Identifier: Apache-2.0
/*!
 * \file cache_config.cc
 * \brief Validation of a configuration, and the sizes that follow from it.
 */
#include "config/cache_config.h"

#include <tvm/ffi/dtype.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "base/error.h"
#include "config/cache_config_checks.h"
#include "config/layer_kernels.h"
#include "device/device_memory.h"
#include "device/device_stream.h"
#include "state/table/sequence_table.h"

namespace pagedkv {

namespace {

constexpr int64_t kMaxPageSize = 256;
constexpr int64_t kMaxHeads = 4096;
constexpr int64_t kMaxHeadDim = 4096;
constexpr int64_t kMaxConvWidth = 64;

/*! \brief Of a layer that keeps rows which are not attended to. */
void CheckRows(const LayerConfig& layer) {
  constexpr int64_t kMaxWidth = 1 << 24;
  CheckRange("the width of a row", layer.qk_head_dim, 1, kMaxWidth);
  CheckRange("history_tokens", layer.history_tokens.value_or(0), 0, kInt32Max);
  if (layer.kind == LayerKind::kConv) {
    return void(CheckRange("the width of a convolution", layer.window, 2, kMaxConvWidth));
  }
  const RecurrentShape& shape = *layer.recurrent;
  CheckRange("num_heads", shape.num_heads, 1, kMaxHeads);
  CheckRange("num_key_heads", shape.num_key_heads, 1, shape.num_heads);
  if (shape.num_heads % shape.num_key_heads) {
    Raise(kValueError, "num_heads (", shape.num_heads, ") must be a multiple of num_key_heads (",
          shape.num_key_heads, ")");
  }
  CheckRange("key_dim", shape.key_dim, 1, kMaxHeadDim);
  CheckRange("value_dim", shape.value_dim, 1, kMaxHeadDim);
}

void CheckLayer(const LayerConfig& layer) {
  if (!layer.is_attention()) return CheckRows(layer);
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
  } else {
    CheckRange("v_head_dim", layer.v_head_dim, 1, kMaxHeadDim);
  }
  if (layer.has_two_widths() && layer.codec) {
    Raise(kValueError, "v_head_dim (", layer.v_head_dim, ") must equal qk_head_dim (",
          layer.qk_head_dim, ") in quantized pages");
  }
  const int64_t original_qk = layer.original_qk_head_dim, original_v = layer.original_v_head_dim;
  CheckRange("mla_original_qk_head_dim", original_qk, 0, layer.is_mla() ? kMaxHeadDim : 0);
  CheckRange("mla_original_v_head_dim", original_v, 0, layer.is_mla() ? kMaxHeadDim : 0);
  if ((original_qk == 0) != (original_v == 0)) {
    Raise(kValueError, "mla_original_qk_head_dim (", original_qk, ") and mla_original_v_head_dim (",
          original_v, ") must be given together");
  }
}

/*! \param num_rows Rows of a page. */
void CheckCodec(const Codec& codec, int64_t num_rows) {
  // The widest rows in the widest type, and room for padding.
  constexpr int64_t kMaxRowBytes = kMaxHeadDim * 4, kMaxPadding = 4096;
  if (codec.name.empty()) Raise(kValueError, "a codec needs a name");
  if (num_rows % 2 && !(codec.k == codec.v)) {
    Raise(kValueError, "a codec of MLA layers has one row size, because its rows are both K and V");
  }
  int64_t used = 0;
  for (const CodeSizes& sizes : {codec.k, codec.v}) {
    CheckRange("row_bytes of a codec", sizes.row_bytes, 1, kMaxRowBytes);
    CheckRange("scale_bytes of a codec", sizes.scale_bytes, 1, kMaxRowBytes);
    used += num_rows * (sizes.row_bytes + sizes.scale_bytes);
  }
  used /= 2;
  CheckRange("page_bytes of a codec", codec.page_bytes, used, used + kMaxPadding);
  CheckRange("revision of a codec", codec.revision, 1, kInt32Max);
}

void CheckRope(const LayerConfig& layer) {
  if (!(std::isfinite(layer.rope_theta) && layer.rope_theta > 0 &&
        std::isfinite(layer.rope_scale) && layer.rope_scale > 0)) {
    Raise(kValueError, "rope_theta and rope_scale must be positive, got ", layer.rope_theta,
          " and ", layer.rope_scale);
  }
}

void CheckStaticScales(const LayerConfig& layer, DLDevice device) {
  const ffi::Tensor& scales = layer.kv_scales;
  if (!layer.codec || !layer.is_mha()) {
    Raise(kValueError, "layer ", layer.id, " has kv_scales, which are for layers with K and V in ",
          "quantized pages");
  }
  const DLDataType dtype = scales.dtype();
  const DLDevice own = scales.device();
  if (scales.ndim() != 2 || scales.size(0) != 2 || scales.size(1) != layer.num_kv_heads ||
      !scales.IsContiguous() || dtype.code != kDLFloat || dtype.bits != 32 || dtype.lanes != 1 ||
      own.device_type != device.device_type || own.device_id != device.device_id) {
    Raise(kValueError, "kv_scales of layer ", layer.id, " must be a contiguous float32 tensor ",
          "[2, ", layer.num_kv_heads, "] on the cache's device, got ", ShapeText(scales.shape()),
          " of ", ffi::DLDataTypeToString(dtype), " on device ", own.device_type, ":",
          own.device_id);
  }
  const ffi::Tensor bytes = BytesOnHost(scales);
  const auto* values = static_cast<const float*>(bytes.data_ptr());
  for (int64_t i = 0; i < scales.numel(); ++i) {
    if (std::isnormal(values[i]) && values[i] > 0) continue;
    Raise(kValueError, "kv_scales of layer ", layer.id,
          " must be positive normal numbers of float32, got ", values[i]);
  }
}

void CheckExtensionFactors(const CacheConfig& config) {
  const ffi::Tensor& factors = config.rope_ext_factors;
  if (!config.has_normal_rope || config.has_inline_rope) {
    Raise(kValueError, "rope_ext_factors need rope_mode 1 (normal)");
  }
  const DLDataType dtype = factors.dtype();
  const DLDevice device = factors.device();
  if (factors.ndim() != 1 || !factors.IsContiguous() || dtype.code != kDLFloat ||
      dtype.bits != 32 || dtype.lanes != 1 || device.device_type != config.device.device_type ||
      device.device_id != config.device.device_id) {
    Raise(kValueError,
          "rope_ext_factors must be a contiguous float32 tensor with one dimension on the cache's "
          "device, got ",
          factors.ndim(), " dimensions of ", ffi::DLDataTypeToString(dtype), " on device ",
          device.device_type, ":", device.device_id);
  }
}

}  // namespace

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

void CheckDevice(DLDevice device) {
  if (!DeviceExists(device)) {
    Raise(kValueError, "this machine has no device of type ", device.device_type, " with id ",
          device.device_id);
  }
}

bool CanOffsetPointers(DLDevice device) {
  // On OpenCL or Vulkan `data` is the handle of a buffer: there is no address within it.
  return device.device_type == kDLCPU || device.device_type == kDLCUDA;
}

const char* ToString(LayerKind kind) {
  switch (kind) {
    case LayerKind::kMHA:
      return "mha";
    case LayerKind::kMLA:
      return "mla";
    case LayerKind::kLinear:
      return "linear";
    case LayerKind::kRecurrent:
      return "recurrent";
    case LayerKind::kConv:
      return "conv";
  }
  return "";
}

std::string LayerConfig::kv_dtype() const {
  return codec ? codec->name : std::string(ffi::DLDataTypeToString(page_dtype));
}

const char* ToString(const LayerConfig& layer) {
  if (layer.is_chunked) return "mha_chunked";
  return layer.window && layer.is_mha() ? "mha_sliding" : ToString(layer.kind);
}

int64_t CacheConfig::NumPages(const LayerConfig& layer) const {
  if (layer.window == 0) return num_pages();
  // A sequence keeps this many positions between steps, which may start anywhere in a page.
  // KVCacheConfig.num_pages_of computes the same. When more than max_num_sequences sequences exist
  // and need more pages, fewer are available.
  const int64_t num_kept = layer.window - 1 + kPoppable;
  const int64_t pages_kept = (num_kept + page_size - 2) / page_size + 1;
  const int64_t num_needed = max_num_sequences * pages_kept + MaxStepPages();
  if (layer.is_attention()) return std::min(num_pages(), num_needed);
  // A sequence with a window may need more rows than it has positions: the text is longer.
  const int64_t smallest = has_sequence_windows ? num_needed : 0;
  if (!layer.history_tokens) return std::max(num_pages(), smallest);
  const int64_t pages_of_history = (*layer.history_tokens + page_size - 1) / page_size;
  return std::max(std::min(num_pages(), num_needed + pages_of_history), smallest);
}

int64_t CacheConfig::NumStates(const RecurrentShape& shape) const {
  const int64_t num_sequences = std::min(max_num_sequences, max_total_tokens);
  const int64_t in_step =
      std::min(num_sequences, prefill_chunk_size) + prefill_chunk_size / shape.interval;
  return 3 * num_sequences + in_step + (max_total_tokens + shape.interval - 1) / shape.interval;
}

bool CacheConfig::can_have_spans() const {
  return std::any_of(layers.begin(), layers.end(), [this](const LayerConfig& layer) {
    return layer.is_mha() && kernel_sets[layer.kernel_set].Has(layer.prefill_spans());
  });
}

int64_t CacheConfig::MaxStepPages() const {
  // A step adds the most pages when it has many sequences.
  const int64_t batch_size = std::min(max_num_sequences, prefill_chunk_size);
  return (prefill_chunk_size - batch_size) / page_size + batch_size;
}

void CacheConfig::ServeEngine() {
  CheckSizes();
  ignores_sequence_windows = std::any_of(layers.begin(), layers.end(), [](const LayerConfig& l) {
    return l.is_attention() && l.window > 0;
  });
  has_sequence_windows = has_sequence_windows && !ignores_sequence_windows;
  num_spare_pages = 1;
  if (!has_sequence_windows) return;
  num_spare_pages += 2 * max_num_sequences;
  num_reserved_pages = MaxStepPages();
}

void CacheConfig::SettleRope() {
  for (LayerConfig& layer : layers) {
    has_normal_rope = has_normal_rope || layer.has_normal_rope();
    has_inline_rope = has_inline_rope || layer.has_inline_rope();
    if (layer.rope_mode != RopeMode::kNone) continue;
    // Models without a rotation pass any value, such as -1 for theta.
    layer.rope_theta = LayerConfig().rope_theta;
    layer.rope_scale = LayerConfig().rope_scale;
  }
}

void CacheConfig::KeepStage(std::vector<int64_t> layer_indptr, std::optional<int64_t> index) {
  if (layers.empty()) Raise(kValueError, "a cache needs at least one layer");
  stage =
      PipelineStage::Resolve(std::move(layer_indptr), static_cast<int64_t>(layers.size()), index);
  std::vector<LayerConfig> kept;
  for (int64_t id = stage.begin(); id < stage.end(); ++id) {
    LayerParts parts;
    auto keep = [&](LayerConfig layer, int64_t* index) {
      *index = static_cast<int64_t>(kept.size());
      layer.id = id;
      layer.conv.clear();
      kept.push_back(std::move(layer));
    };
    const LayerConfig& layer = layers[id];
    if (layer.is_attention()) keep(layer, &parts.attention);
    if (layer.kind == LayerKind::kRecurrent) keep(layer, &parts.recurrent);
    if (layer.kind == LayerKind::kConv) keep(layer, &parts.conv);
    for (const LayerConfig& conv : layer.conv) keep(conv, &parts.conv);
    layer_parts.push_back(parts);
  }
  layers = std::move(kept);
}

void CacheConfig::CheckSizes() const {
  CheckRange("max_num_sequences", max_num_sequences, 1, kInt32Max);
  CheckRange("prefill_chunk_size", prefill_chunk_size, 1, kInt32Max);
  CheckRange("page_size", page_size, 1, kMaxPageSize);
  if (page_size & (page_size - 1)) {
    Raise(kValueError, "page_size must be a power of two, got ", page_size);
  }
  // Slots are int32, including those of a partly filled last page.
  const int64_t num_extra_slots = (num_spare_pages + num_reserved_pages) * page_size;
  CheckRange("max_total_tokens", max_total_tokens, 1, kInt32Max - kMaxPageSize - num_extra_slots);
}

void CacheConfig::Validate() const {
  CheckSizes();
  if (kernel_sets.empty()) Raise(kValueError, "a cache needs at least one set of kernels");
  if (has_sequence_windows && has_normal_rope && has_inline_rope) {
    Raise(kValueError,
          "windows of sequences need one way to count positions: rope_mode 1 (normal) counts those "
          "of the text, rope_mode 2 (inline) those within the window, and the layers have both");
  }
  for (const LayerConfig& layer : layers) {
    CheckLayer(layer);
    if (layer.recurrent && layer.recurrent->interval % page_size != 0) {
      Raise(kValueError, "the interval of states (", layer.recurrent->interval,
            ") must be a multiple of page_size (", page_size, ")");
    }
    CheckRope(layer);
    // Kernels count the tiles of one sequence in int32.
    if (layer.num_kv_heads > kInt32Max / prefill_chunk_size) {
      Raise(kValueError, "prefill_chunk_size (", prefill_chunk_size, ") times num_kv_heads (",
            layer.num_kv_heads, ") must be below 2^31");
    }
    CheckRange("kernel_set", layer.kernel_set, 0, static_cast<int64_t>(kernel_sets.size()) - 1);
    if (layer.codec) CheckCodec(*layer.codec, page_size * layer.rows_per_slot());
    if (layer.kv_scales.defined()) CheckStaticScales(layer, device);
    RequireKernels(layer, kernel_sets[layer.kernel_set]);
    if (has_sequence_windows && layer.is_chunked) {
      Raise(kValueError, "windows of sequences are not possible with layer ", layer.id,
            ", which attends within chunks");
    }
    if (has_sequence_windows) RequireSequenceWindowKernels(layer, kernel_sets[layer.kernel_set]);
  }
  if (rope_ext_factors.defined()) CheckExtensionFactors(*this);
}

}  // namespace pagedkv
