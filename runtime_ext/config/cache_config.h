// SPDX-License-Identifier: Apache-2.0
/*!
 * \file cache_config.h
 * \brief The configuration of a cache, read from named fields or from the stock cache's arguments.
 */
#ifndef TVM_PAGEDKV_CONFIG_CACHE_CONFIG_H_
#define TVM_PAGEDKV_CONFIG_CACHE_CONFIG_H_

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/codec.h"
#include "config/kernels.h"
#include "config/pipeline_stage.h"

namespace pagedkv {

enum class RopeMode : int { kNone = 0, kNormal = 1, kInline = 2 };

/*!
 * \brief kMHA: `num_kv_heads` heads of K and V. kMLA: one latent row per token, which is K for all
 * query heads, and whose first `v_head_dim` columns are V; `num_kv_heads` is 1. kLinear: linear
 * attention, whose state is not in this cache; such a layer only has an id. kRecurrent: linear
 * attention whose states and ingredients are in this cache: see recurrent_states.h. kConv: a short
 * convolution, which keeps its input rows.
 */
enum class LayerKind : int { kMHA, kMLA, kLinear, kRecurrent, kConv };

/*! \brief The name by which users know the kind. */
const char* ToString(LayerKind kind);

/*! \brief The recurrence of a layer: what its tensors are. */
struct RecurrentShape {
  int64_t num_heads;      // of v and o, with a state each
  int64_t num_key_heads;  // of q and k
  int64_t key_dim;
  int64_t value_dim;
  bool decays_by_channel;  // whether log_decay has a value for each key channel
  bool has_beta;
  int64_t interval;  // positions from one kept state to the next
  DLDataType state_dtype;

  /*! \brief Bytes of a state page: the states of all heads. */
  int64_t state_bytes() const { return num_heads * key_dim * value_dim * (state_dtype.bits / 8); }
  bool operator==(const RecurrentShape& other) const {
    return num_heads == other.num_heads && num_key_heads == other.num_key_heads &&
           key_dim == other.key_dim && value_dim == other.value_dim &&
           decays_by_channel == other.decays_by_channel && has_beta == other.has_beta &&
           interval == other.interval && state_dtype == other.state_dtype;
  }
};

struct LayerConfig {
  LayerKind kind = LayerKind::kMHA;
  int64_t id = 0;           // in the whole model
  int64_t window = 0;       // positions that a row sees, its own included; 0 for all
  bool is_chunked = false;  // a row sees from the start of its chunk of `window` positions
  int64_t num_qo_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t qk_head_dim = 0;
  int64_t v_head_dim = 0;
  RopeMode rope_mode = RopeMode::kNone;
  double rope_theta = 10000.0;
  double rope_scale = 1.0;
  std::string rope_details;  // other RoPE parameters as text, for comparison only
  int64_t kernel_set = 0;    // index into CacheConfig::kernel_sets
  // MLA: head dims before absorption; 0 when unknown or when all attention is absorbed.
  int64_t original_qk_head_dim = 0;
  int64_t original_v_head_dim = 0;
  bool has_sink_logits = false;  // whether its kernels take learned sinks
  DLDataType page_dtype{};       // of the elements of pages; bytes where rows are quantized
  std::optional<Codec> codec;    // how the pages keep rows, if they are quantized
  // Scales of K and of V: float32 [2, num_kv_heads] on the device; undefined: each row has its own.
  ffi::Tensor kv_scales{};
  // kRecurrent and kConv: `window` is the interval of states, or the width of the convolution, and
  // `qk_head_dim` the width of a row.
  std::optional<RecurrentShape> recurrent;
  bool has_bias = false;                  // kConv
  std::optional<int64_t> history_tokens;  // kept beside what sequences need; none: as K and V
  std::vector<LayerConfig> conv;  // of a recurrent layer: its short convolution, if it has one

