// SPDX-License-Identifier: Apache-2.0
/*!
 * \file checkpoint_metadata.h
 * \brief What a checkpoint of a sequence says of itself, as JSON, and which caches may read it.
 *
 * A checkpoint is this text and a page group per layer. Nothing in either depends on which pages
 * the sequence had, or on what else was in the cache.
 */
#ifndef TVM_PAGEDKV_CHECKPOINT_CHECKPOINT_METADATA_H_
#define TVM_PAGEDKV_CHECKPOINT_CHECKPOINT_METADATA_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace pagedkv {

/*! \brief Whatever makes the rows of one cache mean something else in another, and nothing more. */
struct CheckpointLayout {
  struct Layer {
    std::string kind;  // "mha", "mha_sliding" or "mla"
    int64_t window = 0;
    int64_t num_kv_heads = 1;
    int64_t qk_head_dim = 0;
    int64_t v_head_dim = 0;
    std::string rope;  // how K was rotated, or will be: RopeText; of MLA layers empty

    bool is_mla() const { return kind == "mla"; }
    std::string Text() const;
  };

  int64_t page_size = 1;
  std::string dtype;  // of the pages
  int64_t item_bytes = 1;
  std::vector<Layer> layers;
  std::string part;  // which layers of the model these are, in words; empty: all

  /*! \brief The layout in words; layouts are compatible where these are equal. */
  std::string Text() const;
  /*! \brief The HexHash of the words. */
  std::string Hash() const;

  int64_t num_layers() const { return static_cast<int64_t>(layers.size()); }
  /*!
   * \brief Shape of a layer's page group: [1, num_pages, 2, num_kv_heads, page_size, head_dim], of
   * an MLA layer [1, num_pages, page_size, head_dim].
   */
  std::vector<int64_t> GroupShape(int64_t layer, int64_t num_pages) const;
  int64_t PageBytes(int64_t layer) const;
};

/*!
 * \brief How a layer's K is rotated, in words.
 * \param mode "none", "normal" or "inline".
 * \param details What beside theta and scale decides it; may be empty.
 */
std::string RopeText(const std::string& mode, double theta, double scale,
                     const std::string& details);

/*! \brief 16 hex digits: a name for the bytes, which does not protect them. */
std::string HexHash(const std::string& bytes);

/*! \brief What a cache must know of a sequence beside the content of its pages. */
struct SequenceState {
  int64_t length = 0;
  std::vector<int64_t> first_pages;  // [layer] pages that have slid out of the layer's window
};

/*! \brief The metadata of sequence `sequence_id`. */
std::string WriteMetadata(const CheckpointLayout& layout, int64_t sequence_id,
                          const SequenceState& state);

/*!
 * \brief Reads metadata of a cache with this layout, ours or one of apache-tvm.
 * \throws Error (ValueError) unless it is complete and agrees with the layout and with itself.
 */
SequenceState ReadMetadata(std::string_view text, const CheckpointLayout& layout);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_CHECKPOINT_CHECKPOINT_METADATA_H_
