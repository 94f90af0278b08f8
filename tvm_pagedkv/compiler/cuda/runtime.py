# SPDX-License-Identifier: Apache-2.0
"""C functions over the CUDA runtime that the launchers of kernels call.

Scratch memory is borrowed from the cache whose layer is called, which owns it and counts it:
`runtime_ext/step/scratch.h`. Where no cache of ours calls, or a CUDA graph is captured before the
cache has it, it comes from a stream-ordered pool of the library, one per device: no call waits and
streams do not share memory. The number of resident blocks and the
shared memory of a block are queried at each call; they do not change. Kernels with shared memory
ask for all that a multiprocessor can give to it, as the number of resident blocks supposes.
"""

from __future__ import annotations

import re

from tir_kernels.cuda.launches import (
    BLOCK_SHARED_BYTES,
    GIVE_BACK,
    RESIDENT_BLOCKS,
    TAKE,
)

from .rewrite import rewrite

_DEFINITIONS = """
// Internal to this library: another one may be compiled for other chips.
namespace pagedkv {
namespace {
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

// A property of a device that is queried once. A list, not a map: threads may use it while the
// process ends, and a map would take half of the time that the host's code takes to compile.
template <typename T>
T Known(int device, T (*find)(int)) {
  struct Entry {
    int device;
    T value;
    const Entry* next;
  };
  static std::mutex mutex;
  static const Entry* first = nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  const Entry* found = first;
  while (found != nullptr && found->device != device) found = found->next;
  if (found == nullptr) found = first = new Entry{device, find(device), first};
  return found->value;
}

// Keeps freed memory, so that warm steps allocate nothing.
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

// Calls a function that the runtime of tvm_pagedkv may have registered; None without it.
inline TVMFFIAny AskRuntime(const char* name, TVMFFIAny* arguments, int num_arguments) {
  TVMFFIAny result = {};
  const TVMFFIByteArray symbol = {name, std::strlen(name)};
  TVMFFIObjectHandle function = nullptr;
  if (TVMFFIFunctionGetGlobal(&symbol, &function) != 0 || function == nullptr) return result;
  const int error = TVMFFIFunctionCall(function, arguments, num_arguments, &result);
  TVMFFIObjectDecRef(function);
  if (error != 0) throw std::runtime_error(std::string(name) + " failed");
  return result;
}

inline TVMFFIAny Argument(int type, int64_t value) {
  TVMFFIAny argument = {};
  argument.type_index = type;
  argument.v_int64 = value;
  return argument;
}

inline TVMFFIAny Argument(void* value) {
  TVMFFIAny argument = {};
  argument.type_index = kTVMFFIOpaquePtr;
  argument.v_ptr = value;
  return argument;
}

// Borrows memory of the cache whose layer is called; null if it has none, or no cache calls.
inline void* Borrow(int device, int64_t num_bytes, bool may_allocate) {
  TVMFFIAny arguments[] = {Argument(kTVMFFIInt, device), Argument(kTVMFFIInt, num_bytes),
                           Argument(kTVMFFIBool, may_allocate)};
  const TVMFFIAny memory = AskRuntime("pagedkv.borrow_scratch", arguments, 3);
  return memory.type_index == kTVMFFIOpaquePtr ? memory.v_ptr : nullptr;
}

inline bool Return(void* memory) {
  TVMFFIAny argument = Argument(memory);
  return AskRuntime("pagedkv.return_scratch", &argument, 1).v_int64 != 0;
}

inline bool IsCapturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  Check(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

// Programmatic dependent launch needs kernels that were compiled for compute capability 9.0. A chip
// that has it may run PTX of an older one.
inline bool CanOverlap(int) {
  cudaFuncAttributes attributes;
  Check(cudaFuncGetAttributes(&attributes, ::KERNEL));
  return attributes.ptxVersion >= 90;
}
}  // namespace
}  // namespace pagedkv

// A kernel without scratch memory asks for none.
extern "C" TVM_DLL float* TAKE(int64_t num_bytes) {
  if (num_bytes == 0) return nullptr;
  const int device = pagedkv::CurrentDevice();
  const cudaStream_t stream = pagedkv::CurrentStream(device);
  void* memory = pagedkv::Borrow(device, num_bytes, false);
  if (memory == nullptr && !pagedkv::IsCapturing(stream)) {
    memory = pagedkv::Borrow(device, num_bytes, true);
  }
  if (memory == nullptr) {
    const cudaMemPool_t pool = pagedkv::Known(device, pagedkv::MakePool);
    pagedkv::Check(cudaMallocFromPoolAsync(&memory, num_bytes, pool, stream));
  }
  return static_cast<float*>(memory);
}

extern "C" TVM_DLL int32_t GIVE_BACK(float* memory) {
  if (memory == nullptr || pagedkv::Return(memory)) return 0;
  pagedkv::Check(cudaFreeAsync(memory, pagedkv::CurrentStream(pagedkv::CurrentDevice())));
  return 0;
}

extern "C" TVM_DLL int32_t RESIDENT_BLOCKS(int64_t shared_bytes, int32_t max_blocks) {
  const int64_t bytes = pagedkv::Attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  shared_bytes += pagedkv::Attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  const int64_t blocks = std::min<int64_t>(max_blocks, bytes / shared_bytes);
  return pagedkv::Attribute(cudaDevAttrMultiProcessorCount) * static_cast<int32_t>(blocks);
}

extern "C" TVM_DLL int32_t BLOCK_SHARED_BYTES() {
  return pagedkv::Attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

// Once for a kernel and device, whose code the driver loads here.
extern "C" void PREFER_SHARED(const void* kernel) {
  struct Entry {
    const void* kernel;
    int device;
    const Entry* next;
  };
  static std::mutex mutex;
  static const Entry* first = nullptr;
  const int device = pagedkv::CurrentDevice();
  std::lock_guard<std::mutex> lock(mutex);
  const Entry* found = first;
  while (found != nullptr && (found->kernel != kernel || found->device != device)) {
    found = found->next;
  }
  if (found != nullptr) return;
  pagedkv::Check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                      cudaSharedmemCarveoutMaxShared));
  first = new Entry{kernel, device, first};
}

extern "C" TVM_DLL int32_t CAN_OVERLAP() {
  return pagedkv::Known(pagedkv::CurrentDevice(), pagedkv::CanOverlap);
}
"""
_HEADERS = ("algorithm", "cstring", "mutex", "stdexcept", "string")
_INCLUDES = "".join(f"#include <{name}>\n" for name in _HEADERS)
_NAMES = {
    "TAKE": TAKE,
    "GIVE_BACK": GIVE_BACK,
    "RESIDENT_BLOCKS": RESIDENT_BLOCKS,
    "BLOCK_SHARED_BYTES": BLOCK_SHARED_BYTES,
}
_HOST_BEGIN = re.compile(r"^#include <tvm/ffi/c_api\.h>\n", re.MULTILINE)
_CAN_OVERLAP = "pagedkv_kernels_can_overlap"
_PREFER_SHARED = "pagedkv_prefer_shared_memory"
_LAUNCH = re.compile(r"^  return cudaLaunchKernelEx\(config, kernel, ", re.MULTILINE)
# Where a launcher allows a kernel to begin before the preceding one has ended.
_ALLOWED = "programmaticStreamSerializationAllowed"
_ATTRIBUTE = re.compile(rf"(\w+)\[(\w+)\.numAttrs\+\+\](\.val\.{_ALLOWED} = 1;)")
_KERNEL = re.compile(r"^extern \"C\" __global__ void (?:__launch_bounds__\(.*?\) )?(\w+)\(", re.M)


