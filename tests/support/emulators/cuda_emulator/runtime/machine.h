// SPDX-License-Identifier: Apache-2.0
// The emulated machine: a block of threads, each a fiber, that meet in warps and at barriers.
#ifndef TESTS_CUDA_EMULATOR_MACHINE_H_
#define TESTS_CUDA_EMULATOR_MACHINE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "shared.h"

namespace emulator {

constexpr int kWarpSize = 32;
constexpr int kWarpgroupWarps = 4;
constexpr int kNumBarriers = 16;
constexpr int kUsualMultiprocessors = 20;
constexpr int kUsualPtxVersion = 90;

struct Index3 {
  unsigned x = 1, y = 1, z = 1;
};

// What a kernel did that hardware would not forgive; the launch reports it.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// In which order threads run, and when asynchronous copies land.
struct Schedule {
  enum Order { kInTurn = 0, kShuffled = 1, kSkewed = 2 };
  int order = kInTurn;
  // Copies land at once; otherwise as late as a wait allows.
  bool eager = false;
  uint32_t seed = 1;

  // So do products of warpgroups, but that one of the eager orders shows what comes too early.
  bool has_eager_products() const { return eager && order != kSkewed; }
};

// Threads of a warp deposit a pointer to what they bring to a collective operation.
struct Warp {
  int arrived = 0;
  uint64_t phase = 0;
  const char* operation = nullptr;
  uint64_t path = 0;  // of the last thread that arrived
  void* slots[kWarpSize] = {};
  // Groups of products that were committed, and the products of the open one.
  std::deque<std::vector<std::function<void()>>> products;
  std::vector<std::function<void()>> open_products;
  size_t num_products = 0;  // since the block began
  bool is_fenced = false;   // wgmma.fence, since it last waited for products
  // Accesses of a warp before such a time of its clock come before what this one does now.
  uint32_t seen[kMaxWarps] = {};
};

struct Barrier {
  int arrived = 0;
  int expected = 0;
  uint64_t phase = 0;
  uint32_t warps = 0;  // that have arrived: a bit for each
};

struct Thread {
  void* stack_pointer = nullptr;
  bool done = false;
  Index3 index;
  int linear = 0;
  uint64_t path = 0;  // a hash of its branches since the threads of its warp last met
  // Groups of asynchronous copies that were committed, and the copies of the open one.
  std::deque<std::vector<std::function<void()>>> committed;
  std::vector<std::function<void()>> open;
  // Bytes of shared memory written since its last proxy fence: where they begin, and how many.
  std::vector<std::pair<uint32_t, size_t>> written;
};

struct Launch {
  Index3 grid, block;
  size_t shared_bytes = 0;
  bool begins_early = false;  // it does not wait for the launch before, unless its threads do
  std::vector<int64_t> copied_bytes;  // by the asynchronous copies of each block
};

// Memory of a device that a kernel or a copy is given.
struct Access {
  const void* pointer;
  bool writes = true;
};

// Queues a launch on a stream of a device; false when that refuses it.
using DeviceLaunch = bool (*)(void* stream, const Launch& launch,
                              const std::vector<Access>& accesses, std::function<void()> kernel);

// Memory in the order of a stream.
using DeviceTake = void* (*)(void* stream, size_t num_bytes);
using DeviceGiveBack = void (*)(void* stream, void* memory);

// Operands and kind of a product of a warpgroup, but for registers.
using Product = std::array<uint64_t, 7>;

// A grid that runs, and the block of it that does.
struct Grid {
  Index3 grid, block, block_index;
  size_t shared_bytes = 0;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Barrier barriers[kNumBarriers];
  SharedRecord shared;
  // What the warps of each warpgroup have multiplied: all of them the same.
  std::vector<std::vector<Product>> products;
  Thread* current = nullptr;
  int64_t copied_bytes = 0;  // by the block
  std::function<void()> kernel;
  // What runs the grids before; empty when they have ended.
  std::function<void()> run_before;
  bool waits_for_before = false;
};

struct Machine : Grid {
  Schedule schedule;
  int num_multiprocessors = kUsualMultiprocessors;
  size_t max_shared_bytes = kMaxSharedBytes;  // of a block
  int ptx_version = kUsualPtxVersion;
  bool launchers_overlap = false;  // so that one may begin early behind another
  bool is_capturing = false;       // what streams are told
  // Where launchers that take tensors of a device send their launches.
  DeviceLaunch launch_on_device = nullptr;
  DeviceTake take_on_device = nullptr;
  DeviceGiveBack give_back_on_device = nullptr;
  std::vector<Launch> launches;  // since the log was cleared
  int64_t num_loads = 0;         // from arguments whose loads are counted
  int64_t num_pool_blocks = 0;   // that were taken from memory pools
  uint64_t progress = 0;         // counts what may let a waiting thread go on
  std::string fault;             // of the last launch; empty: none
};

Machine& machine();

// An argument, of which a load is counted.
template <typename T>
T* Counted(T* argument) {
  ++machine().num_loads;
  return argument;
}

// Runs all blocks of a launch; false after a fault, which `machine().fault` tells.
bool RunGrid(const Launch& launch, std::function<void()> kernel);

// Queues a launch. Those that begin early run as far as they can before the one before them does.
bool Submit(const Launch& launch, std::function<void()> kernel);
// Frees memory when all launches so far have ended.
void FreeAfterSubmitted(void* memory);
// Runs what was queued, unless a launcher ends and its launches may overlap those of the next one.
bool RunSubmitted(bool launcher_ends);

// Kernels that ask for as much shared memory as there is. Libraries stay loaded, so that a kernel
// keeps its address.
void PreferShared(const void* kernel);
bool PrefersShared(const void* kernel);

// griddepcontrol.wait
void WaitForGridBefore();

// Requires that the warps of a block that ends have committed the same products.
void EndProducts();

// Lets other threads run until `condition` holds.
void WaitUntil(const std::function<bool()>& condition);

extern uint64_t* current_path;  // of the thread that runs

// Notes which way a thread takes at a branch. Kernels do this all the time.
[[gnu::always_inline]] inline bool Branch(bool condition) {
  *current_path = (*current_path ^ (condition ? 1 : 2)) * 1099511628211u;
  return condition;
}

// Threads of a warp meet; the last one runs `combine` on the pointers that all deposited. Where the
// operation is `.aligned`, all of them must have taken the same branches since they last met: PTX
// does not promise that threads come together again behind a branch.
void MeetInWarp(const char* operation, void* mine, const std::function<void(void**)>& combine,
                bool is_aligned = false);

}  // namespace emulator

#endif  // TESTS_CUDA_EMULATOR_MACHINE_H_
