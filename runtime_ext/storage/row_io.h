// SPDX-License-Identifier: Apache-2.0
/*!
 * \file row_io.h
 * \brief Rows of slots out of the pages of a layer and into them, on the current stream.
 *
 * Rows have the type of LayerStorage::RowDtype. The layer's kernels read and write quantized ones.
 */
#ifndef TVM_PAGEDKV_STORAGE_ROW_IO_H_
#define TVM_PAGEDKV_STORAGE_ROW_IO_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <vector>

#include "storage/layer_storage.h"

namespace pagedkv {

/*! \brief Contiguous rows of some layers; those of one layer are in the order of its slots. */
struct LayerRows {
  ffi::Tensor
      k;  // [num_layers, n, num_kv_heads, head_dim]; of MLA layers [num_layers, n, head_dim]
  ffi::Tensor v;  // undefined for MLA layers

  /*! \brief K and V of one layer: views without the first dimension. */
  LayerRows At(int64_t index) const;
};

/*! \brief Reads n slots into the rows of the layer at `index`. */
void ReadRows(const StoredLayer& layer, const std::vector<int32_t>& slots, const LayerRows& rows,
              int64_t index);

/*!
 * \brief Writes rows of K and V, [n, num_kv_heads, head_dim] each, by the layer's kernel.
 * \param slots int32 [n] on the device of the pages; a negative one: do not write.
 */
void AppendRows(const StoredLayer& layer, const ffi::Tensor& k, const ffi::Tensor& v,
                const ffi::Tensor& slots);

/*!
 * \brief Writes the rows of one layer, without the dimension of layers, to n slots.
 *
 * A kernel that throws may have written some of them.
 */
void WriteRows(const StoredLayer& layer, const std::vector<int32_t>& slots, const LayerRows& rows);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STORAGE_ROW_IO_H_
