// SPDX-License-Identifier: Apache-2.0
/*!
 * \file step.h
 * \brief One forward step of the cache: its plan, arrays, workspaces, stream, and what layers did.
 */
#ifndef TVM_PAGEDKV_STEP_STEP_H_
#define TVM_PAGEDKV_STEP_STEP_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "device/device_stream.h"
#include "device/tensor_checks.h"
#include "state/plans/forward_plan.h"
#include "step/page_bounds.h"
#include "step/past_arrays.h"
#include "step/scratch.h"
#include "step/step_arrays.h"
#include "step/step_phase.h"
#include "step/workspaces.h"
#include "storage/layer_storage.h"
#include "storage/page_copier.h"

namespace pagedkv {

/*! \brief Pages that the attention of one layer of each group reads. */
struct PagesRead {
  int64_t with_sharing = 0;
  int64_t without_sharing = 0;  // if no page were read once for several sequences
};

class Step {
 public:
  /*! \brief All three must outlive the step. */
  Step(const LayerStorage& storage, SequenceTable* table, PageCopier* copier);

  /*!
   * \brief Begins a step in which each sequence appends rows.
   * \param tree_parents For each row its parent among the nodes of the sequence's token tree; none
   *   where rows are committed at once.
   * \throws Error (ValueError, KeyError, CacheFullError); then nothing has changed.
   */
  void Begin(IntSpan sequence_ids, IntSpan append_lengths, std::optional<IntSpan> tree_parents,
             std::optional<IntSpan> spans = std::nullopt);
  /*! \brief Ends the step. Where a layer has not appended its rows, the sequences keep them, but
   * nobody else gets them. */
  void End();
  /*! \brief Ends the step as if it had never begun: what layers have appended is dropped. */
  void Abort();
  /*! \brief Whether every layer has appended its K and V in this step. */
  bool IsWritten() const;
  /*! \brief Ids of the layers that have not appended their K and V in this step. */
  std::vector<int64_t> MissingLayers() const;
  bool IsInForward() const { return phase_.is_in_forward(); }
  /*! \brief The position by which the model rotates each row, int32 [T]. */
  ffi::Tensor QueryPositions() const;
  /*! \brief Reads every shared page once, whether or not that saves time. */
  void ShareEveryPrefix();

  /*! \brief A call of a layer: kernels run, on a stream that is in order with the cache's. */
  class LayerCall {
   public:
    /*! \throws Error (ValueError) outside a step and within another such call. */
    LayerCall(Step* step, const char* what)
        : attending_(&step->phase_, what),
          on_stream_(&step->stream_order_),
          lending_(&step->scratch_) {}

   private:
    StepPhase::Attending attending_;
    StreamOrder::Call on_stream_;
    Scratch::Lending lending_;
  };

  void NoteAppend(const StoredLayer& layer) {
    last_append_[layer.index] = number_;
    if (bounds_.Has(layer)) bounds_.NoteAppend(layer, arrays_.slots(layer.group));
  }
  bool HasAppended(const StoredLayer& layer) const { return last_append_[layer.index] == number_; }

  /*! \brief Counts from 1; steps that fail to begin have none. */
  int64_t number() const { return number_; }
  const LayerStorage& storage() const { return storage_; }
  const ForwardPlan& plan() const { return plan_; }
  Sequence* SequenceToRecord(int64_t i) { return plan_.SequenceToRecord(i); }
  const StepArrays& arrays() const { return arrays_; }
  PastArrays& past() { return past_; }
  const PastArrays& past() const { return past_; }
  const Workspaces& workspaces() const { return workspaces_; }
  PageBounds& bounds() { return bounds_; }
  const Scratch& scratch() const { return scratch_; }
  StepPhase& phase() { return phase_; }
  StreamOrder& stream_order() { return stream_order_; }
  TensorChecks& tensors() { return tensors_; }
  const TensorChecks& tensors() const { return tensors_; }
  const PagesRead& step_pages_read() const { return step_pages_read_; }
  const PagesRead& pages_read() const { return pages_read_; }

 private:
  void RequireTreeKernels() const;
  void RequireSpanKernels() const;
  void CountPagesRead();

  const LayerStorage& storage_;
  PageCopier* copier_;
  StreamOrder stream_order_;
  StepPhase phase_;
  TensorChecks tensors_;
  ForwardPlan plan_;
  Workspaces workspaces_;
  Scratch scratch_;
  StepArrays arrays_;
  PastArrays past_;
  PageBounds bounds_;
  int64_t number_ = 0;
  std::vector<int64_t> last_append_;  // [layer] number of the step
  PagesRead step_pages_read_, pages_read_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STEP_STEP_H_