  bool is_mla() const { return kind == LayerKind::kMLA; }
  bool is_mha() const { return kind == LayerKind::kMHA; }
  bool is_attention() const { return is_mha() || is_mla(); }
  /*! \brief Whether Q and K are rotated before K is written. Models rotate latent rows. */
  bool has_normal_rope() const { return is_mha() && rope_mode == RopeMode::kNormal; }
  /*! \brief Whether kernels rotate Q and K as they read them. */
  bool has_inline_rope() const { return is_mha() && rope_mode == RopeMode::kInline; }
  int64_t rotary_mode() const { return has_inline_rope(); }
  /*! \brief Whether the rows of K and of V in a page have widths of their own. */
  bool has_two_widths() const { return is_mha() && qk_head_dim != v_head_dim; }
  /*! \brief Rows of a slot: K and V of each head, or one row. */
  int64_t rows_per_slot() const { return is_mha() ? 2 * num_kv_heads : 1; }

  /*! \brief The name of the type by which the layer keeps rows. */
  std::string kv_dtype() const;
  /*! \brief Layers of one shape, window and type of rows form a layer group. */
  bool SharesGroupWith(const LayerConfig& other) const {
    return window == other.window && is_chunked == other.is_chunked && HasShapeOf(other) &&
           page_dtype == other.page_dtype && codec == other.codec && recurrent == other.recurrent &&
           history_tokens == other.history_tokens;
  }
  /*! \brief The window as kernels and PageGeometry take it: negative for chunks. */
  int64_t signed_window() const { return is_chunked ? -window : window; }
  KernelName prefill() const {
    if (is_mla()) return window ? KernelName::kMLAPrefillSliding : KernelName::kMLAPrefill;
    return window ? KernelName::kPrefillSliding : KernelName::kPrefill;
  }
  /*! \brief The kernel for pages that sequences share; a set may lack it. */
  KernelName prefill_shared() const {
    return is_mla() ? KernelName::kMLAPrefillShared : KernelName::kPrefillShared;
  }
  /*! \brief The same, for steps with spans; a set may lack it. */
  KernelName prefill_spans() const {
    return window ? KernelName::kPrefillSpansSliding : KernelName::kPrefillSpans;
  }
  KernelName decode() const { return window ? KernelName::kDecodeSliding : KernelName::kDecode; }
  KernelName tree() const {
    if (is_mla()) return window ? KernelName::kMLATreeSliding : KernelName::kMLATree;
    return window ? KernelName::kTreePagedSliding : KernelName::kTreePaged;
  }
  bool HasShapeOf(const LayerConfig& other) const {
    return kind == other.kind && num_qo_heads == other.num_qo_heads &&
           num_kv_heads == other.num_kv_heads && qk_head_dim == other.qk_head_dim &&
           v_head_dim == other.v_head_dim;
  }
};

/*! \brief The same, but "mha_sliding" or "mha_chunked" for an MHA layer with a window. */
const char* ToString(const LayerConfig& layer);

/*! \brief Indices into CacheConfig::layers of what the layer of a model keeps; -1 for none. */
struct LayerParts {
  int64_t attention = -1;
  int64_t recurrent = -1;
  int64_t conv = -1;
};

struct CacheConfig {
  int64_t max_num_sequences;
  int64_t max_total_tokens;
  int64_t prefill_chunk_size;
  int64_t page_size;
  DLDataType dtype;
  std::string kv_dtype;  // of layers that have none of their own
  RopeMode rope_mode;    // of layers that have none of their own
  bool has_merged_aux;
  bool share_prefix = true;   // read shared pages of a batch once
  bool has_sequence_windows;  // whether a sequence may have a window
  std::optional<bool> sliding_window_includes_self;
  /*! \brief Accept windows of sequences without effect, because the layers have their own. */
  bool ignores_sequence_windows = false;
  /*! \brief Keep pages in memory that other processes of the host can map. */
  bool enable_kv_transfer = false;
  ffi::Tensor rope_ext_factors;  // of all layers with RoPE mode "normal"; undefined without any
  bool has_normal_rope = false;  // in a layer of the whole model
  bool has_inline_rope = false;  // in a layer of the whole model
  DLDevice device;
  PipelineStage stage;
  std::vector<LayerConfig> layers;      // what the layers of the stage keep in pages
  std::vector<LayerParts> layer_parts;  // [layer of the stage]
  std::vector<KernelSet> kernel_sets;

