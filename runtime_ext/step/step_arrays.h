// SPDX-License-Identifier: Apache-2.0
/*!
 * \file step_arrays.h
 * \brief The int32 arrays of a step, as kernels take them.
 *
 * Some are common to all layer groups, some belong to a group, and some to the shared segments of a
 * group (see shared_prefix.h). All lie in one AuxData, so one copy brings them to the device. In
 * shapes, B is the number of sequences of the step and T the number of its rows.
 */
#ifndef TVM_PAGEDKV_STEP_STEP_ARRAYS_H_
#define TVM_PAGEDKV_STEP_STEP_ARRAYS_H_

#include <tvm/ffi/container/tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "config/cache_config.h"
#include "device/aux_data.h"
#include "state/plans/forward_plan.h"
#include "state/plans/plan_arrays.h"
#include "step/page_table.h"

namespace pagedkv {

/*! \brief The arrays of PlanArrays::StateArrays. */
enum class StateArray {
  kSegmentIndptr,
  kRowIndptr,
  kSlots,
  kRows,
  kReadPages,
  kWritePages,
  kNumArrays
};

class StepArrays {
 public:
  /*! \param num_taps Of each group, see LayerStorage::NumTaps. */
  StepArrays(const CacheConfig& config, const SequenceTable& table, const ForwardPlan& plan,
             std::vector<int64_t> num_taps, const ByteCounter& counter);

  /*! \brief Lays the arrays out for the plan's step, writes them and copies them to the device. */
  void Fill();

  const ffi::Tensor& query_indptr() const { return common(kQueryIndptr); }        // [B + 1]
  const ffi::Tensor& query_positions() const { return common(kQueryPositions); }  // [T]
  /*!
   * \brief The position by which each row's Q and K are rotated before K is written, [T].
   *
   * K stays as it was rotated when a window slides, so this counts the positions that windows of
   * sequences have dropped as well, unless kernels rotate when they read (inline).
   */
  const ffi::Tensor& rope_positions() const {
    return common(counts_text() ? kTextPositions : kQueryPositions);
  }
  const ffi::Tensor& past_lengths() const { return common(kPastLengths); }  // [B]
  /*! \brief How many columns behind its own each row sees, [T], where the step has spans. */
  const ffi::Tensor& row_reach() const { return common(kRowReach); }
  const ffi::Tensor& tree_order_indptr() const { return common(kTreeOrderIndptr); }  // [B + 1]
  const ffi::Tensor& tree_order() const { return common(kTreeOrder); }
  /*! \brief The slot of every row, [T]. */
  const ffi::Tensor& slots(int32_t group) const { return view(group, kSlots); }
  /*! \brief The slots of the rows before each row, see PlanArrays::FillTaps, [T, num_taps]. */
  ffi::Tensor taps(int32_t group) const {
    return arrays_.Matrix(TapIndex(group), plan_.num_rows(), num_taps_[group]);
  }
  /*! \brief See PlanArrays::StateArrays. */
  const ffi::Tensor& states(int32_t state_group, StateArray array) const {
    return arrays_.view(StateIndex(state_group, array));
  }
  /*! \brief The offset from a slot of the page table to its position, [B]. */
  const ffi::Tensor& first_positions(int32_t group) const { return view(group, kFirstPositions); }
  PageTable page_table(int32_t group) const;
  int64_t num_page_ids(int32_t group) const { return sizes_[Index(group, kPageIds)]; }
  const ffi::Tensor& segment(int32_t group, SegmentArray array) const {
    return arrays_.view(SegmentIndex(group, array));
  }

  bool is_merged() const { return arrays_.is_merged(); }
  const AuxData& data() const { return arrays_; }
  /*! \brief Whether rows are rotated by text positions, so that these are needed. */
  bool counts_text() const { return plan_.has_windows() && !is_inline_; }

 private:
  enum CommonArray {
    kTreeOrder,  // its rows are pairs
    kTreeOrderIndptr,
    kQueryIndptr,
    kQueryPositions,
    kTextPositions,
    kPastLengths,
    kRowReach,
    kNumCommonArrays
  };
  enum GroupArray { kPageIndptr, kPageIds, kLengths, kFirstPositions, kSlots, kNumGroupArrays };

  std::vector<int64_t> InitialSizes(const CacheConfig& config) const;
  static size_t Index(int32_t group, GroupArray array) {
    return kNumCommonArrays + group * kNumGroupArrays + array;
  }
  size_t StateIndex(int32_t state_group, StateArray array) const {
    constexpr auto kNumArrays = static_cast<int32_t>(StateArray::kNumArrays);
    return Index(num_groups_, GroupArray{}) + state_group * kNumArrays + static_cast<size_t>(array);
  }
  /*! \brief Of a group with taps; with num_groups_, the index behind all taps. */
  size_t TapIndex(int32_t group) const {
    const auto end = num_taps_.begin() + group;
    const auto num_before =
        std::count_if(num_taps_.begin(), end, [](int64_t num_taps) { return num_taps > 0; });
    return StateIndex(table_.num_state_groups(), StateArray{}) + static_cast<size_t>(num_before);
  }
  size_t SegmentIndex(int32_t group, SegmentArray array) const {
    constexpr auto kNumArrays = static_cast<int32_t>(SegmentArray::kNumArrays);
    return TapIndex(num_groups_) + group * kNumArrays + static_cast<size_t>(array);
  }
  const ffi::Tensor& common(CommonArray array) const { return arrays_.view(array); }
  const ffi::Tensor& view(int32_t group, GroupArray array) const {
    return arrays_.view(Index(group, array));
  }
  void SetSizes();
  void SetSegmentSizes();
  void Write();
  void WriteSegments();

  const SequenceTable& table_;
  const ForwardPlan& plan_;
  PlanArrays plan_arrays_;
  int32_t num_groups_;
  std::vector<int64_t> num_taps_;  // [group]
  bool is_inline_;                 // whether a layer has RoPE mode "inline"
  std::vector<int64_t> sizes_;     // rows of each array
  AuxData arrays_;
  bool has_segments_ = false;  // in this step
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STEP_STEP_ARRAYS_H_
