// SPDX-License-Identifier: Apache-2.0
/*!
 * \file pipeline_stage.cc
 * \brief The pipeline stage of a cache: given, or that of the Disco worker.
 */
#include "config/pipeline_stage.h"

#include <tvm/ffi/function.h>

#include <algorithm>

#include "base/error.h"

namespace pagedkv {

namespace {

struct Worker {
  int64_t id;
  int64_t num_workers;
};

// The worker that runs this thread.
std::optional<Worker> CurrentWorker() {
  using tvm::ffi::Function;
  std::optional<Function> id = Function::GetGlobal("runtime.disco.worker_rank");
  std::optional<Function> count = Function::GetGlobal("runtime.disco.world_size");
  if (!id || !count) return std::nullopt;
  try {
    return Worker{(*id)().cast<int64_t>(), (*count)().cast<int64_t>()};
  } catch (const tvm::ffi::Error&) {
    return std::nullopt;  // this thread belongs to no worker
  }
}

int64_t StageOfWorker(int64_t num_stages) {
  if (num_stages == 1) return 0;
  std::optional<Worker> worker = CurrentWorker();
  if (!worker) {
    Raise(
        kValueError, "layer_indptr has ", num_stages,
        " pipeline stages, and this is not a Disco worker, whose id would say which one the cache "
        "is of; give 'stage' to pagedkv.create");
  }
  if (worker->num_workers % num_stages != 0) {
    Raise(kValueError, num_stages,
          " pipeline stages need a multiple of so many Disco workers, got ", worker->num_workers);
  }
  return worker->id / (worker->num_workers / num_stages);
}

std::string ToString(const std::vector<int64_t>& numbers) {
  std::string text;
  for (int64_t n : numbers) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return "[" + text + "]";
}

}  // namespace

std::optional<int64_t> CurrentWorkerId() {
  const std::optional<Worker> worker = CurrentWorker();
  if (!worker) return std::nullopt;
  return worker->id;
}

PipelineStage PipelineStage::Resolve(std::vector<int64_t> layer_indptr, int64_t num_layers,
                                     std::optional<int64_t> index) {
  if (layer_indptr.empty()) layer_indptr = {0, num_layers};
  if (layer_indptr.size() < 2 || layer_indptr.front() != 0 || layer_indptr.back() != num_layers ||
      !std::is_sorted(layer_indptr.begin(), layer_indptr.end())) {
    Raise(kValueError, "layer_indptr must begin with 0, never fall, and end with the number of ",
          "layers, ", num_layers, "; got ", ToString(layer_indptr));
  }
  PipelineStage stage{std::move(layer_indptr)};
  if (index && (*index < 0 || *index >= stage.num_stages())) {
    Raise(kValueError, "stage must be between 0 and ", stage.num_stages() - 1, ", got ", *index);
  }
  stage.index = index ? *index : StageOfWorker(stage.num_stages());
  return stage;
}

void PipelineStage::RequireOwn(int64_t layer) const {
  if (layer >= begin() && layer < end()) return;
  if (layer < 0 || layer >= num_layers()) {
    Raise(kIndexError, "layer ", layer, " is not in [0, ", num_layers(), ")");
  }
  auto above = std::upper_bound(layer_indptr.begin(), layer_indptr.end(), layer);
  Raise(kIndexError, "layer ", layer, " is of pipeline stage ", above - layer_indptr.begin() - 1,
        "; this cache is of stage ", index, ", whose layers are [", begin(), ", ", end(), ")");
}

}  // namespace pagedkv
