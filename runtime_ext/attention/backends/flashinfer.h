// SPDX-License-Identifier: Apache-2.0
/*!
 * \file flashinfer.h
 * \brief Calls FlashInfer's functions: `plan` once per step and page table, `run` for each layer.
 */
#ifndef TVM_PAGEDKV_ATTENTION_BACKENDS_FLASHINFER_H_
#define TVM_PAGEDKV_ATTENTION_BACKENDS_FLASHINFER_H_

#include <tvm/ffi/any.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <array>
#include <memory>
#include <vector>

#include "attention/attention_call.h"
#include "config/kernels.h"
#include "device/device_memory.h"
#include "device/device_stream.h"
#include "step/step.h"

namespace pagedkv {

/*! \brief Plans and workspaces that the layers of a cache share. */
class FlashInfer {
 public:
  explicit FlashInfer(const Step& step);
  static bool IsNeededBy(const CacheConfig& config);

  /*! \brief Attends over pages: causally with this step's rows, or to all of the past. */
  void AttendToPages(const AttentionCall& call, const StoredLayer& layer, const PageTable& table);
  /*! \brief Attends causally among this step's rows. */
  void AttendToRows(const AttentionCall& call, const StoredLayer& layer, const ffi::Tensor& k,
                    const ffi::Tensor& v);

 private:
  /*! \brief Plans of a group that are alive at the same time. */
  enum Use { kWithStep, kPast, kSelf, kNumUses };

  /*!
   * \brief Pinned memory that `plan` fills. FlashInfer queues its copy to the device, so it must
   * not be filled again before that copy is done.
   */
  struct Staging {
    ffi::Tensor memory;
    std::unique_ptr<DeviceStream> copied;  // done once the copy is; on devices with streams
    bool is_in_flight = false;
  };
  static constexpr size_t kNumStagings = 2;

  /*! \brief A plan: what `plan` returned, and the memory that it refers to. */
  struct Plan {
    int64_t step = 0;                // for which it was made
    ffi::Function made_by{nullptr};  // its `plan` function; null while there is no plan
    ffi::Any info;
    ffi::Tensor int_workspace;
    std::array<Staging, kNumStagings> stagings;
    size_t next_staging = 0;
    std::vector<ffi::Tensor> host_arrays;
  };

  Plan& PlanOf(const StoredLayer& layer, Use use) { return plans_[layer.group * kNumUses + use]; }
  bool IsCurrent(const Plan& plan, const ffi::Function& made_by) const {
    return plan.step == step_.number() && plan.made_by.same_as(made_by);
  }
  /*! \brief Makes room for a new plan. \return Its staging buffer, which no copy reads any more. */
  Staging* Prepare(Plan* plan);
  /*! \brief After `plan`: its copy to the device is queued. */
  void Finish(Plan* plan, Staging* staging, const ffi::Function& made_by);
  const Plan& PlanPrefill(const StoredLayer& layer, KernelName name, Use use);
  const Plan& PlanDecode(const StoredLayer& layer, Use use);
  ffi::Tensor HostArray(Plan* plan, int64_t size);

  const Step& step_;
  DLDevice device_;
  ByteCounter counter_;
  ffi::Tensor float_workspace_;  // scratch of one run
  ffi::Tensor empty_q_;
  std::vector<Plan> plans_;  // [group, Use]
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_ATTENTION_BACKENDS_FLASHINFER_H_
