// SPDX-License-Identifier: Apache-2.0
/*!
 * \file compact_copy.h
 * \brief The elements of a tensor with strides, one after the other.
 */
#ifndef TVM_PAGEDKV_DEVICE_COMPACT_COPY_H_
#define TVM_PAGEDKV_DEVICE_COMPACT_COPY_H_

#include <tvm/ffi/container/tensor.h>

namespace pagedkv {

/*!
 * \brief Copies host memory: any strides, any alignment.
 * \param source On the CPU.
 * \param destination Contiguous, of the same shape and type.
 */
void CopyCompact(const tvm::ffi::Tensor& source, const tvm::ffi::Tensor& destination);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_DEVICE_COMPACT_COPY_H_
