// SPDX-License-Identifier: Apache-2.0
/*!
 * \file scratch.cc
 * \brief Memory that kernels borrow while a layer is called, for partial states and tiles.
 */
#include "step/scratch.h"

#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/runtime/c_backend_api.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace pagedkv {

namespace {

constexpr int64_t kMinBytes = 64 << 10, kMaxBytes = int64_t{1} << 60;
constexpr int64_t kPageBytes = 4096;  // sizes on a CPU are multiples of it

thread_local Scratch* lender = nullptr;

}  // namespace

Scratch::Scratch(DLDevice device, ByteCounter counter)
    : device_(device), counter_(std::move(counter)) {}

Scratch::Lending::Lending(Scratch* scratch) : before_(lender) { lender = scratch; }

Scratch::Lending::~Lending() {
  for (Block& block : lender->blocks_) block.is_lent = false;
  lender = before_;
}

void* Scratch::Borrow(int64_t device_id, int64_t num_bytes, bool may_allocate) {
  if (lender == nullptr || !IsSame(lender->device_, {kDLCUDA, static_cast<int32_t>(device_id)})) {
    return nullptr;
  }
  if (may_allocate && lender->Find(num_bytes) == nullptr) lender->Allocate(num_bytes);
  Block* block = lender->Find(num_bytes);
  if (block == nullptr) return nullptr;
  block->is_lent = true;
  return block->memory.data_ptr();
}

bool Scratch::Return(void* memory) {
  if (lender == nullptr) return false;
  for (Block& block : lender->blocks_) {
    if (!block.is_lent || block.memory.data_ptr() != memory) continue;
    block.is_lent = false;
    return true;
  }
  return false;
}

void Scratch::ServeCPUKernels() {
  // What is registered last counts for a library that is loaded.
  TVM_FFI_CHECK_SAFE_CALL(TVMFFIEnvModRegisterContextSymbol(
      "__TVMBackendAllocWorkspace", reinterpret_cast<void*>(AllocateWorkspace)));
  TVM_FFI_CHECK_SAFE_CALL(TVMFFIEnvModRegisterContextSymbol(
      "__TVMBackendFreeWorkspace", reinterpret_cast<void*>(FreeWorkspace)));
}

void* Scratch::AllocateWorkspace(int device_type, int device_id, uint64_t num_bytes, int type_code,
                                 int type_bits) {
  if (lender != nullptr && device_type == kDLCPU && lender->device_.device_type == kDLCPU) {
    return lender->LendOnCPU(num_bytes);
  }
  return TVMBackendAllocWorkspace(device_type, device_id, num_bytes, type_code, type_bits);
}

int Scratch::FreeWorkspace(int device_type, int device_id, void* memory) {
  if (device_type == kDLCPU && Return(memory)) return 0;
  return TVMBackendFreeWorkspace(device_type, device_id, memory);
}

void* Scratch::LendOnCPU(uint64_t num_bytes) {
  if (num_bytes > kMaxBytes) return nullptr;
  const int64_t wanted = std::max<int64_t>(num_bytes, 1);
  try {
    auto block = std::find_if(blocks_.begin(), blocks_.end(),
                              [](const Block& other) { return !other.is_lent; });
    if (block == blocks_.end()) block = blocks_.insert(block, Block{});
    if (block->num_bytes < wanted) {
      *block = Block{};  // freed before the allocation
      const int64_t size = (wanted + kPageBytes - 1) / kPageBytes * kPageBytes;
      *block = {AllocateTensor({size}, kByte, device_, counter_), size};
    }
    block->is_lent = true;
    return block->memory.data_ptr();
  } catch (const std::exception&) {
    return nullptr;  // the kernel raises an error
  }
}

int64_t Scratch::num_bytes() const {
  int64_t total = 0;
  for (const Block& block : blocks_) total += block.num_bytes;
  return total;
}

Scratch::Block* Scratch::Find(int64_t num_bytes) {
  for (Block& block : blocks_) {
    if (!block.is_lent && block.num_bytes >= num_bytes) return &block;
  }
  return nullptr;
}

void Scratch::Allocate(int64_t num_bytes) {
  int64_t size = kMinBytes;
  while (size < num_bytes && size <= kMaxBytes) size *= 2;
  try {
    blocks_.push_back({AllocateTensor({size}, kByte, device_, counter_), size});
  } catch (const std::exception&) {
    return;  // the launcher has another way to get memory, and says why if that fails, too
  }
  std::sort(blocks_.begin(), blocks_.end(),
            [](const Block& a, const Block& b) { return a.num_bytes < b.num_bytes; });
}

}  // namespace pagedkv
