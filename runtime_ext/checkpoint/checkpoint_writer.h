// SPDX-License-Identifier: Apache-2.0
/*!
 * \file checkpoint_writer.h
 * \brief Sequences out of a cache: metadata and page groups.
 */
#ifndef TVM_PAGEDKV_CHECKPOINT_CHECKPOINT_WRITER_H_
#define TVM_PAGEDKV_CHECKPOINT_CHECKPOINT_WRITER_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/page_groups.h"
#include "step/step.h"

namespace pagedkv {

class CheckpointWriter {
 public:
  /*! \brief All must outlive this. */
  CheckpointWriter(Step* step, const SequenceTable& table, const PageGroups& page_groups)
      : step_(step), table_(table), page_groups_(page_groups) {}

  /*! \brief Caches with the same hash can exchange checkpoints. */
  std::string LayoutHash() const { return page_groups_.layout().Hash(); }
  /*! \throws Error (ValueError) where there can be no checkpoint of the sequence as it is now. */
  std::string Metadata(int64_t sequence_id) const { return MetadataWith(sequence_id, false); }
  /*!
   * \brief The same, of a checkpoint that may have a history.
   * \param with_history Whether page groups begin with the pages by which forks and pops reach
   *   further back: those that the sequence has given up, as far as they are cached without a gap.
   */
  std::string MetadataWith(int64_t sequence_id, bool with_history) const;
  /*! \brief The pages of a page group of such a checkpoint, in order of position. */
  std::vector<int64_t> PagesWith(int64_t sequence_id, int64_t page_group, bool with_history) const;
  /*! \param out Written; its shape is that of CheckpointLayout::GroupShape. No history. */
  void ExportPageGroup(int64_t sequence_id, int64_t page_group, ffi::Tensor out) const;
  /*!
   * \brief Any pages of a page group, for checkpoints of several sequences that share pages.
   * \param num_slots Slots in use of each page; the others become zero in `out`.
   */
  void ExportPages(int64_t page_group, IntSpan pages, IntSpan num_slots, ffi::Tensor out) const;

 private:
  SequenceState StateOf(const Sequence& sequence, bool with_history) const;
  std::vector<int64_t> PagesOf(const Sequence& sequence, const PageGroup& group,
                               bool with_history) const;

  Step* step_;
  const SequenceTable& table_;
  const PageGroups& page_groups_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_CHECKPOINT_CHECKPOINT_WRITER_H_
