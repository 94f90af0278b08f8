// SPDX-License-Identifier: Apache-2.0
/*!
 * \file layer_kernels.h
 * \brief The abilities of a layer with its kernel set. Asked when a cache is created, not in each
 * call.
 *
 * A set may mix kernels of this project, of the stock cache and of FlashInfer. They differ in what
 * they know: stock kernels with a window take none as an argument, FlashInfer plans on its own.
 */
#ifndef TVM_PAGEDKV_CONFIG_LAYER_KERNELS_H_
#define TVM_PAGEDKV_CONFIG_LAYER_KERNELS_H_

#include "config/cache_config.h"
#include "config/kernels.h"

namespace pagedkv {

/*! \brief Whether the layer has a window, and the stock cache's kernels attend to it. */
bool HasStockWindow(const LayerConfig& layer, const KernelSet& kernels);

/*!
 * \brief Whether pages that sequences of a batch share can be read once for all of them.
 *
 * All rows must see all of a shared page, so the layer may have no window. The kernels for the
 * other pages must be ours: those are told where the page table of a sequence begins.
 */
bool CanSharePrefix(const LayerConfig& layer, const KernelSet& kernels);

/*! \throws Error (ValueError) that lists the kernels that the layer needs and the set lacks. */
void RequireKernels(const LayerConfig& layer, const KernelSet& kernels);

/*! \throws Error (ValueError) where a step with spans is impossible with these kernels. */
void RequireSpanKernel(const LayerConfig& layer, const KernelSet& kernels);

/*! \throws Error (ValueError) where sequences with a window are impossible with these kernels. */
void RequireSequenceWindowKernels(const LayerConfig& layer, const KernelSet& kernels);

/*! \throws Error (ValueError) where a step with branching token trees is impossible. */
void RequireTreeKernel(const LayerConfig& layer, const KernelSet& kernels);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_CONFIG_LAYER_KERNELS_H_
