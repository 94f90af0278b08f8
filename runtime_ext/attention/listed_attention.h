// SPDX-License-Identifier: Apache-2.0
/*!
 * \file listed_attention.h
 * \brief Attention of the rows of a step to lists of positions or of blocks of positions, for
 * layers of both kinds.
 *
 * The pages hold the rows of the step already, so a list may name any position up to its row's own.
 */
#ifndef TVM_PAGEDKV_ATTENTION_LISTED_ATTENTION_H_
#define TVM_PAGEDKV_ATTENTION_LISTED_ATTENTION_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <optional>

#include "attention/attention_call.h"
#include "step/step.h"

namespace pagedkv {

/*! \brief What the rows of a step list; T is their number. */
struct RowLists {
  /*!
   * Positions: int32 [T, width]. Blocks: int32 [T, width], or [T, lists, width] where each list is
   * for num_kv_heads / lists KV heads. -1 stands for none.
   */
  ffi::Tensor ids;
  /*! Positions of a block; nothing where lists name positions. */
  std::optional<int64_t> block_size{};
};

/*!
 * \brief Refuses steps in which the length of a sequence does not say what a row sees.
 * \throws Error (ValueError).
 */
void RequireListStep(const ForwardPlan& plan);
/*!
 * \brief Refuses what is no size of a block: a positive multiple of the page size.
 * \throws Error (ValueError).
 */
void RequireBlockSize(int64_t block_size, int64_t page_size);

class ListedAttention {
 public:
  explicit ListedAttention(Step* step) : step_(step) {}

  /*!
   * \brief Checks that a layer can attend to lists in this step, and that lists are possible; where
   * the host can read them, each entry.
   * \throws Error (ValueError, TypeError).
   */
  void Check(const StoredLayer& layer, const RowLists& lists) const;
  /*! \brief Attends, with lists that have passed Check, and writes o and lse. */
  void Attend(const StoredLayer& layer, const AttentionCall& call, const RowLists& lists) const;

 private:
  void CheckPositions(const ffi::Tensor& positions) const;
  void CheckBlocks(const StoredLayer& layer, const ffi::Tensor& blocks, int64_t block_size) const;

  Step* step_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_ATTENTION_LISTED_ATTENTION_H_
