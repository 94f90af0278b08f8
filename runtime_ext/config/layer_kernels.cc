// SPDX-License-Identifier: Apache-2.0
/*!
 * \file layer_kernels.cc
 * \brief The abilities of a layer with its kernel set.
 */
#include "config/layer_kernels.h"

#include <string>

#include "base/error.h"

namespace pagedkv {

bool HasStockWindow(const LayerConfig& layer, const KernelSet& kernels) {
  return layer.window > 0 && (kernels.IsStock(layer.prefill()) || kernels.IsStock(layer.decode()));
}

bool CanSharePrefix(const LayerConfig& layer, const KernelSet& kernels) {
  if (layer.window > 0 || !kernels.Has(layer.prefill_shared())) return false;
  // Lists name positions of the whole sequence, and page tables would begin behind shared pages.
  if (kernels.Has(KernelName::kAttendListed) || kernels.Has(KernelName::kAttendBlocks)) {
    return false;
  }
  if (layer.is_mla()) return true;
  for (KernelName name : {layer.prefill(), layer.decode(), layer.tree()}) {
    if (kernels.IsStock(name) || kernels.IsFlashInfer(name)) return false;
  }
  return true;
}

namespace {

/*! \throws Error (ValueError) where the set has kernels that do not know the layer's pages or
 * sinks.
 */
void RequireOwnKernels(const LayerConfig& layer, const KernelSet& kernels) {
  for (int i = 0; i < static_cast<int>(KernelName::kNumNames); ++i) {
    const auto name = static_cast<KernelName>(i);
    if (!kernels.IsStock(name) && !kernels.IsFlashInfer(name)) continue;
    const char* owner = kernels.IsStock(name) ? "the stock cache (tag tirx)" : "FlashInfer";
    if (layer.has_two_widths()) {
      Raise(kValueError, "layer ", layer.id, " has rows of K with ", layer.qk_head_dim,
            " elements and rows of V with ", layer.v_head_dim,
            ", which only kernels of tvm_pagedkv can read in pages, but its kernel '",
            ToString(name), "' is of ", owner);
    }
    if (layer.has_sink_logits) {
      Raise(kValueError, "layer ", layer.id, " has kernels that take learned sinks, as only those ",
            "of tvm_pagedkv do, but its kernel '", ToString(name), "' is of ", owner);
    }
    Raise(kValueError, "layer ", layer.id, " keeps K and V as ", layer.codec->name,
          ", which only kernels of tvm_pagedkv can read, but its kernel '", ToString(name),
          "' is of ", owner,
          "; give it kernels of tvm_pagedkv, or a kv_dtype of float32, float16 or bfloat16");
  }
}

}  // namespace

void RequireKernels(const LayerConfig& layer, const KernelSet& kernels) {
  if (layer.codec || layer.has_two_widths() || layer.has_sink_logits) {
    RequireOwnKernels(layer, kernels);
  }
  std::string missing;
  auto require = [&](KernelName name) {
    if (!kernels.Has(name)) missing += (missing.empty() ? "" : ", ") + std::string(ToString(name));
  };
  if (layer.kind == LayerKind::kRecurrent) {
    require(KernelName::kRecurrentAppend);
    require(KernelName::kRecurrentScan);
  } else if (layer.kind == LayerKind::kConv) {
    require(KernelName::kRowAppend);
    require(KernelName::kCausalConv);
  } else if (layer.is_mla()) {
    if (kernels.IsFlashInfer(KernelName::kPrefillRagged)) {
      Raise(kValueError, "FlashInfer's functions serve layers with K and V, not MLA layers");
    }
    require(KernelName::kTransposeAppendMLA);
    // Index keys are latent rows that nobody attends to.
    if (!kernels.Has(KernelName::kIndexTopK)) require(layer.prefill());
    for (KernelName name : {layer.prefill(), layer.tree()}) {
      if (layer.window == 0 || !kernels.IsStock(name)) continue;
      Raise(kValueError, "layer ", layer.id,
            " is an MLA layer with a window, which only kernels of ",
            "tvm_pagedkv know, but its kernel '", ToString(name),
            "' is of the stock cache (tag tirx)");
    }
  } else {
    if (!kernels.Has(KernelName::kRopeAppend)) {
      require(KernelName::kTransposeAppend);
      require(KernelName::kSplitRotary);
    }
    require(layer.prefill());
    require(layer.decode());
    if (HasStockWindow(layer, kernels)) {
      if (layer.is_chunked) {
        Raise(kValueError, "layer ", layer.id,
              " attends within chunks, which kernels of the stock ",
              "cache (tag tirx) cannot: give it kernels of tvm_pagedkv");
      }
      for (KernelName name : {KernelName::kTransposeAppend, KernelName::kSplitRotary,
                              KernelName::kPrefillRagged, KernelName::kMerge}) {
        require(name);
      }
    }
  }
  require(KernelName::kCopySinglePage);
  if (!missing.empty()) Raise(kValueError, "the cache needs kernels that are missing: ", missing);
}

void RequireSequenceWindowKernels(const LayerConfig& layer, const KernelSet& kernels) {
  if (HasStockWindow(layer, kernels)) {
    Raise(kValueError,
          "windows of sequences are not possible with layers that have a window over kernels of ",
          "the stock cache");
  }
  if (layer.is_mla() || layer.window > 0) return;
  if (kernels.IsOwn(KernelName::kPrefill) && kernels.IsOwn(KernelName::kDecode)) return;
  for (KernelName name : {KernelName::kPrefillSliding, KernelName::kDecodeSliding}) {
    if (kernels.IsStock(name)) continue;
    Raise(kValueError, "windows of sequences over kernels of the stock cache need a kernel '",
          ToString(name), "' of the same kind (tag tirx)");
  }
  for (KernelName name : {KernelName::kPrefillRagged, KernelName::kMerge}) {
    if (kernels.Has(name)) continue;
    Raise(kValueError, "windows of sequences over kernels of the stock cache need a kernel '",
          ToString(name), "': they attend to the rows of a step separately and merge");
  }
}

void RequireSpanKernel(const LayerConfig& layer, const KernelSet& kernels) {
  if (!layer.is_attention()) return;
  if (layer.is_mla()) {
    Raise(kValueError, "layer ", layer.id, " is an MLA layer, in which spans are not possible");
  }
  const KernelName name = layer.prefill_spans();
  if (!kernels.Has(name) || !kernels.IsOwn(layer.prefill())) {
    Raise(kValueError, "layer ", layer.id, " has no kernel '", ToString(name),
          "', which a step with spans needs beside a kernel '", ToString(layer.prefill()),
          "' of tvm_pagedkv; make the cache with spans=True");
  }
}

void RequireTreeKernel(const LayerConfig& layer, const KernelSet& kernels) {
  if (!layer.is_attention() || kernels.Has(KernelName::kIndexTopK)) return;
  const KernelName name = layer.tree();
  if (!kernels.Has(name)) {
    Raise(kValueError, "layer ", layer.id, " has no kernel '", ToString(name),
          "', which a step with token trees that branch needs");
  }
  if (kernels.IsStock(name) && layer.has_inline_rope()) {
    Raise(kValueError, "layer ", layer.id, " has the stock cache's kernel '", ToString(name),
          "', which does not rotate tree nodes by their depth, as rope_mode 2 (inline) needs");
  }
}

}  // namespace pagedkv
