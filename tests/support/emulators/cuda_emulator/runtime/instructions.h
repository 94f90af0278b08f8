// SPDX-License-Identifier: Apache-2.0
// What instructions of the PTX ISA do, for code that takes their operands as C++ values.
#ifndef TESTS_CUDA_EMULATOR_INSTRUCTIONS_H_
#define TESTS_CUDA_EMULATOR_INSTRUCTIONS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace emulator {

enum FloatType { kFloat16, kBFloat16 };

float Widen(uint16_t bits, FloatType type);
uint16_t Narrow(float value, FloatType type);  // to nearest, ties to even

// prmt: four of the eight bytes of `low, high`, by the digits of the selector, the lowest first.
uint32_t PermuteBytes(uint32_t low, uint32_t high, uint32_t selector);
// fma.rn of two pairs of 16-bit numbers: ``a * b + c`` rounded once; subnormal numbers are kept.
uint32_t FmaPairs(uint32_t a, uint32_t b, uint32_t c, FloatType type);

// bar.sync, bar.arrive
void SyncBarrier(int id, int num_threads);
void ArriveAtBarrier(int id, int num_threads);

// cp.async: the first `source_bytes` of `num_bytes` from global memory, zeros for the rest.
void CopyAsync(uint32_t to, const void* from, int num_bytes, int source_bytes);
void CommitCopies();
void WaitForCopies(int groups_left);

// shfl.sync of a value of any type: lane `from(lane)` of each segment of `width` lanes.
enum ShuffleMode { kShuffleXor, kShuffleDown, kShuffleUp, kShuffleIndex };
void Shuffle(ShuffleMode mode, void* value, size_t num_bytes, int operand, int width);
// vote.sync.any
bool IsAny(bool condition);
void SyncWarp();

// ldmatrix of `count` 8 x 8 matrices of 16 bits; the lane's `address` is that of one row.
void LoadMatrices(uint32_t* const* registers, int count, bool transposed, uint32_t address);

// mma.m16n8k16: d = a * b + c in float32.
void MultiplyMatrices(float* const* d, const uint32_t* a, const uint32_t* b, const float* c,
                      FloatType type);

// wgmma: d += a * b of the 64 rows of four warps. A is in registers, or where its descriptor says;
// B where its descriptor says, with its columns, or else its rows, side by side. Without `adds` d
// is overwritten. A warp's sums come, and its operands are read, when it waits.
void MultiplyTogether(float* const* d, int columns, const uint32_t* const* a, uint64_t a_descriptor,
                      uint64_t b_descriptor, bool transposed, bool adds, FloatType type);
// wgmma.fence, which has to come between accesses of threads to registers and products.
void FenceProducts();
void CommitProducts();
void WaitForProducts(int groups_left);

// ld and st of `num_bytes`, with the alignment that hardware asks for.
void Load(void* registers, const void* from, size_t num_bytes);
void Store(void* to, const void* registers, size_t num_bytes);

}  // namespace emulator

#endif  // TESTS_CUDA_EMULATOR_INSTRUCTIONS_H_
