// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_io.h
 * \brief Whole pages of a layer out of its pool and into it, on the current stream.
 */
#ifndef TVM_PAGEDKV_STORAGE_PAGE_IO_H_
#define TVM_PAGEDKV_STORAGE_PAGE_IO_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <vector>

#include "storage/layer_storage.h"

namespace pagedkv {

/*!
 * \brief Copies pages to the contiguous tensor `out`.
 *
 * The slots after the first num_slots[i] of page i become zero in `out`: what was never written
 * does not leave the cache. When `out` is on the host it is complete on return.
 */
void ReadPages(const StoredLayer& layer, const std::vector<int64_t>& pages,
               const std::vector<int64_t>& num_slots, const ffi::Tensor& out);

/*! \brief Copies the contiguous tensor `data` to pages, but not to those with a negative id. Host
 * memory may be reused on return. */
void WritePages(const StoredLayer& layer, const std::vector<int64_t>& pages,
                const ffi::Tensor& data);

// The same for states, which fill their pages.
void ReadStates(const StoredLayer& layer, const std::vector<int64_t>& pages,
                const ffi::Tensor& out);
void WriteStates(const StoredLayer& layer, const std::vector<int64_t>& pages,
                 const ffi::Tensor& data);
int64_t BytesOfState(const ffi::Tensor& states);
/*! \brief Fills the page of states with NaN, on the current stream. */
void PoisonState(const ffi::Tensor& states, int64_t page);
/*! \brief Writes NaN to every slot of the pool for which is_held[slot] is false. */
void PoisonSlots(const StoredLayer& layer, const std::vector<bool>& is_held);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STORAGE_PAGE_IO_H_
