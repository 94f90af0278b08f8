// SPDX-License-Identifier: Apache-2.0
/*!
 * \file copy_regions.h
 * \brief Many copies between two tensors in one call: what a receiver does with a block.
 */
#ifndef TVM_PAGEDKV_TRANSFER_COPY_REGIONS_H_
#define TVM_PAGEDKV_TRANSFER_COPY_REGIONS_H_

#include <tvm/ffi/container/tensor.h>

namespace pagedkv {

namespace ffi = tvm::ffi;

/*!
 * \brief Copies bytes between the memory of two contiguous tensors, and waits for the copies.
 * \param regions int64 [n, 3] on the CPU: destination offset, source offset, number of bytes.
 * \throws Error (TypeError, ValueError; IndexError for a region out of bounds). Nothing is copied.
 */
void CopyRegions(const ffi::Tensor& destination, const ffi::Tensor& source,
                 const ffi::Tensor& regions);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_TRANSFER_COPY_REGIONS_H_
