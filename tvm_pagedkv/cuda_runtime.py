# SPDX-License-Identifier: Apache-2.0
"""What launchers of kernels for GPUs call: C functions over the CUDA runtime.

Scratch memory comes from a pool of the library's own, one for each device, in the order of the
stream: nothing waits, calls on several streams do not share it, and a CUDA graph can capture it.
How many blocks a device holds is asked at each call, and the same each time.
"""

from __future__ import annotations

from tir_kernels.cuda.launcher import GIVE_BACK, RESIDENT_BLOCKS, TAKE

_DEFINITIONS = """
namespace pagedkv {
inline void Check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

inline cudaStream_t CurrentStream(int device) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device));
}

inline int CurrentDevice() {
  int device;
  Check(cudaGetDevice(&device));
  return device;
}

inline int Attribute(cudaDeviceAttr attribute) {
  int value;
  Check(cudaDeviceGetAttribute(&value, attribute, CurrentDevice()));
  return value;
}

// Keeps what is returned to it, so that steps allocate nothing once they are warm.
inline cudaMemPool_t MakePool(int device) {
  cudaMemPoolProps props = {};
  props.allocType = cudaMemAllocationTypePinned;
  props.location.type = cudaMemLocationTypeDevice;
  props.location.id = device;
  cudaMemPool_t pool;
  Check(cudaMemPoolCreate(&pool, &props));
  uint64_t threshold = UINT64_MAX;
  Check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
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
  pagedkv::Check(cudaMallocFromPoolAsync(&memory, num_bytes, pagedkv::PoolOf(device),
                                               pagedkv::CurrentStream(device)));
  return static_cast<float*>(memory);
}

extern "C" TVM_DLL int32_t GIVE_BACK(float* memory) {
  pagedkv::Check(cudaFreeAsync(memory, pagedkv::CurrentStream(pagedkv::CurrentDevice())));
  return 0;
}

extern "C" TVM_DLL int32_t RESIDENT_BLOCKS(int64_t shared_bytes, int32_t most) {
  const int64_t bytes = pagedkv::Attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  shared_bytes += pagedkv::Attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  const int64_t blocks = std::min<int64_t>(most, bytes / shared_bytes);
  return pagedkv::Attribute(cudaDevAttrMultiProcessorCount) * static_cast<int32_t>(blocks);
}
"""
_INCLUDES = "#include <algorithm>\n#include <map>\n#include <mutex>\n#include <stdexcept>\n"
_NAMES = {"TAKE": TAKE, "GIVE_BACK": GIVE_BACK, "RESIDENT_BLOCKS": RESIDENT_BLOCKS}


def with_runtime(source: str) -> str:
    """Source, with the functions behind it if its launchers call them."""
    if not any(name in source for name in _NAMES.values()):
        return source
    definitions = _DEFINITIONS
    for name, symbol in _NAMES.items():
        definitions = definitions.replace(f" {name}(", f" {symbol}(")
    return source + _INCLUDES + definitions
