// SPDX-License-Identifier: Apache-2.0
/*!
 * \file flashinfer_backend.h
 * \brief Calls FlashInfer's functions: `plan` once a step for each page table, `run` for each
 * layer.
 */
#ifndef TVM_PAGEDKV_ATTENTION_FLASHINFER_BACKEND_H_
#define TVM_PAGEDKV_ATTENTION_FLASHINFER_BACKEND_H_

#include <tvm/ffi/any.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <array>
#include <memory>
#include <vector>

#include "attention/layer_call.h"
#include "config/cache_config.h"
#include "config/kernels.h"
#include "device/device_memory.h"
#include "state/forward_plan.h"

namespace pagedkv {

/*! \brief The pages of a layer, and the page table of its group. */
struct FlashInferPages {
  const ffi::Tensor& pages;  // [num_pages, 2, num_kv_heads, page_size, head_dim]
  const ffi::Tensor& indptr;
  const ffi::Tensor& values;
  const ffi::Tensor& last_page_lengths;
};

class FlashInferBackend {
 public:
  FlashInferBackend(const CacheConfig& config, size_t num_groups, ByteCounter counter);
  static bool IsNeededBy(const CacheConfig& config);

  /*! \brief Forgets the plans of the last step; new ones are made when a layer first asks. */
  void BeginStep();

  /*! \brief Attends over pages: causally with this step's rows, or to all of the past. */
  void Paged(const LayerCall& call, PageRange range, const ffi::Tensor& query_indptr,
             const FlashInferPages& table);
  /*! \brief Attends causally among this step's rows. */
  void Ragged(const LayerCall& call, const ffi::Tensor& query_indptr, const ffi::Tensor& k,
              const ffi::Tensor& v);

 private:
  /*! \brief Plans of a group that are alive at the same time. */
  enum Use { kWithStep, kPast, kSelf, kNumUses };

  /*!
   * \brief Page-locked memory that FlashInfer fills, and copies to the device with a later call of
   * its own: it must not be filled again before that copy is done.
   */
  struct Staging {
    ffi::Tensor memory;
    std::unique_ptr<DeviceStream> copied;  // done once the copy is; where the device has streams
    bool is_in_flight = false;
  };
  static constexpr size_t kNumStagings = 2;

  /*! \brief A plan: what `plan` returned, and the memory that it refers to. */
  struct Plan {
    ffi::Function made_by{nullptr};  // null: not made in this step
    ffi::Any info;
    ffi::Tensor int_workspace;
    std::array<Staging, kNumStagings> stagings;
    size_t next_staging = 0;
    std::vector<ffi::Tensor> host_arrays;
  };

  /*! \brief Makes room for a new plan. \return Its staging buffer, which nothing reads any more. */
  Staging* Prepare(Plan* plan);
  /*! \brief The plan has been made: its copy to the device is queued. */
  void NoteCopy(Staging* staging);
  const Plan& PlanPrefill(const LayerCall& call, KernelName name, Use use);
  const Plan& PlanDecode(const LayerCall& call, Use use);
  ffi::Tensor HostArray(Plan* plan, int64_t size);

  DLDevice device_;
  int64_t page_size_;
  ByteCounter counter_;
  ffi::Tensor float_workspace_;  // scratch of one run
  ffi::Tensor empty_q_, empty_kv_;
  std::vector<Plan> plans_;  // [num_groups, kNumUses]
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_ATTENTION_FLASHINFER_BACKEND_H_
