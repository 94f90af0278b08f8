// SPDX-License-Identifier: Apache-2.0
// Shared memory of a block: its bytes, what matrix instructions see of them, and which accesses
// nothing orders.
#ifndef TESTS_CUDA_EMULATOR_SHARED_H_
#define TESTS_CUDA_EMULATOR_SHARED_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace emulator {

constexpr int kMaxWarps = 32;
constexpr size_t kMaxSharedBytes = 227 * 1024;  // of a block, as usual; a device may have less
// Behind the shared memory of a launch, so that an access past its end is seen.
constexpr size_t kGuardBytes = 1024;

// What is known of the shared memory of a block that runs. When an access was is told by the time
// of the warp's clock, which its barriers move on, and by the lane; 0: there was none.
struct SharedRecord {
  struct Write {
    uint32_t when = 0, warp = 0;
    uint32_t same = 0;  // warps that have written the same since: a bit for each
  };
  std::vector<char> published;  // as it was behind proxy fences
  std::vector<Write> writes;    // the last one of each two bytes
  std::vector<uint32_t> reads;  // since then, the last one of each two bytes by each warp
};

// Addresses are offsets into the memory.
char* SharedBase();
uint32_t SharedAddress(const void* pointer);
void BeginShared();

// ld.shared and st.shared
void LoadShared(void* registers, uint32_t address, size_t num_bytes);
void StoreShared(uint32_t address, const void* registers, size_t num_bytes);
// What all lanes of a warp read together, elements of 16 bits. It may be more than they use: what
// another warp writes at the same time is NaN.
void LoadByWarp(uint16_t* elements, uint32_t address, size_t count);
// Where the thread writes from now on, and the end of that.
char* BeginSharedWrite(uint32_t address, size_t num_bytes);
void EndSharedWrite(uint32_t address, size_t num_bytes);

// fence.proxy.async: what the thread has written is there for matrix instructions of warpgroups.
// PTX would allow another thread, behind a barrier, to say so; kernels let each one do it for
// itself.
void PublishShared();
// 8 elements of 16 bits that such an instruction reads: NaN where what was written last is not.
void LoadPublished(uint16_t* elements, uint32_t address);

// A barrier of the warps in a set of bits. None sees the accesses of others but behind one.
void OrderAccesses(uint32_t warps);

}  // namespace emulator

#endif  // TESTS_CUDA_EMULATOR_SHARED_H_
