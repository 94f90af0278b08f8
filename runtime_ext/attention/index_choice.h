// SPDX-License-Identifier: Apache-2.0
/*!
 * \file index_choice.h
 * \brief What the rows of a step choose by the keys of an index lane: lists of positions or blocks.
 */
#ifndef TVM_PAGEDKV_ATTENTION_INDEX_CHOICE_H_
#define TVM_PAGEDKV_ATTENTION_INDEX_CHOICE_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>

#include "step/step.h"

namespace pagedkv {

namespace ffi = tvm::ffi;

/*! \brief How blocks of positions are chosen. */
struct BlockChoice {
  int64_t block_size;
  int64_t init_blocks;   // the first blocks, which every row chooses
  int64_t local_blocks;  // the last blocks up to the row's own, the same
};

/*! \brief The choices of a layer whose kernels they need; each call checks its tensors first. */
class IndexChoice {
 public:
  explicit IndexChoice(Step* step) : step_(step) {}

  /*! \brief See Attention::ChooseTopK. */
  void TopK(const StoredLayer& layer, double scale, ffi::Tensor q, ffi::Tensor weights,
            const ffi::Tensor& positions) const;
  /*! \brief See Attention::ChooseTopBlocks. */
  void TopBlocks(const StoredLayer& layer, const BlockChoice& choice, ffi::Tensor q,
                 const ffi::Tensor& blocks) const;

 private:
  void CheckQueries(const StoredLayer& layer, const ffi::Tensor& q) const;
  void RequireKeys(const StoredLayer& layer) const;

  Step* step_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_ATTENTION_INDEX_CHOICE_H_
