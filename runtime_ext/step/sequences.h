// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sequences.h
 * \brief Operations on sequences between steps.
 */
#ifndef TVM_PAGEDKV_STEP_SEQUENCES_H_
#define TVM_PAGEDKV_STEP_SEQUENCES_H_

#include <cstdint>
#include <utility>

#include "state/table/sequence_table.h"
#include "step/step_phase.h"
#include "storage/layer_storage.h"

namespace pagedkv {

class Sequences {
 public:
  /*! \brief All three must outlive this. */
  Sequences(const LayerStorage& storage, SequenceTable* table, const StepPhase& phase)
      : storage_(storage), table_(table), phase_(phase) {}

  // Each throws Error (ValueError) within a step, and what the table throws. Then nothing changes.
  void Clear();
  void Add(int64_t sequence_id);
  void Remove(int64_t sequence_id);
  void Fork(int64_t parent_id, int64_t child_id, int64_t fork_position);
  void PopN(int64_t sequence_id, int64_t count);
  /*! \brief Throws what PopN would throw: workers that share a model ask before one pops. */
  void CheckPop(int64_t sequence_id, int64_t count) const;
  void EnableSlidingWindow(int64_t sequence_id, int64_t window, int64_t num_sinks);

  bool IsEmpty() const { return table_->num_sequences() == 0; }
  /*! \brief The most pages that a next step may take in every group. */
  int64_t NumAvailablePages() const;
  int64_t TotalLength() const { return table_->total_length(); }
  int64_t Length(int64_t sequence_id) const {
    return std::as_const(*table_).At(sequence_id).length;
  }

 private:
  const LayerStorage& storage_;
  SequenceTable* table_;
  const StepPhase& phase_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STEP_SEQUENCES_H_
