// SPDX-License-Identifier: Apache-2.0
// What generated CUDA C++ finds in its headers: types, built-in variables and functions, and as
// much of the runtime library as a generated launcher calls.
#ifndef TESTS_CUDA_EMULATOR_CUDA_H_
#define TESTS_CUDA_EMULATOR_CUDA_H_

#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <type_traits>

#include "instructions.h"
#include "machine.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define TVM_FFI_SAFE_CALL_BEGIN()
#define TVM_FFI_SAFE_CALL_END()

using uint = unsigned int;
using uchar = unsigned char;
using ushort = unsigned short;
using half = _Float16;

#define CUDART_INF_F INFINITY

// Stored as its upper 16 bits, computed with as a float.
struct nv_bfloat16 {
  uint16_t bits;
  nv_bfloat16() = default;
  nv_bfloat16(float value) : bits(emulator::Narrow(value, emulator::kBFloat16)) {}
  operator float() const { return emulator::Widen(bits, emulator::kBFloat16); }
};
inline half __float2half_rn(float value) { return static_cast<half>(value); }
inline nv_bfloat16 __float2bfloat16_rn(float value) { return nv_bfloat16(value); }

#define threadIdx (emulator::machine().current->index)
#define blockIdx (emulator::machine().block_index)

inline uint32_t __cvta_generic_to_shared(const void* p) { return emulator::SharedAddress(p); }
inline void __syncthreads() { emulator::SyncBarrier(0, emulator::machine().threads.size()); }
inline void __syncwarp(unsigned = ~0u) { emulator::SyncWarp(); }

#define EMULATOR_SHUFFLE(name, mode)                                      \
  template <typename T>                                                   \
  inline T name(unsigned, T value, int operand, int width = 32) {         \
    emulator::Shuffle(emulator::mode, &value, sizeof(T), operand, width); \
    return value;                                                         \
  }
EMULATOR_SHUFFLE(__shfl_sync, kShuffleIndex)
EMULATOR_SHUFFLE(__shfl_xor_sync, kShuffleXor)
EMULATOR_SHUFFLE(__shfl_down_sync, kShuffleDown)
EMULATOR_SHUFFLE(__shfl_up_sync, kShuffleUp)

inline int __any_sync(unsigned, int predicate) { return emulator::IsAny(predicate != 0); }

// As in CUDA, the number wins over a NaN.
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
template <typename T>
inline T max(T a, T b) {
  return std::max(a, b);
}
template <typename T>
inline T min(T a, T b) {
  return std::min(a, b);
}
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

template <typename T>
inline T atomicAdd(T* address, T value) {
  const T old = *address;
  *address = old + value;
  ++emulator::machine().progress;
  return old;
}

// The runtime library.
using cudaStream_t = void*;
enum cudaError_t {
  cudaSuccess,
  cudaErrorInvalidValue,
  cudaErrorLaunchFailure,
  cudaErrorCudartUnloading
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout
};
enum { cudaSharedmemCarveoutMaxShared = 100 };

struct dim3 : emulator::Index3 {
  dim3(unsigned x, unsigned y, unsigned z) : Index3{x, y, z} {}
  dim3() = default;
};

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

