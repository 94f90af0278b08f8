// SPDX-License-Identifier: Apache-2.0
/*!
 * \file slot_layout.h
 * \brief Where the rows of a slot lie in the pages of a layer.
 *
 * A layer with K and V has pages [num_pages, 2, num_kv_heads, page_size, head_dim], an MLA layer
 * [num_pages, page_size, head_dim]. A slot holds one token: a row of K and one of V for each head,
 * or the latent row. So the rows of a slot are `page_size` rows apart.
 *
 * Quantized pages have two sections of that form, the codes of the rows and their scales, and then
 * padding. What is a row of a page here is one of each.
 */
#ifndef TVM_PAGEDKV_STORAGE_SLOT_LAYOUT_H_
#define TVM_PAGEDKV_STORAGE_SLOT_LAYOUT_H_

#include <array>
#include <cstdint>

namespace pagedkv {

struct SlotLayout {
  struct Section {
    int64_t begin;      // byte offset in a page
    int64_t row_bytes;  // 0: the pages have no such section
  };

  int64_t page_size;      // slots
  int64_t rows_per_slot;  // 2 * num_kv_heads: K of each head, then V; 1 for MLA
  int64_t page_bytes;
  std::array<Section, 2> sections;

  /*! \brief Pages that hold nothing but rows. */
  static SlotLayout Plain(int64_t page_size, int64_t rows_per_slot, int64_t row_bytes) {
    const int64_t page_bytes = page_size * rows_per_slot * row_bytes;
    return {page_size, rows_per_slot, page_bytes, {{{0, row_bytes}, {page_bytes, 0}}}};
  }
  /*! \brief Pages of codes, then scales, then padding. */
  static SlotLayout Quantized(int64_t page_size, int64_t rows_per_slot, int64_t row_bytes,
                              int64_t scale_bytes, int64_t page_bytes) {
    const int64_t codes_end = page_size * rows_per_slot * row_bytes;
    return {page_size, rows_per_slot, page_bytes, {{{0, row_bytes}, {codes_end, scale_bytes}}}};
  }

  int64_t row_bytes() const { return sections[0].row_bytes + sections[1].row_bytes; }
  int64_t slot_bytes() const { return rows_per_slot * row_bytes(); }
  /*! \brief Bytes of a page before its padding. */
  int64_t used_bytes() const { return page_size * slot_bytes(); }
  /*! \brief Byte offset of a row of a slot. Slots count from the first page of the pool on. */
  int64_t RowOffset(const Section& section, int64_t slot, int64_t row) const {
    const int64_t first_row = row * page_size + slot % page_size;
    return slot / page_size * page_bytes + section.begin + first_row * section.row_bytes;
  }
  /*! \brief Calls visit(offset, num_bytes) for each run of bytes that holds a row of the slot. */
  template <typename Visitor>
  void VisitRows(int64_t slot, Visitor visit) const {
    for (const Section& section : sections) {
      if (section.row_bytes == 0) continue;
      for (int64_t row = 0; row < rows_per_slot; ++row) {
        visit(RowOffset(section, slot, row), section.row_bytes);
      }
    }
  }
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STORAGE_SLOT_LAYOUT_H_
