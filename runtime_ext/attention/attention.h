// SPDX-License-Identifier: Apache-2.0
/*!
 * \file attention.h
 * \brief The calls of a model for a layer within a step.
 *
 * Each call checks its tensors first, so one that throws Error has written nothing. In shapes, T is
 * the number of rows of the step.
 */
#ifndef TVM_PAGEDKV_ATTENTION_ATTENTION_H_
#define TVM_PAGEDKV_ATTENTION_ATTENTION_H_

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/optional.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "attention/backends/attention_backend.h"
#include "attention/index_choice.h"
#include "attention/listed_attention.h"
#include "attention/mla_attention.h"
#include "attention/sink_logits.h"
#include "step/step.h"

namespace pagedkv {

class Attention {
 public:
  /*! \param step Must outlive this. */
  explicit Attention(Step* step);

  /*!
   * \brief Rotates and appends the rows of qkv, then attends to the past and the step's rows.
   * \param qkv [T, num_qo_heads + 2 * num_kv_heads, head_dim].
   * \param o [T, num_qo_heads, head_dim], written.
   * \param sink_logits Learned attention sinks: a float32 logit for each query head.
   */
  void AttendFused(int64_t layer_id, double sm_scale, ffi::Tensor qkv, ffi::Tensor o,
                   ffi::Optional<ffi::Tensor> sink_logits);
  /*!
   * \brief The same, but each row attends to the positions that it lists.
   * \param positions int32 [T, width]: 0 to the row's own position, or -1 for none.
   */
  void AttendToList(int64_t layer_id, double sm_scale, ffi::Tensor qkv, ffi::Tensor positions,
                    ffi::Tensor o, ffi::Optional<ffi::Tensor> sink_logits);
  /*!
   * \brief The same, but each row attends to the blocks of positions that it lists.
   * \param block_size Positions of a block, a multiple of the page size.
   * \param blocks int32 [T, width] or [T, lists, width], see RowLists: 0 to the row's own block,
   * each once, or -1 for none.
   */
  void AttendToBlocks(int64_t layer_id, int64_t block_size, double sm_scale, ffi::Tensor qkv,
                      ffi::Tensor blocks, ffi::Tensor o, ffi::Optional<ffi::Tensor> sink_logits);
  /*!
   * \brief The same as AttendFused, but in a decode step each KV head attends to so many positions:
   * the pages with the largest bounds on products with K, the first and the last page among them.
   * \param budget Positions, at least two pages. Sequences that have no more see all of theirs.
   */
  void AttendWithinBudget(int64_t layer_id, int64_t budget, double sm_scale, ffi::Tensor qkv,
                          ffi::Tensor o, ffi::Optional<ffi::Tensor> sink_logits);
  /*!
   * \brief Attends over the pages of another layer, which has appended in this step.
   * \param q [T, num_qo_heads, head_dim], rotated.
   * \param current_k The rows that the source layer has appended; current_v as well.
   */
  void AttendShared(int64_t source_id, double sm_scale, ffi::Tensor q, ffi::Tensor current_k,
                    ffi::Tensor current_v, ffi::Tensor o, ffi::Optional<ffi::Tensor> sink_logits);
  /*!
   * \brief Attends causally to the rows of the step alone; a layer with K and V appends them too.
   * \param lse [T, num_qo_heads] float32, written.
   */
  void SelfAttend(int64_t layer_id, double sm_scale, ffi::Tensor q, ffi::Tensor k, ffi::Tensor v,
                  ffi::Tensor o, ffi::Tensor lse, ffi::Optional<ffi::Tensor> sink_logits);
  /*! \brief Attends to the past alone; for the exceptions of MLA layers see mla_attention.h. */
  void CrossAttend(int64_t layer_id, double sm_scale, ffi::Tensor q, ffi::Tensor o, ffi::Tensor lse,
                   ffi::Optional<ffi::Tensor> sink_logits);
  /*! \brief Attends to the positions that rows list, among the past and the step's rows, which a
   * layer has appended; q is rotated. */
  void CrossAttendToList(int64_t layer_id, double sm_scale, ffi::Tensor q, ffi::Tensor positions,
                         ffi::Tensor o, ffi::Tensor lse, ffi::Optional<ffi::Tensor> sink_logits);
  /*! \brief The same, with blocks of positions in place of positions. */
  void CrossAttendToBlocks(int64_t layer_id, int64_t block_size, double sm_scale, ffi::Tensor q,
                           ffi::Tensor blocks, ffi::Tensor o, ffi::Tensor lse,
                           ffi::Optional<ffi::Tensor> sink_logits);
  /*!
   * \brief Chooses positions of each row by the keys of an index lane, which have been appended.
   * \param q [T, num_qo_heads, qk_head_dim].
   * \param weights float32 [T, num_qo_heads], those of the heads.
   * \param positions int32 [T, k], written: in order, then -1.
   */
  void ChooseTopK(int64_t layer_id, double scale, ffi::Tensor q, ffi::Tensor weights,
                  ffi::Tensor positions);
  /*!
   * \brief Chooses blocks of positions for each head of each row, by the largest product with a
   * key.
   * \param q [T, num_qo_heads, qk_head_dim].
   * \param blocks int32 [T, num_qo_heads, k], written: in order, then -1.
   */
  void ChooseTopBlocks(int64_t layer_id, int64_t block_size, int64_t init_blocks,
                       int64_t local_blocks, ffi::Tensor q, ffi::Tensor blocks);
  /*! \param kv Latent rows, [T, qk_head_dim]. */
  void AppendMLAKV(int64_t layer_id, ffi::Tensor kv);
  /*! \brief Merges the partial state (o_other, lse_other) into (o, lse), and returns these. */
  ffi::Array<ffi::Tensor> Merge(ffi::Tensor o, ffi::Tensor lse, ffi::Tensor o_other,
                                ffi::Tensor lse_other);