def with_runtime(source: str) -> str:
    """Append the functions, and set launch attributes only on chips that have them."""
    definitions = _DEFINITIONS
    own = {"CAN_OVERLAP": _CAN_OVERLAP, "PREFER_SHARED": _PREFER_SHARED}
    for name, symbol in {**_NAMES, **own}.items():
        definitions = definitions.replace(f" {name}(", f" {symbol}(")
    kernel = _KERNEL.search(source)
    assert kernel is not None, "the source has no kernel"
    definitions = definitions.replace("::KERNEL", f"::{kernel[1]}")
    declared = (
        rf'\g<0>extern "C" int32_t {_CAN_OVERLAP}();\n'
        rf'extern "C" void {_PREFER_SHARED}(const void* kernel);\n'
    )
    source = rewrite(source, _HOST_BEGIN, declared, 1, "beginning of the host's code")
    prefers = f"  if (config->dynamicSmemBytes > 0) {_PREFER_SHARED}((const void*)kernel);\n\\g<0>"
    source = rewrite(source, _LAUNCH, prefers, 1, "functions that launch")
    guarded = rf"\1[\2.numAttrs]\3\n  \2.numAttrs += {_CAN_OVERLAP}();"
    count = source.count(_ALLOWED)
    source = rewrite(source, _ATTRIBUTE, guarded, count, "launches that may begin early")
    return source + _INCLUDES + definitions
