// SPDX-License-Identifier: Apache-2.0
/*!
 * \file tensor_checks.h
 * \brief Checks the tensors that a caller passes, and copies inputs that kernels cannot take.
 */
#ifndef TVM_PAGEDKV_DEVICE_TENSOR_CHECKS_H_
#define TVM_PAGEDKV_DEVICE_TENSOR_CHECKS_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <string>

#include "device/device_memory.h"

namespace pagedkv {

/*!
 * \brief Alignment in bytes that kernels rely on. Stock kernels assume that of TVM's own
 * allocations; kernels of this project take any element address.
 */
enum class Alignment { kElement, kStock };

/*! \brief The shape in a message, such as "[2, 3]". */
std::string ShapeText(ffi::ShapeView shape);

class TensorChecks {
 public:
  TensorChecks(DLDevice device, ByteCounter counter);

  // Each throws Error (TypeError for None, else ValueError) and names the argument.
  /*! \brief A tensor that is written: contiguous, of this shape and dtype, on the device. */
  void CheckOutput(const char* name, const ffi::Tensor& tensor,
                   std::initializer_list<int64_t> shape, DLDataType dtype) const;
  /*! \brief Like CheckOutput, for a tensor that is read: on the host it may have strides. */
  void CheckInput(const char* name, const ffi::Tensor& tensor, std::initializer_list<int64_t> shape,
                  DLDataType dtype) const;
  void CheckAlignment(const char* name, const ffi::Tensor& tensor, Alignment alignment) const;

  /*!
   * \brief Replaces inputs with strides, or with less alignment, by contiguous copies on the host.
   * \throws Error (ValueError) for an input on a device without the alignment.
   */
  void MakeCompact(std::initializer_list<ffi::Tensor*> inputs, Alignment alignment);
  int64_t num_copied() const { return num_copied_; }

 private:
  DLDevice device_;
  ByteCounter counter_;
  int64_t num_copied_ = 0;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_DEVICE_TENSOR_CHECKS_H_
