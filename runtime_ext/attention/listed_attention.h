// SPDX-License-Identifier: Apache-2.0
/*!
 * \file listed_attention.h
 * \brief Attention of the rows of a step to positions that they list, for layers of both kinds.
 *
 * The pages hold the rows of the step already, so a list may name any position up to its row's own.
 */
#ifndef TVM_PAGEDKV_ATTENTION_LISTED_ATTENTION_H_
#define TVM_PAGEDKV_ATTENTION_LISTED_ATTENTION_H_

#include <tvm/ffi/container/tensor.h>

#include "attention/attention_call.h"
#include "step/step.h"

namespace pagedkv {

class ListedAttention {
 public:
  explicit ListedAttention(Step* step) : step_(step) {}

  /*!
   * \brief Checks that a layer can attend to lists in this step, and that lists are possible.
   * \param positions int32 [T, width]; -1 for none. Where the host can read it, each position.
   * \throws Error (ValueError, TypeError).
   */
  void Check(const StoredLayer& layer, const ffi::Tensor& positions) const;
  /*! \brief Attends, with positions that have passed Check, and writes o and lse. */
  void Attend(const StoredLayer& layer, const AttentionCall& call, ffi::Tensor positions) const;

  /*! \brief See Attention::ChooseTopK. */
  void ChooseTopK(const StoredLayer& layer, double scale, ffi::Tensor q, ffi::Tensor weights,
                  const ffi::Tensor& positions) const;

 private:
  /*! \brief Refuses steps in which positions do not say what a row sees. */
  void CheckStep() const;
  void CheckPositions(const ffi::Tensor& positions) const;

  Step* step_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_ATTENTION_LISTED_ATTENTION_H_
