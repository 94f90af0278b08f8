// SPDX-License-Identifier: Apache-2.0
/*!
 * \file positional_named.h
 * \brief Argument 24 of the positional constructor: the rotary kernels, and behind them, by names,
 * all that the stock constructor has no place for.
 */
#ifndef TVM_PAGEDKV_CONFIG_POSITIONAL_NAMED_H_
#define TVM_PAGEDKV_CONFIG_POSITIONAL_NAMED_H_

#include <tvm/ffi/any.h>

#include <cstdint>

#include "config/cache_config.h"

namespace pagedkv {

// Each throws Error (ValueError, TypeError) where the argument does not fit.

/*!
 * \brief Index 24: a plain function, or ["pagedkv", split_rotary, rope_append, page_size], then
 * what the arguments have no place for: pairs of a kernel's name and its function, and of
 * "kv_dtype" or, for MLA layers, "mla_kv_dtype" and what SetPageType takes, and of "cpu" and
 * ["x86_64", "avx avx2 ..."], the architecture and the features that the kernels need, and of
 * "rope" and what SetRopes takes, of "index" and what IndexLane takes, and of "kv_scales" and what
 * SetScales takes.
 */
void SetRotary(const ffi::AnyView& value, int64_t page_size, LayerConfig* layer,
               KernelSet* kernels);
/*!
 * \brief Rotations that only some layers have, from index 24: after "rope" their ids, theta, scale
 * and details, then names and kernels in place of those of all layers.
 */
void SetRopes(const ffi::AnyView& value, CacheConfig* config);
/*!
 * \brief Static scales, from index 24: after "kv_scales" those of K and of V of all layers, float32
 * [layers, 2, KV heads]. Layers without K and V leave theirs alone.
 */
void SetScales(const ffi::AnyView& value, CacheConfig* config);
/*!
 * \brief The index lanes of a model, which are all alike, from index 24: after "index" the heads,
 * the width of a key and what SetPageType takes, then names and kernels.
 */
LayerConfig IndexLane(const ffi::AnyView& value, CacheConfig* config);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_CONFIG_POSITIONAL_NAMED_H_