 private:
  /*! \brief One of the two, by the kind of the layer. */
  struct LayerEntry {
    std::unique_ptr<AttentionBackend> backend;
    std::unique_ptr<MLAAttention> mla;
    std::unique_ptr<SinkLogits> sinks;  // of both
  };

  /*! \brief What rows see of their sequences; without any of these, what the layer's mask shows. */
  struct Reach {
    const RowLists* lists = nullptr;
    std::optional<int64_t> budget{};  // positions, in decode steps
  };
  /*! \brief Within a Step::LayerCall. */
  void AppendAndAttend(int64_t layer_id, double sm_scale, ffi::Tensor qkv, const Reach& reach,
                       const ffi::Tensor& o, const ffi::Optional<ffi::Tensor>& sink_logits);
  /*! \brief Checks a budget. \return The pages of it if rows are to choose some, else 0. */
  int64_t PagesToChoose(const StoredLayer& layer, int64_t budget) const;
  /*! \brief What the rows of a decode step choose. \param q Rotated. */
  RowLists ChoosePages(const StoredLayer& layer, const ffi::Tensor& q, int64_t num_pages);
  /*! \brief Within a Step::LayerCall, to rows that are appended. */
  void AttendToLists(int64_t layer_id, double sm_scale, ffi::Tensor q, const RowLists& lists,
                     const ffi::Tensor& o, const ffi::Tensor& lse,
                     const ffi::Optional<ffi::Tensor>& sink_logits);
  const SinkLogits& SinksOf(const StoredLayer& layer) const { return *layers_[layer.index].sinks; }
  const KernelSet& MergeKernels(int64_t num_heads, int64_t width) const;

  Step* step_;
  const LayerStorage& storage_;
  SharedBackendState shared_;
  ListedAttention listed_;
  IndexChoice choice_;
  std::vector<LayerEntry> layers_;  // as LayerStorage::layers
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_ATTENTION_ATTENTION_H_
