// SPDX-License-Identifier: Apache-2.0
/*!
 * \file checkpoint_reader.h
 * \brief Sequences into a cache, in a transaction.
 *
 * Prepare checks everything and takes the pages. The page groups follow in any order. Finish makes
 * the sequence usable once all are there. Until then it can only be removed, and everything else in
 * the cache works as ever. An import of several sequences brings the pages that they share once.
 */
#ifndef TVM_PAGEDKV_CHECKPOINT_CHECKPOINT_READER_H_
#define TVM_PAGEDKV_CHECKPOINT_CHECKPOINT_READER_H_

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/optional.h>

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/page_groups.h"
#include "state/table/sequence_imports.h"
#include "step/step.h"

namespace pagedkv {

class CheckpointReader {
 public:
  /*! \brief All must outlive this. */
  CheckpointReader(Step* step, SequenceTable* table, const PageGroups& page_groups)
      : step_(step), table_(table), imports_(table), page_groups_(page_groups) {}

  /*! \throws Error (ValueError, CacheFullError); then nothing has changed, as in all of these. */
  void Prepare(int64_t sequence_id, const std::string& metadata);
  /*!
   * \brief One import of several sequences.
   * \param page_numbers For each sequence and pool, indices into the pages of the import.
   */
  void PrepareMany(IntSpan sequence_ids, const std::vector<std::string>& metadata,
                   const std::vector<std::vector<std::vector<int64_t>>>& page_numbers);
  /*! \brief All pages of a page group. */
  void ImportPageGroup(int64_t sequence_id, int64_t page_group, ffi::Tensor data);
  /*! \brief The next pages of a page group. */
  void ImportPages(int64_t sequence_id, int64_t page_group, ffi::Tensor data);
  /*!
   * \brief The next pages of a layer as rows, which the layer rounds to its own type.
   * \param k [num_rows, num_kv_heads, head_dim] of LayerStorage::RowDtype, a multiple of the page
   *   size; of MLA layers [num_rows, head_dim].
   * \param v As k; None for MLA layers.
   */
  void ImportRows(int64_t sequence_id, int64_t layer, ffi::Tensor k, ffi::Optional<ffi::Tensor> v);
  /*! \throws Error (ValueError) while pages are missing. */
  void Finish(int64_t sequence_id);

 private:
  /*! \brief The ids of the next num_pages pages of a page group; -1 for those left out. */
  std::vector<int64_t> NextPages(const SequenceImport& import, int64_t page_group,
                                 int64_t num_pages) const;
  ImportedSequence ImportedFrom(int64_t sequence_id, const std::string& metadata) const;

  Step* step_;
  SequenceTable* table_;
  SequenceImports imports_;
  const PageGroups& page_groups_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_CHECKPOINT_CHECKPOINT_READER_H_
