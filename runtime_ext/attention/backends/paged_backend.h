// SPDX-License-Identifier: Apache-2.0
/*!
 * \file paged_backend.h
 * \brief Attention with kernels of this project: append, then one pass over the pages.
 */
#ifndef TVM_PAGEDKV_ATTENTION_BACKENDS_PAGED_BACKEND_H_
#define TVM_PAGEDKV_ATTENTION_BACKENDS_PAGED_BACKEND_H_

#include "attention/backends/attention_backend.h"
#include "attention/layer_pages.h"
#include "attention/ragged_attention.h"

namespace pagedkv {

class PagedBackend : public AttentionBackend {
 public:
  PagedBackend(Step* step, const StoredLayer& layer, const SharedBackendState& shared);

  Alignment page_alignment() const override;
  Alignment row_alignment() const override { return ragged_.alignment(); }
  void RequireRowKernel() const override { ragged_.RequireKernel(); }
  void Append(const ffi::Tensor& qkv) override;
  void Attend(const AttentionCall& call, const ffi::Tensor& k, const ffi::Tensor& v) override;
  void AppendAndAttend(const ffi::Tensor& qkv, const AttentionCall& call, const ffi::Tensor& k,
                       const ffi::Tensor& v) override;
  void AttendToPast(const AttentionCall& call) override;
  void AttendToRows(const AttentionCall& call, const ffi::Tensor& k,
                    const ffi::Tensor& v) override {
    ragged_.Attend(call, k, v);
  }

 protected:
  /*! \brief Attends to the pages with the kernel for this step: tree, decode or prefill. */
  void AttendToPages(const AttentionCall& call, const PageTable& table);
  virtual void Decode(const AttentionCall& call, const PageTable& table);
  virtual void Prefill(const AttentionCall& call, const PageTable& table);
  /*! \brief Append with two kernels, which leave K and V in the workspace too. */
  void SplitAndAppend(const ffi::Tensor& qkv);

  /*!
   * \brief Calls a kernel with the arguments of `decode`.
   * \param lengths PageTable::lengths, or for stock kernels that know windows a matrix of it.
   */
  void CallDecode(KernelName name, const AttentionCall& call, const PageTable& table,
                  const ffi::Tensor& lengths) const;
  void CallPrefill(KernelName name, const AttentionCall& call, const PageTable& table,
                   const ffi::Tensor& lengths) const;

  const ForwardPlan& plan() const { return step_->plan(); }
  const CacheConfig& config() const { return step_->storage().config(); }
  bool HasTreeMask(PageRange range) const { return pages_.NeedsTreeMask(range); }
  PageTable PastPages() const { return pages_.Past(); }

  Step* step_;
  const StoredLayer& layer_;

 private:
  void RotateAndAppend(const ffi::Tensor& qkv);
  /*! \brief Whether one kernel can append and attend in this step. */
  bool CanAppendWithPrefill() const;
  /*! \brief `window` if the layer has one: its kernels take it. */
  std::optional<int64_t> WindowArgument(int64_t window) const {
    return layer_.config.window == 0 ? std::nullopt : std::optional<int64_t>(window);
  }
  void AttendWithTreeMask(const AttentionCall& call, const PageTable& table) const;

  LayerPages pages_;
  RaggedAttention ragged_;
  bool has_rope_append_;
  bool has_stock_kernels_;  // among those for pages
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_ATTENTION_BACKENDS_PAGED_BACKEND_H_
