// SPDX-License-Identifier: Apache-2.0
/*!
 * \file flashinfer.cc
 * \brief The argument lists of FlashInfer's functions, as apache-tvm 0.27 calls them.
 */
#include "attention/backends/flashinfer.h"

#include <utility>

#include "state/plans/plan_arrays.h"

namespace pagedkv {

namespace {

constexpr DLDevice kHost{kDLCPU, 0};
// The sizes of the cache inside apache-tvm.
constexpr int64_t kFloatWorkspaceBytes = int64_t{768} << 20;
constexpr int64_t kIntWorkspaceBytes = int64_t{8} << 20;
constexpr KernelName kKernels[] = {KernelName::kPrefillRagged, KernelName::kPrefill,
                                   KernelName::kDecode};

// What FlashInfer calls these numbers.
constexpr int64_t kLayoutNHD = 0, kLayoutHND = 1;
constexpr int64_t kMaskNone = 0, kMaskCausal = 1;
constexpr int64_t kNoWindow = -1;
constexpr bool kHasCudaGraph = false;
constexpr bool kHasProgrammaticLaunch = false;

PageRange RangeOf(bool is_past) { return is_past ? PageRange::kPast : PageRange::kWithStep; }

int32_t* Data(const ffi::Tensor& tensor) { return static_cast<int32_t*>(tensor.data_ptr()); }

/*! \brief K or V of every page: [num_pages, num_kv_heads, page_size, head_dim], strided. */
ffi::Tensor Plane(const ffi::Tensor& pages, int64_t plane) {
  ffi::ShapeView shape = pages.shape(), strides = pages.strides();
  const int64_t plane_shape[] = {shape[0], shape[2], shape[3], shape[4]};
  const int64_t plane_strides[] = {strides[0], strides[2], strides[3], strides[4]};
  return pages.as_strided(ffi::ShapeView(plane_shape, 4), ffi::ShapeView(plane_strides, 4),
                          plane * strides[1]);
}

}  // namespace

FlashInfer::FlashInfer(const Step& step)
    : step_(step),
      device_(step.storage().device()),
      counter_(step.storage().counter()),
      float_workspace_(AllocateTensor({kFloatWorkspaceBytes}, kByte, device_, counter_)),
      empty_q_(AllocateTensor({0}, step.storage().config().dtype, kHost, counter_)),
      plans_(step.storage().num_groups() * kNumUses) {}

bool FlashInfer::IsNeededBy(const CacheConfig& config) {
  for (const KernelSet& kernels : config.kernel_sets) {
    for (KernelName name : kKernels) {
      if (kernels.IsFlashInfer(name)) return true;
    }
  }
  return false;
}

FlashInfer::Staging* FlashInfer::Prepare(Plan* plan) {
  plan->made_by = ffi::Function(nullptr);
  plan->host_arrays.clear();
  if (!plan->int_workspace.defined()) {
    plan->int_workspace = AllocateTensor({kIntWorkspaceBytes}, kByte, device_, counter_);
  }
  const size_t num_stagings = HasStreams(device_) ? kNumStagings : 1;
  Staging* staging = &plan->stagings[plan->next_staging];
  plan->next_staging = (plan->next_staging + 1) % num_stagings;
  if (!staging->memory.defined()) {
    staging->memory = AllocateTensor({kIntWorkspaceBytes}, kByte, StagingDevice(device_), counter_);
  }
  if (staging->is_in_flight) Synchronize(device_, staging->copied->get());
  staging->is_in_flight = false;
  return staging;
}

void FlashInfer::Finish(Plan* plan, Staging* staging, const ffi::Function& made_by) {
  if (HasStreams(device_)) {
    if (staging->copied == nullptr) staging->copied = std::make_unique<DeviceStream>(device_);
    OrderStreams(device_, CurrentStream(device_), staging->copied->get());
    staging->is_in_flight = true;
  }
  plan->made_by = made_by;
  plan->step = step_.number();
}

ffi::Tensor FlashInfer::HostArray(Plan* plan, int64_t size) {
  plan->host_arrays.push_back(AllocateTensor({size}, kInt32, kHost, counter_));
  return plan->host_arrays.back();
}

const FlashInfer::Plan& FlashInfer::PlanPrefill(const StoredLayer& layer, KernelName name,
                                                Use use) {
  const ffi::Function& function = layer.kernels->Plan(name);
  Plan& plan = PlanOf(layer, use);
  if (IsCurrent(plan, function)) return plan;
  Staging* staging = Prepare(&plan);
  const ForwardPlan& batch = step_.plan();
  const PlanArrays arrays(batch);
  const int64_t num_sequences = batch.num_sequences();
  ffi::Tensor query_indptr = HostArray(&plan, num_sequences + 1);
  ffi::Tensor kv_indptr = HostArray(&plan, num_sequences + 1);
  ffi::Tensor kv_lengths = HostArray(&plan, num_sequences);
  arrays.FillQueryIndptr(Data(query_indptr));
  if (use == kSelf) {
    arrays.FillQueryIndptr(Data(kv_indptr));
  } else {
    arrays.FillPageIndptr(layer.group, RangeOf(use == kPast), Data(kv_indptr));
  }
  arrays.FillPastLengths(Data(kv_lengths));
  for (int64_t i = 0; i < num_sequences; ++i) {
    const int32_t num_append = Data(query_indptr)[i + 1] - Data(query_indptr)[i];
    const int32_t past = Data(kv_lengths)[i];
    Data(kv_lengths)[i] = use == kPast ? past : use == kSelf ? num_append : past + num_append;
  }
  const LayerConfig& config = layer.config;
  const int64_t page_size = use == kSelf ? 1 : layer.layout.page_size;
  plan.info = function(float_workspace_, plan.int_workspace, staging->memory, query_indptr,
                       kv_indptr, kv_lengths, batch.num_rows(), num_sequences, config.num_qo_heads,
                       config.num_kv_heads, page_size, kHasCudaGraph, config.qk_head_dim,
                       config.v_head_dim, /*causal=*/use != kPast, kNoWindow,
                       /*fixed_split_size=*/int64_t{-1}, /*disable_split_kv=*/false,
                       /*num_colocated_ctas=*/int64_t{0});
  Finish(&plan, staging, function);
  return plan;
}

const FlashInfer::Plan& FlashInfer::PlanDecode(const StoredLayer& layer, Use use) {
  const ffi::Function& function = layer.kernels->Plan(KernelName::kDecode);
  Plan& plan = PlanOf(layer, use);
  if (IsCurrent(plan, function)) return plan;
  Staging* staging = Prepare(&plan);
  const ForwardPlan& batch = step_.plan();
  const PlanArrays arrays(batch);
  ffi::Tensor indptr = HostArray(&plan, batch.num_sequences() + 1);
  arrays.FillPageIndptr(layer.group, RangeOf(use == kPast), Data(indptr));
  const LayerConfig& config = layer.config;
  plan.info =
      function(float_workspace_, plan.int_workspace, staging->memory, indptr, batch.num_sequences(),
               config.num_qo_heads, config.num_kv_heads, layer.layout.page_size, kHasCudaGraph,
               kNoWindow, /*logits_soft_cap=*/0.0, config.qk_head_dim, config.v_head_dim, empty_q_,
               AllocateTensor({0}, config.page_dtype, kHost, counter_));
  Finish(&plan, staging, function);
  return plan;
}

void FlashInfer::AttendToPages(const AttentionCall& call, const StoredLayer& layer,
                               const PageTable& table) {
  const bool is_past = table.range == PageRange::kPast;
  const Use use = is_past ? kPast : kWithStep;
  const LayerConfig& config = layer.config;
  const ffi::Tensor k = Plane(layer.pages, 0), v = Plane(layer.pages, 1);
  const double rope_rcp_scale = 1.0 / config.rope_scale, rope_rcp_theta = 1.0 / config.rope_theta;
  if (step_.plan().is_decode()) {
    const Plan& plan = PlanDecode(layer, use);
    layer.kernels->Get(KernelName::kDecode)(
        float_workspace_, plan.int_workspace, plan.info, call.q, k, v, table.indptr, table.page_ids,
        table.lengths, call.o, call.lse, kLayoutHND, kNoWindow, kHasProgrammaticLaunch,
        call.sm_scale, rope_rcp_scale, rope_rcp_theta);
  } else {
    const Plan& plan = PlanPrefill(layer, KernelName::kPrefill, use);
    layer.kernels->Get(KernelName::kPrefill)(
        float_workspace_, plan.int_workspace, plan.info, call.q, k, v,
        step_.arrays().query_indptr(), table.indptr, table.page_ids, table.lengths, call.o,
        call.lse, is_past ? kMaskNone : kMaskCausal, kLayoutHND, kNoWindow, kHasProgrammaticLaunch,
        call.sm_scale, rope_rcp_scale, rope_rcp_theta);
  }
}

void FlashInfer::AttendToRows(const AttentionCall& call, const StoredLayer& layer,
                              const ffi::Tensor& k, const ffi::Tensor& v) {
  const Plan& plan = PlanPrefill(layer, KernelName::kPrefillRagged, kSelf);
  const ffi::Tensor& query_indptr = step_.arrays().query_indptr();
  layer.kernels->Get(KernelName::kPrefillRagged)(
      float_workspace_, plan.int_workspace, plan.info, call.q, k, v, query_indptr, query_indptr,
      call.o, call.lse, kMaskCausal, kLayoutNHD, kNoWindow, kHasProgrammaticLaunch, call.sm_scale,
      1.0 / layer.config.rope_scale, 1.0 / layer.config.rope_theta);
}

}  // namespace pagedkv
