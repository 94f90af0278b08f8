// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_value.cc
 * \brief The value of a page in a layer group.
 */
#include "state/host_memory/page_value.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "base/checksum.h"

namespace pagedkv {

namespace {

constexpr char kMagic[8] = {'p', 'a', 'g', 'e', 'd', 'k', 'v', '\0'};

int64_t Align(int64_t num_bytes) {
  return (num_bytes + kValueAlignment - 1) / kValueAlignment * kValueAlignment;
}

}  // namespace

struct PageValueLayout::Header {
  char magic[8];
  uint64_t checksum;  // of all bytes but these and those before
  uint32_t revision;
  uint32_t group;
  uint64_t num_bytes;
  uint64_t data_bytes;
  uint32_t header_bytes;
  uint32_t num_tokens;
  PageKey key;
  PageKey parent;
  // The token ids follow.

  /*! \brief All but what the text and the data decide. */
  static Header Of(const PageValueLayout& layout) {
    // The bytes of this struct are those of a value, which other machines read.
    static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
    static_assert(std::is_trivially_copyable_v<Header> && sizeof(Header) == 112);
    static_assert(offsetof(Header, checksum) == 8 && offsetof(Header, revision) == 16);
    static_assert(offsetof(Header, num_bytes) == 24 && offsetof(Header, header_bytes) == 40);
    static_assert(offsetof(Header, key) == 48 && offsetof(Header, parent) == 80);
    Header header{};
    std::memcpy(header.magic, kMagic, sizeof(kMagic));
    header.revision = kValueRevision;
    header.group = static_cast<uint32_t>(layout.group_);
    header.num_bytes = static_cast<uint64_t>(layout.num_bytes_);
    header.data_bytes = static_cast<uint64_t>(layout.data_bytes_);
    header.header_bytes = static_cast<uint32_t>(layout.header_bytes_);
    header.num_tokens = static_cast<uint32_t>(layout.page_size_);
    return header;
  }
  static uint64_t ChecksumOf(const PageValueLayout& layout, uint64_t data_checksum,
                             const char* value) {
    constexpr int64_t kBegin = sizeof(magic) + sizeof(checksum);
    const int64_t data_end = layout.header_bytes_ + layout.data_bytes_;
    const uint64_t of_header =
        Checksum(value + kBegin, layout.header_bytes_ - kBegin, data_checksum);
    return Checksum(value + data_end, layout.num_bytes_ - data_end, of_header);
  }
};

PageValueLayout::PageValueLayout(int32_t group, int32_t page_size, int64_t data_bytes)
    : group_(group),
      page_size_(page_size),
      data_bytes_(data_bytes),
      header_bytes_(Align(sizeof(Header) + page_size * sizeof(int32_t))),
      num_bytes_(header_bytes_ + Align(data_bytes)) {}

uint64_t PageValueLayout::ChecksumOfBlock(const char* value, int64_t block) const noexcept {
  const int64_t begin = block * kBlockBytes;
  // The seed makes blocks that changed places damage.
  return Checksum(value + header_bytes_ + begin, std::min(kBlockBytes, data_bytes_ - begin), block);
}

uint64_t PageValueLayout::ChecksumOfData(const char* value) const noexcept {
  uint64_t checksum = 0;
  for (int64_t i = 0; i < num_blocks(); ++i) checksum ^= ChecksumOfBlock(value, i);
  return checksum;
}

void PageValueLayout::Seal(const PageText& text, uint64_t data_checksum,
                           char* value) const noexcept {
  Header header = Header::Of(*this);
  header.key = text.key;
  header.parent = text.parent;
  const size_t token_bytes = page_size_ * sizeof(int32_t);
  std::memset(value, 0, header_bytes_);
  std::memcpy(value + sizeof(header), text.tokens.data, token_bytes);
  std::memset(value + header_bytes_ + data_bytes_, 0, num_bytes_ - header_bytes_ - data_bytes_);
  std::memcpy(value, &header, sizeof(header));
  header.checksum = Header::ChecksumOf(*this, data_checksum, value);
  std::memcpy(value, &header, sizeof(header));
}

bool PageValueLayout::IsOf(const PageText& text, const char* value) const noexcept {
  Header header;
  std::memcpy(&header, value, sizeof(header));
  return header.key == text.key && header.parent == text.parent && text.tokens.size == page_size_ &&
         std::memcmp(value + sizeof(header), text.tokens.data, page_size_ * sizeof(int32_t)) == 0;
}

bool PageValueLayout::HasKey(const PageKey& key, const char* value) const noexcept {
  return std::memcmp(value + offsetof(Header, key), key.data(), key.size()) == 0;
}

bool PageValueLayout::IsWhole(uint64_t data_checksum, const char* value) const noexcept {
  Header header, expected = Header::Of(*this);
  std::memcpy(&header, value, sizeof(header));
  expected.checksum = header.checksum;
  expected.key = header.key;
  expected.parent = header.parent;
  return std::memcmp(&header, &expected, sizeof(header)) == 0 &&
         header.checksum == Header::ChecksumOf(*this, data_checksum, value);
}

}  // namespace pagedkv
