// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sink_order.h
 * \brief Functions of attention that take learned sinks before or after their outputs.
 *
 * Our methods take them last. Relax passes outputs last, so there, and in apache/tvm#20104, the
 * sinks come before the outputs. The number of dimensions tells which tensor is the output.
 */
#ifndef TVM_PAGEDKV_FFI_SINK_ORDER_H_
#define TVM_PAGEDKV_FFI_SINK_ORDER_H_

#include <tvm/ffi/function.h>

#include "ffi/method.h"

namespace pagedkv {

enum class SinkNeed { kOptional, kRequired };

/*!
 * \brief A method whose last arguments are `num_outputs` outputs, then sinks, in either order.
 * \param num_outputs The first of them is o, of three dimensions.
 * \param need With kOptional, the function may be called without sinks, or with None.
 */
ffi::Function WithSinksInEitherOrder(CacheMethod method, int num_outputs,
                                     SinkNeed need = SinkNeed::kOptional);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_FFI_SINK_ORDER_H_