  /*! \brief Pages beyond max_total_tokens that engines rely on. */
  int64_t num_spare_pages = 0;
  /*! \brief Pages never reported as available: a step needs them until windows slide. */
  int64_t num_reserved_pages = 0;

  /*!
   * \brief Whether the window of a sequence includes the row itself. Unless the caller says so, it
   * does if a layer has RoPE mode "normal": there the window is that of the model's mask. Callers
   * of the stock functions rely on the other modes: a row sees `window` positions and itself.
   */
  bool window_includes_self() const {
    return sliding_window_includes_self.value_or(has_normal_rope);
  }

  /*! \brief Whether a step may have spans: whether layers have the kernels for it. */
  bool can_have_spans() const;
  /*! \brief Pages of a pool of layers without a window. */
  int64_t num_pages() const {
    return (max_total_tokens + page_size - 1) / page_size + num_spare_pages + num_reserved_pages;
  }
  /*! \brief Maximum number of pages that one step adds to sequences without shared pages. */
  int64_t MaxStepPages() const;
  /*! \brief Pages of the pool of such a layer: at most what its window can need. */
  int64_t NumPages(const LayerConfig& layer) const;

  /*! \brief Pages for states of a recurrent layer; ResolvedConfig.num_states_of says why. */
  int64_t NumStates(const RecurrentShape& shape) const;

  /*! \brief Reads the arguments of `pagedkv.create`. */
  static CacheConfig FromNamed(const ffi::Map<ffi::String, ffi::Any>& config,
                               const ffi::AnyView& kernels, DLDevice device) {
    return ReadNamed(config, kernels, device, /*serves_engine=*/false);
  }
  /*!
   * \brief Reads the arguments of `pagedkv.create_in_model`: those of `pagedkv.create`, but for the
   * device, and what the model's kernels are compiled for.
   * \param prototype A tensor on the device.
   * \param compiled_for "page_size", and for CPUs "architecture" and "features".
   */
  static CacheConfig FromModel(const ffi::Map<ffi::String, ffi::Any>& config,
                               const ffi::AnyView& kernels, const ffi::Tensor& prototype,
                               const ffi::Map<ffi::String, ffi::Any>& compiled_for);
  /*! \brief Reads the arguments of `vm.builtin.paged_attention_kv_cache_create`. */
  static CacheConfig FromPositional(ffi::PackedArgs args);

 private:
  static CacheConfig ReadNamed(const ffi::Map<ffi::String, ffi::Any>& config,
                               const ffi::AnyView& kernels, DLDevice device, bool serves_engine);
  /*!
   * \brief Gives the cache what engines that run a model rely on, as the stock cache does.
   *
   * It has pages beyond max_total_tokens: one, and two for each sequence that may have a window.
   * Rows of a step whose windows have not slid yet need more; nobody is told of these. Windows of
   * sequences are accepted without effect where layers have windows of their own.
   */
  void ServeEngine();
  /*! \brief Finds the pipeline stage, and drops layers of other stages and linear layers. */
  void KeepStage(std::vector<int64_t> layer_indptr, std::optional<int64_t> index);
  /*! \brief Notes which modes of RoPE there are, and resets theta and scale of layers that rotate
   * nothing: callers pass any value then. */
  void SettleRope();
  void CheckSizes() const;
  void Validate() const;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_CONFIG_CACHE_CONFIG_H_
