// SPDX-License-Identifier: Apache-2.0
/*!
 * \file compact_copy.h
 * \brief Copies a tensor with strides to a contiguous one.
 */
#ifndef TVM_PAGEDKV_DEVICE_COMPACT_COPY_H_
#define TVM_PAGEDKV_DEVICE_COMPACT_COPY_H_

#include <tvm/ffi/container/tensor.h>

namespace pagedkv {

/*!
 * \brief Copies host memory with any strides and any alignment.
 * \param source On the CPU.
 * \param destination Contiguous, with the same shape and dtype.
 */
void CopyCompact(const tvm::ffi::Tensor& source, const tvm::ffi::Tensor& destination);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_DEVICE_COMPACT_COPY_H_
