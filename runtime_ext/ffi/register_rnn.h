// SPDX-License-Identifier: Apache-2.0
/*!
 * \file register_rnn.h
 * \brief The global functions of the RNN state.
 */
#ifndef TVM_PAGEDKV_FFI_REGISTER_RNN_H_
#define TVM_PAGEDKV_FFI_REGISTER_RNN_H_

namespace pagedkv {

/*! \brief Comes after the functions of the cache, whose names it serves as well. */
void RegisterRNNState();

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_FFI_REGISTER_RNN_H_
