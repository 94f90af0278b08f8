// SPDX-License-Identifier: Apache-2.0
// Shared memory of a block: its bytes, and what matrix instructions of warpgroups see of them.
#ifndef TESTS_CUDA_EMULATOR_SHARED_H_
#define TESTS_CUDA_EMULATOR_SHARED_H_

#include <cstddef>
#include <cstdint>

namespace emulator {

constexpr size_t kMaxSharedBytes = 227 * 1024;  // of a block, as usual; a device may have less
// Behind the shared memory of a launch, so that an access past its end is seen.
constexpr size_t kGuardBytes = 1024;

// Addresses are offsets into the memory.
char* SharedBase();
uint32_t SharedAddress(const void* pointer);
void BeginShared();

// ld.shared and st.shared
void LoadShared(void* registers, uint32_t address, size_t num_bytes);
void StoreShared(uint32_t address, const void* registers, size_t num_bytes);
// What all lanes of a warp read together.
const char* SharedOfWarp(uint32_t address, size_t num_bytes);
// Where the thread writes from now on, and the end of that.
char* BeginSharedWrite(uint32_t address, size_t num_bytes);
void EndSharedWrite(uint32_t address, size_t num_bytes);

// fence.proxy.async: what the thread has written is there for matrix instructions of warpgroups.
// PTX would allow another thread, behind a barrier, to say so; kernels let each one do it for
// itself.
void PublishShared();
// 8 elements of 16 bits that such an instruction reads: NaN where what was written last is not.
void LoadPublished(uint16_t* elements, uint32_t address);

}  // namespace emulator

#endif  // TESTS_CUDA_EMULATOR_SHARED_H_
