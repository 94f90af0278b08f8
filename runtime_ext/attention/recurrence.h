// SPDX-License-Identifier: Apache-2.0
/*!
 * \file recurrence.h
 * \brief The calls of a model for a recurrent layer and a short convolution within a step.
 *
 * Each call checks its tensors first, so one that throws Error has written nothing. In shapes, T is
 * the number of rows of the step.
 */
#ifndef TVM_PAGEDKV_ATTENTION_RECURRENCE_H_
#define TVM_PAGEDKV_ATTENTION_RECURRENCE_H_

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/optional.h>

#include <cstdint>
#include <vector>

#include "step/step.h"

namespace pagedkv {

class Recurrence {
 public:
  /*! \param step Must outlive this. */
  explicit Recurrence(Step* step)
      : step_(step), storage_(step->storage()), last_scan_(storage_.layers().size(), 0) {}

  /*!
   * \brief Appends the ingredients of the step's rows, and takes the states of its sequences
   * through them. A layer does so once in a step, because the states are updated in place.
   * \param scale The factor on q.
   * \param q [T, num_key_heads, key_dim]; k as well.
   * \param v [T, num_heads, value_dim]; o, which is written, as well.
   * \param log_decay float32 [T, num_heads], or [T, num_heads, key_dim].
   * \param beta float32 [T, num_heads], for rules with a delta only.
   */
  void Update(int64_t layer_id, double scale, ffi::Tensor q, ffi::Tensor k, ffi::Tensor v,
              ffi::Tensor log_decay, ffi::Tensor o, ffi::Optional<ffi::Tensor> beta);
  /*!
   * \brief Appends the rows of x and convolves them with those before them.
   * \param x [T, channels]; o, which is written, as well.
   * \param weight [channels, width], the last column for the row itself.
   * \param bias [channels], of a convolution that has one.
   */
  void Convolve(int64_t layer_id, ffi::Tensor x, ffi::Tensor weight, ffi::Tensor o,
                ffi::Optional<ffi::Tensor> bias);

 private:
  void RequireFirstCall(const StoredLayer& layer, const char* what) const;

  Step* step_;
  const LayerStorage& storage_;
  std::vector<int64_t> last_scan_;  // [layer] number of the step that began one
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_ATTENTION_RECURRENCE_H_
