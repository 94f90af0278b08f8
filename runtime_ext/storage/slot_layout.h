// SPDX-License-Identifier: Apache-2.0
/*!
 * \file slot_layout.h
 * \brief Where the rows of a slot lie in the pages of a layer.
 *
 * A layer with K and V has pages [num_pages, 2, num_kv_heads, page_size, head_dim], an MLA layer
 * [num_pages, page_size, head_dim]. A slot holds one token: a row of K and one of V for each head,
 * or the latent row. So the rows of a slot are `page_size` rows apart.
 */
#ifndef TVM_PAGEDKV_STORAGE_SLOT_LAYOUT_H_
#define TVM_PAGEDKV_STORAGE_SLOT_LAYOUT_H_

#include <cstdint>

namespace pagedkv {

struct SlotLayout {
  int64_t page_size;      // slots
  int64_t rows_per_slot;  // 2 * num_kv_heads: K of each head, then V; 1 for MLA
  int64_t row_bytes;

  int64_t slot_bytes() const { return rows_per_slot * row_bytes; }
  int64_t page_bytes() const { return page_size * slot_bytes(); }
  /*! \brief Byte offset of a row of a slot. Slots count from the first page of the pool on. */
  int64_t RowOffset(int64_t slot, int64_t row) const {
    const int64_t page = slot / page_size;
    return ((page * rows_per_slot + row) * page_size + slot % page_size) * row_bytes;
  }
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STORAGE_SLOT_LAYOUT_H_
