// SPDX-License-Identifier: Apache-2.0
/*!
 * \file codec.h
 * \brief The name, revision and sizes of a format of quantized pages.
 *
 * tir_kernels/codec.py defines the formats. Whoever creates a cache passes the sizes, and kernels
 * read and write the bytes.
 */
#ifndef TVM_PAGEDKV_CONFIG_CODEC_H_
#define TVM_PAGEDKV_CONFIG_CODEC_H_

#include <cstdint>
#include <string>

namespace pagedkv {

/*! \brief Sizes of the rows of K, or of those of V. */
struct CodeSizes {
  int64_t row_bytes = 0;    // codes of a row
  int64_t scale_bytes = 0;  // scales of a row

  bool operator==(const CodeSizes& other) const {
    return row_bytes == other.row_bytes && scale_bytes == other.scale_bytes;
  }
};

/*! \brief A page holds the codes of all its rows, K first, then their scales, then padding. */
struct Codec {
  std::string name;  // the kv_dtype by which users choose it
  CodeSizes k, v;    // the same for rows of MLA, which are both
  int64_t page_bytes = 0;
  int64_t revision = 1;  // of the meaning of the bytes

  /*! \brief The name and the revision: rows of another format have another text. */
  std::string Format() const { return name + "." + std::to_string(revision); }

  bool operator==(const Codec& other) const {
    return name == other.name && k == other.k && v == other.v && page_bytes == other.page_bytes &&
           revision == other.revision;
  }
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_CONFIG_CODEC_H_
