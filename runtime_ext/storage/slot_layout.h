// SPDX-License-Identifier: Apache-2.0
/*!
 * \file slot_layout.h
 * \brief The location of a slot's rows in the pages of a layer.
 *
 * A layer with K and V has pages [num_pages, 2, num_kv_heads, page_size, head_dim], an MLA layer
 * [num_pages, page_size, head_dim]. Where K and V have two widths, a page is flat: the rows of K,
 * then those of V. A slot holds one token: a row of K and one of V for each head,
 * or the latent row. So the rows of a slot are `page_size` rows apart.
 *
 * Quantized pages have sections of that form, the codes of the rows and their scales, and then
 * padding; where K and V have rows of other sizes, one for the codes and one for the scales of
 * each.
 */
#ifndef TVM_PAGEDKV_STORAGE_SLOT_LAYOUT_H_
#define TVM_PAGEDKV_STORAGE_SLOT_LAYOUT_H_

#include <array>
#include <cstdint>

#include "config/codec.h"

namespace pagedkv {

struct SlotLayout {
  struct Section {
    int64_t begin;  // byte offset in a page
    int64_t row_bytes;
    int64_t first_row = 0;  // of a slot
    int64_t num_rows = 0;   // of a slot; 0: the pages have no such section

    int64_t end_row() const { return first_row + num_rows; }
  };

  int64_t page_size;      // slots
  int64_t rows_per_slot;  // 2 * num_kv_heads: K of each head, then V; 1 for MLA
  int64_t page_bytes;
  std::array<Section, 4> sections;

  /*! \brief Pages that hold nothing but rows. */
  static SlotLayout Plain(int64_t page_size, int64_t rows_per_slot, int64_t row_bytes) {
    const int64_t page_bytes = page_size * rows_per_slot * row_bytes;
    return {page_size, rows_per_slot, page_bytes, {{{0, row_bytes, 0, rows_per_slot}}}};
  }
  /*! \brief Pages with the rows of K of each head, then those of V, which have another width. */
  static SlotLayout TwoWidths(int64_t page_size, int64_t num_kv_heads, int64_t k_bytes,
                              int64_t v_bytes) {
    const int64_t num_rows = page_size * num_kv_heads;
    return {page_size,
            2 * num_kv_heads,
            num_rows * (k_bytes + v_bytes),
            {{{0, k_bytes, 0, num_kv_heads},
              {num_rows * k_bytes, v_bytes, num_kv_heads, num_kv_heads}}}};
  }
  /*! \brief Pages of codes, then scales, then padding. */
  static SlotLayout Quantized(int64_t page_size, int64_t rows_per_slot, const Codec& codec) {
    const CodeSizes &k = codec.k, &v = codec.v;
    if (k == v) {
      const int64_t codes_end = page_size * rows_per_slot * k.row_bytes;
      return {page_size,
              rows_per_slot,
              codec.page_bytes,
              {{{0, k.row_bytes, 0, rows_per_slot}, {codes_end, k.scale_bytes, 0, rows_per_slot}}}};
    }
    const int64_t half = rows_per_slot / 2, rows = half * page_size;
    const int64_t codes_of_v = rows * k.row_bytes, scales_of_k = codes_of_v + rows * v.row_bytes;
    return {page_size,
            rows_per_slot,
            codec.page_bytes,
            {{{0, k.row_bytes, 0, half},
              {codes_of_v, v.row_bytes, half, half},
              {scales_of_k, k.scale_bytes, 0, half},
              {scales_of_k + rows * k.scale_bytes, v.scale_bytes, half, half}}}};
  }

  int64_t slot_bytes() const {
    int64_t num_bytes = 0;
    for (const Section& section : sections) num_bytes += section.num_rows * section.row_bytes;
    return num_bytes;
  }
  /*! \brief Bytes of a page before its padding. */
  int64_t used_bytes() const { return page_size * slot_bytes(); }
  /*! \brief Byte offset of a row of a slot, one of the section. Slots count from the first page on.
   */
  int64_t RowOffset(const Section& section, int64_t slot, int64_t row) const {
    const int64_t index = (row - section.first_row) * page_size + slot % page_size;
    return slot / page_size * page_bytes + section.begin + index * section.row_bytes;
  }
  /*! \brief Calls visit(offset, num_bytes) for each run of bytes that holds a row of the slot. */
  template <typename Visitor>
  void VisitRows(int64_t slot, Visitor visit) const {
    for (const Section& section : sections) {
      for (int64_t row = section.first_row; row < section.end_row(); ++row) {
        visit(RowOffset(section, slot, row), section.row_bytes);
      }
    }
  }
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STORAGE_SLOT_LAYOUT_H_
