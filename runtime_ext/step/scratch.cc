// SPDX-License-Identifier: Apache-2.0
/*!
 * \file scratch.cc
 * \brief Memory that kernels on a GPU borrow while a layer is called, for partial states.
 */
#include "step/scratch.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace pagedkv {

namespace {

constexpr int64_t kMinBytes = 64 << 10, kMaxBytes = int64_t{1} << 60;

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
    if (block.memory.data_ptr() != memory) continue;
    block.is_lent = false;
    return true;
  }
  return false;
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
