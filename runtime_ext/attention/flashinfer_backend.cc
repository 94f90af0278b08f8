// SPDX-License-Identifier: Apache-2.0
/*!
 * \file flashinfer_backend.cc
 * \brief The argument lists of FlashInfer's functions, as apache-tvm 0.27 calls them.
 */
#include "attention/flashinfer_backend.h"

#include <utility>

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

FlashInferBackend::FlashInferBackend(const CacheConfig& config, size_t num_groups,
                                     ByteCounter counter)
    : device_(config.device),
      page_size_(config.page_size),
      counter_(std::move(counter)),
      float_workspace_(AllocateTensor({kFloatWorkspaceBytes}, kByte, device_, counter_)),
      empty_q_(AllocateTensor({0}, config.dtype, kHost, counter_)),
      empty_kv_(AllocateTensor({0}, config.kv_dtype, kHost, counter_)),
      plans_(num_groups * kNumUses) {}

bool FlashInferBackend::IsNeededBy(const CacheConfig& config) {
  for (const KernelSet& kernels : config.kernel_sets) {
    for (KernelName name : kKernels) {
      if (kernels.IsFlashInfer(name)) return true;
    }
  }
  return false;
}

void FlashInferBackend::BeginStep() {
  for (Plan& plan : plans_) plan.made_by = ffi::Function(nullptr);
}

FlashInferBackend::Staging* FlashInferBackend::Prepare(Plan* plan) {
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

void FlashInferBackend::NoteCopy(Staging* staging) {
  if (!HasStreams(device_)) return;
  if (staging->copied == nullptr) staging->copied = std::make_unique<DeviceStream>(device_);
  OrderStreams(device_, CurrentStream(device_), staging->copied->get());
  staging->is_in_flight = true;
}

ffi::Tensor FlashInferBackend::HostArray(Plan* plan, int64_t size) {
  plan->host_arrays.push_back(AllocateTensor({size}, kInt32, kHost, counter_));
  return plan->host_arrays.back();
}

const FlashInferBackend::Plan& FlashInferBackend::PlanPrefill(const LayerCall& call,
                                                              KernelName name, Use use) {
  const ffi::Function& function = call.kernels.Plan(name);
  Plan& plan = plans_[call.group * kNumUses + use];
  if (plan.made_by.same_as(function)) return plan;
  Staging* staging = Prepare(&plan);
  const ForwardPlan& batch = call.batch;
  const int64_t num_sequences = batch.num_sequences();
  ffi::Tensor query_indptr = HostArray(&plan, num_sequences + 1);
  ffi::Tensor kv_indptr = HostArray(&plan, num_sequences + 1);
  ffi::Tensor kv_lengths = HostArray(&plan, num_sequences);
  batch.FillQueryIndptr(Data(query_indptr));
  if (use == kSelf) {
    batch.FillQueryIndptr(Data(kv_indptr));
  } else {
    batch.FillPageIndptr(call.group, use == kPast ? PageRange::kPast : PageRange::kWithStep,
                         Data(kv_indptr));
  }
  batch.FillPastLengths(Data(kv_lengths));
  for (int64_t i = 0; i < num_sequences; ++i) {
    const int32_t num_append = Data(query_indptr)[i + 1] - Data(query_indptr)[i];
    const int32_t past = Data(kv_lengths)[i];
    Data(kv_lengths)[i] = use == kPast ? past : use == kSelf ? num_append : past + num_append;
  }
  const LayerConfig& layer = call.layer;
  plan.info = function(float_workspace_, plan.int_workspace, staging->memory, query_indptr,
                       kv_indptr, kv_lengths, batch.num_rows(), num_sequences, layer.num_qo_heads,
                       layer.num_kv_heads, use == kSelf ? int64_t{1} : page_size_, kHasCudaGraph,
                       layer.qk_head_dim, layer.v_head_dim, /*causal=*/use != kPast, kNoWindow,
                       /*fixed_split_size=*/int64_t{-1}, /*disable_split_kv=*/false,
                       /*num_colocated_ctas=*/int64_t{0});
  NoteCopy(staging);
  plan.made_by = function;
  return plan;
}

const FlashInferBackend::Plan& FlashInferBackend::PlanDecode(const LayerCall& call, Use use) {
  const ffi::Function& function = call.kernels.Plan(KernelName::kDecode);
  Plan& plan = plans_[call.group * kNumUses + use];
  if (plan.made_by.same_as(function)) return plan;
  Staging* staging = Prepare(&plan);
  const ForwardPlan& batch = call.batch;
  ffi::Tensor indptr = HostArray(&plan, batch.num_sequences() + 1);
  batch.FillPageIndptr(call.group, use == kPast ? PageRange::kPast : PageRange::kWithStep,
                       Data(indptr));
  const LayerConfig& layer = call.layer;
  plan.info =
      function(float_workspace_, plan.int_workspace, staging->memory, indptr, batch.num_sequences(),
               layer.num_qo_heads, layer.num_kv_heads, page_size_, kHasCudaGraph, kNoWindow,
               /*logits_soft_cap=*/0.0, layer.qk_head_dim, layer.v_head_dim, empty_q_, empty_kv_);
  NoteCopy(staging);
  plan.made_by = function;
  return plan;
}

void FlashInferBackend::Paged(const LayerCall& call, PageRange range,
                              const ffi::Tensor& query_indptr, const FlashInferPages& table) {
  const Use use = range == PageRange::kPast ? kPast : kWithStep;
  const LayerConfig& layer = call.layer;
  const ffi::Tensor k = Plane(table.pages, 0), v = Plane(table.pages, 1);
  const double rope_rcp_scale = 1.0 / layer.rope_scale, rope_rcp_theta = 1.0 / layer.rope_theta;
  if (call.batch.is_decode()) {
    const Plan& plan = PlanDecode(call, use);
    call.kernels.Get(KernelName::kDecode)(
        float_workspace_, plan.int_workspace, plan.info, call.q, k, v, table.indptr, table.values,
        table.last_page_lengths, call.o, call.lse, kLayoutHND, kNoWindow, kHasProgrammaticLaunch,
        call.sm_scale, rope_rcp_scale, rope_rcp_theta);
  } else {
    const Plan& plan = PlanPrefill(call, KernelName::kPrefill, use);
    call.kernels.Get(KernelName::kPrefill)(
        float_workspace_, plan.int_workspace, plan.info, call.q, k, v, query_indptr, table.indptr,
        table.values, table.last_page_lengths, call.o, call.lse,
        use == kPast ? kMaskNone : kMaskCausal, kLayoutHND, kNoWindow, kHasProgrammaticLaunch,
        call.sm_scale, rope_rcp_scale, rope_rcp_theta);
  }
}

void FlashInferBackend::Ragged(const LayerCall& call, const ffi::Tensor& query_indptr,
                               const ffi::Tensor& k, const ffi::Tensor& v) {
  const Plan& plan = PlanPrefill(call, KernelName::kPrefillRagged, kSelf);
  call.kernels.Get(KernelName::kPrefillRagged)(
      float_workspace_, plan.int_workspace, plan.info, call.q, k, v, query_indptr, query_indptr,
      call.o, call.lse, kMaskCausal, kLayoutNHD, kNoWindow, kHasProgrammaticLaunch, call.sm_scale,
      1.0 / call.layer.rope_scale, 1.0 / call.layer.rope_theta);
}

}  // namespace pagedkv
