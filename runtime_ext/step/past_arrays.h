// SPDX-License-Identifier: Apache-2.0
/*!
 * \file past_arrays.h
 * \brief Page tables without the rows of the step, for cross_attention.
 */
#ifndef TVM_PAGEDKV_STEP_PAST_ARRAYS_H_
#define TVM_PAGEDKV_STEP_PAST_ARRAYS_H_

#include <tvm/ffi/container/tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "config/cache_config.h"
#include "device/aux_data.h"
#include "state/plans/forward_plan.h"
#include "state/plans/plan_arrays.h"
#include "step/page_table.h"

namespace pagedkv {

/*! \brief Made when a layer first asks for them in a step. */
class PastArrays {
 public:
  PastArrays(const CacheConfig& config, const SequenceTable& table, const ForwardPlan& plan,
             const ByteCounter& counter);

  void BeginStep() { is_filled_ = false; }
  PageTable page_table(int32_t group);
  /*! \brief Like StepArrays::tree_order, but no row sees the nodes of this step. */
  const ffi::Tensor& tree_order();

  /*! \brief Null until a layer has asked for any. */
  const AuxData* data() const { return arrays_.get(); }

 private:
  enum Array { kPageIndptr, kPageIds, kLengths, kNumArrays };
  static size_t Index(int32_t group, Array array) { return 1 + group * kNumArrays + array; }
  void FillOnce();

  const CacheConfig& config_;
  const SequenceTable& table_;
  const ForwardPlan& plan_;
  PlanArrays plan_arrays_;
  ByteCounter counter_;
  std::vector<int64_t> sizes_;
  std::unique_ptr<AuxData> arrays_;
  bool is_filled_ = false;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STEP_PAST_ARRAYS_H_