inline const char* cudaGetErrorString(cudaError_t) {
  const std::string& fault = emulator::machine().fault;
  return fault.empty() ? "an argument is out of range" : fault.c_str();
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor,
  cudaDevAttrReservedSharedMemoryPerBlock,
  cudaDevAttrMaxSharedMemoryPerBlockOptin
};
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const int block_bytes = static_cast<int>(emulator::machine().max_shared_bytes);
  const int reserved_bytes = static_cast<int>(emulator::kGuardBytes);
  const int values[] = {emulator::machine().num_multiprocessors, block_bytes + reserved_bytes,
                        reserved_bytes, block_bytes};
  *value = values[attribute];
  return cudaSuccess;
}
struct cudaFuncAttributes {
  int ptxVersion;
};
template <typename Kernel>
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel) {
  attributes->ptxVersion = emulator::machine().ptx_version;
  return cudaSuccess;
}
template <typename Kernel>
inline cudaError_t cudaFuncSetAttribute(Kernel kernel, cudaFuncAttribute attribute, int64_t value) {
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) {
    emulator::PreferShared(reinterpret_cast<const void*>(kernel));
    return value == cudaSharedmemCarveoutMaxShared ? cudaSuccess : cudaErrorInvalidValue;
  }
  const bool fits = value <= static_cast<int64_t>(emulator::machine().max_shared_bytes);
  return fits ? cudaSuccess : cudaErrorInvalidValue;
}

enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  const bool is_capturing = emulator::machine().is_capturing;
  *status = is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

// Memory pools: what is taken from one holds NaN.
using cudaMemPool_t = int;
enum { cudaMemAllocationTypePinned, cudaMemLocationTypeDevice, cudaMemPoolAttrReleaseThreshold };
struct cudaMemPoolProps {
  int allocType;
  struct {
    int type, id;
  } location;
};
inline cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) {
  *pool = 0;
  return cudaSuccess;
}
inline cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, int, void*) { return cudaSuccess; }
inline cudaError_t cudaMallocFromPoolAsync(void** memory, size_t num_bytes, cudaMemPool_t,
                                           cudaStream_t stream) {
  if (num_bytes == 0) return cudaErrorInvalidValue;
  ++emulator::machine().num_pool_blocks;
#ifdef EMULATOR_ON_DEVICE
  *memory = emulator::machine().take_on_device(stream, num_bytes);
  return cudaSuccess;
#endif
  *memory = std::aligned_alloc(256, (num_bytes + 255) / 256 * 256);
  std::memset(*memory, 0xff, num_bytes);
  return cudaSuccess;
}
inline cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
  if (memory == nullptr) return cudaErrorInvalidValue;
#ifdef EMULATOR_ON_DEVICE
  emulator::machine().give_back_on_device(stream, memory);
  return cudaSuccess;
#endif
  emulator::FreeAfterSubmitted(memory);
  return cudaSuccess;
}

template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Args... args) {
  if (config->dynamicSmemBytes > emulator::machine().max_shared_bytes) {
    return cudaErrorInvalidValue;
  }
  // The number of blocks that are launched supposes that the GPU has the memory for them.
  const void* address = reinterpret_cast<const void*>(kernel);
  if (config->dynamicSmemBytes > 0 && !emulator::PrefersShared(address)) {
    return cudaErrorInvalidValue;
  }
  const bool begins_early =
      config->numAttrs > 0 && config->attrs[0].val.programmaticStreamSerializationAllowed;
  const emulator::Launch launch{config->gridDim, config->blockDim, config->dynamicSmemBytes,
                                begins_early};
  auto run = [=] { kernel(static_cast<Params>(args)...); };
#ifdef EMULATOR_ON_DEVICE
  std::vector<emulator::Access> accesses;
  auto keep = [&](auto arg) {
    using Value = std::remove_pointer_t<decltype(arg)>;
    if constexpr (std::is_pointer_v<decltype(arg)>) {
      accesses.push_back({arg, !std::is_const_v<Value>});
    }
  };
  (keep(static_cast<Params>(args)), ...);
  const bool done =
      emulator::machine().launch_on_device(config->stream, launch, accesses, std::move(run));
#else
  const bool done = emulator::Submit(launch, std::move(run));
#endif
  return done ? cudaSuccess : cudaErrorLaunchFailure;
}

namespace tvm {
namespace ffi {
struct CUDADeviceGuard {
  explicit CUDADeviceGuard(int64_t) {}
};
}  // namespace ffi
}  // namespace tvm

#endif  // TESTS_CUDA_EMULATOR_CUDA_H_
