// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_value.h
 * \brief The value of a page in a layer group: a header, then the bytes of the page in each layer.
 *
 * The header says which text the page is of, and has a checksum over everything. That of the data
 * is made of checksums of blocks, so that threads can share the work, and each block is still in
 * the CPU's cache when it is copied. A value is a multiple of kValueAlignment; the bytes between
 * its parts are zero. Numbers are little-endian.
 */
#ifndef TVM_PAGEDKV_STATE_HOST_MEMORY_PAGE_VALUE_H_
#define TVM_PAGEDKV_STATE_HOST_MEMORY_PAGE_VALUE_H_

#include <cstdint>

#include "state/host_memory/page_key.h"

namespace pagedkv {

constexpr int64_t kValueAlignment = 64;

/*! \brief The sizes of the values of a layer group. */
class PageValueLayout {
 public:
  /*! \param data_bytes Bytes of a page of all layers of the group. */
  PageValueLayout(int32_t group, int32_t page_size, int64_t data_bytes);

  static constexpr int64_t kBlockBytes = 64 << 10;

  int64_t num_bytes() const { return num_bytes_; }
  int64_t data_offset() const { return header_bytes_; }
  int64_t data_bytes() const { return data_bytes_; }

  /*! \brief Blocks of the data, the last of which may be shorter. */
  int64_t num_blocks() const { return (data_bytes_ + kBlockBytes - 1) / kBlockBytes; }
  /*! \brief The number that a block adds, by exclusive or, to the checksum of the data. */
  uint64_t ChecksumOfBlock(const char* value, int64_t block) const noexcept;
  uint64_t ChecksumOfData(const char* value) const noexcept;

  /*! \brief Writes the header of a value whose data are there, and have this checksum. */
  void Seal(const PageText& text, uint64_t data_checksum, char* value) const noexcept;
  /*! \brief Whether the value is of this text, by its header alone. */
  bool IsOf(const PageText& text, const char* value) const noexcept;
  /*! \brief Whether the header has this key. */
  bool HasKey(const PageKey& key, const char* value) const noexcept;
  /*! \brief Whether the value is whole: its header is of this format and its checksum is right. */
  bool IsWhole(uint64_t data_checksum, const char* value) const noexcept;

 private:
  struct Header;

  int32_t group_;
  int32_t page_size_;
  int64_t data_bytes_;
  int64_t header_bytes_;
  int64_t num_bytes_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_HOST_MEMORY_PAGE_VALUE_H_
