// SPDX-License-Identifier: Apache-2.0
/*!
 * \file checkpoint_layout.h
 * \brief What two caches must have in common to exchange sequences.
 */
#ifndef TVM_PAGEDKV_CHECKPOINT_CHECKPOINT_LAYOUT_H_
#define TVM_PAGEDKV_CHECKPOINT_CHECKPOINT_LAYOUT_H_

#include <cstdint>
#include <string>
#include <vector>

namespace pagedkv {

/*! \brief Everything that two caches must have in common to exchange rows, and nothing more. */
struct CheckpointLayout {
  struct Layer {
    std::string kind;  // as ToString(LayerConfig)
    int64_t window = 0;
    int64_t num_kv_heads = 1;
    int64_t qk_head_dim = 0;
    int64_t v_head_dim = 0;
    std::string rope;      // how K is rotated, as RopeText; empty for MLA layers
    std::string kv_dtype;  // how the pages keep rows: a type of numbers, or Codec::Format
    int64_t item_bytes = 1;
    int64_t codec_page_bytes = 0;  // of a page of codes and scales; 0 without a codec
    std::string kv_scales = {};    // the HexHash of static scales; a row has other codes by its own
    // Of recurrent layers and short convolutions, whose rows have a width of `qk_head_dim`.
    std::string details = {};  // their shape, as text
    int64_t interval = 0;      // positions from one kept state to the next; 0: no states
    std::vector<int64_t> state_shape = {};  // [num_heads, key_dim, value_dim]
    std::string state_dtype = "float32";
    int64_t state_item_bytes = 4;

    bool is_attention() const { return details.empty(); }
    bool has_one_row() const { return kind == "mla" || !is_attention(); }
    /*! \brief Type of the elements of a page group. */
    std::string GroupDtype() const { return codec_page_bytes ? "uint8" : kv_dtype; }
    std::string Text() const;
  };

  int64_t page_size = 1;
  std::vector<Layer> layers;
  std::string part;  // which layers of the model these are, as text; empty for all

  /*! \brief The layout as text. Layouts with the same text are compatible. */
  std::string Text() const;
  /*! \brief The kv_dtype of all layers: "int8.1", or "2 x int8.1, 1 x float16" where they differ.
   */
  std::string Types() const;
  /*! \brief The HexHash of the text. */
  std::string Hash() const;

  int64_t num_layers() const { return static_cast<int64_t>(layers.size()); }
  /*! \brief The layers of which each page group is: all of them, then those that have states. */
  std::vector<int64_t> LayersOfGroups() const;
  /*!
   * \brief Shape of a layer's page group: [1, num_pages, 2, num_kv_heads, page_size, head_dim], of
   * layers with one row in a slot [1, num_pages, page_size, head_dim], with a codec
   * [1, num_pages, page_bytes].
   */
  std::vector<int64_t> GroupShape(int64_t layer, int64_t num_pages) const;
  /*! \brief Shape of the page group of a layer's states, of its `state_dtype`. */
  std::vector<int64_t> StatesShape(int64_t layer, int64_t num_pages) const;
  int64_t PageBytes(int64_t layer) const;
};

/*!
 * \brief The rotation of a layer's K, as text.
 * \param mode "none", "normal" or "inline".
 * \param details Parameters other than theta and scale; may be empty.
 */
std::string RopeText(const std::string& mode, double theta, double scale,
                     const std::string& details);

/*! \brief A 64-bit hash as 16 hex digits. Not cryptographic. */
std::string HexHash(const std::string& bytes);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_CHECKPOINT_CHECKPOINT_LAYOUT_H_
