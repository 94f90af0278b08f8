# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of kernels for GPUs: two C functions that launchers call.

The memory comes from a pool of the library's own, one for each device, in the order of the stream:
nothing waits, calls on several streams do not share it, and a CUDA graph can capture it.
"""

from __future__ import annotations

from tir_kernels.cuda.partials import GIVE_BACK, TAKE

_DEFINITIONS = """
namespace pagedkv {
inline void CheckMemory(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

inline cudaStream_t CurrentStream(int device) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device));
}

inline int CurrentDevice() {
  int device;
  CheckMemory(cudaGetDevice(&device));
  return device;
}

// Keeps what is returned to it, so that steps allocate nothing once they are warm.
inline cudaMemPool_t MakePool(int device) {
  cudaMemPoolProps props = {};
  props.allocType = cudaMemAllocationTypePinned;
  props.location.type = cudaMemLocationTypeDevice;
  props.location.id = device;
  cudaMemPool_t pool;
  CheckMemory(cudaMemPoolCreate(&pool, &props));
  uint64_t threshold = UINT64_MAX;
  CheckMemory(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
  return pool;
}

inline cudaMemPool_t PoolOf(int device) {
  static std::mutex mutex;
  static std::map<int, cudaMemPool_t> pools;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = pools.find(device);
  if (found == pools.end()) found = pools.emplace(device, MakePool(device)).first;
  return found->second;
}
}  // namespace pagedkv

extern "C" TVM_DLL float* TAKE(int64_t num_bytes) {
  const int device = pagedkv::CurrentDevice();
  void* memory = nullptr;
  pagedkv::CheckMemory(cudaMallocFromPoolAsync(&memory, num_bytes, pagedkv::PoolOf(device),
                                               pagedkv::CurrentStream(device)));
  return static_cast<float*>(memory);
}

extern "C" TVM_DLL int32_t GIVE_BACK(float* memory) {
  pagedkv::CheckMemory(cudaFreeAsync(memory, pagedkv::CurrentStream(pagedkv::CurrentDevice())));
  return 0;
}
"""
_INCLUDES = "#include <map>\n#include <mutex>\n#include <stdexcept>\n"


def with_workspace(source: str) -> str:
    """Source, with the functions behind it if its launchers call them."""
    if TAKE not in source:
        return source
    return source + _INCLUDES + _DEFINITIONS.replace("GIVE_BACK", GIVE_BACK).replace("TAKE", TAKE)
