// SPDX-License-Identifier: Apache-2.0
// Fibers and their scheduler. A block runs alone, to its end; its threads take turns whenever one
// of them waits, in the order that the schedule asks for.
#include "machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <set>
#include <utility>

#if !defined(__x86_64__)
#error "the emulator switches stacks with x86-64 instructions"
#endif

extern "C" void emulator_switch(void** save_to, void* load_from);

// Saves the registers that a callee must keep, and changes stacks.
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, .-emulator_switch
)");

namespace emulator {

uint64_t* current_path = nullptr;

namespace {

constexpr size_t kStackBytes = 64 * 1024;
constexpr int kSavedRegisters = 6;
constexpr int kMaxThreads = 1024;
// Rounds without progress after which no thread will ever go on.
constexpr int kIdleRounds = 3;

void* scheduler_stack = nullptr;
std::mt19937 random_bits;

struct Submitted {
  size_t number;  // in the log of launches
  Launch launch;
  std::function<void()> kernel;
};
std::vector<Submitted> submitted;
std::vector<void*> freed;          // behind all of these
std::set<const void*> preferring;  // kernels that ask for as much shared memory as there is
size_t depth = 0;                  // grids that have begun and not ended

// Stacks of the grid that runs; those that wait for it keep theirs.
char* Stacks() {
  static std::vector<char*> stacks;
  while (stacks.size() < depth) {
    void* mapped = mmap(nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    stacks.push_back(static_cast<char*>(mapped));
  }
  return stacks[depth - 1];
}

void Yield() { emulator_switch(&machine().current->stack_pointer, scheduler_stack); }

// First function of a fiber. Exceptions must not leave its stack.
void Enter() {
  Machine& m = machine();
  try {
    m.kernel();
    if (!m.current->open.empty()) throw Fault("a thread ended with copies it never committed");
  } catch (const std::exception& error) {
    if (m.fault.empty()) m.fault = error.what();
  }
  m.current->done = true;
  ++m.progress;
  for (;;) Yield();
}

void Resume(Thread& thread) {
  machine().current = &thread;
  current_path = &thread.path;
  emulator_switch(&scheduler_stack, thread.stack_pointer);
}

void BeginBlock() {
  Machine& m = machine();
  const int count = m.block.x * m.block.y * m.block.z;
  if (count > kMaxThreads) throw Fault("a block of more than 1024 threads");
  m.threads.assign(count, Thread());
  m.warps.assign((count + kWarpSize - 1) / kWarpSize, Warp());
  for (Barrier& barrier : m.barriers) barrier = Barrier();
  for (size_t w = 0; w < m.warps.size(); ++w) m.warps[w].seen[w] = 1;
  m.products.assign(m.warps.size() / kWarpgroupWarps, {});
  BeginShared();
  for (int i = 0; i < count; ++i) {
    Thread& thread = m.threads[i];
    thread.linear = i;
    thread.index = {i % m.block.x, i / m.block.x % m.block.y, i / (m.block.x * m.block.y)};
    void** top = reinterpret_cast<void**>(Stacks() + (i + 1) * kStackBytes - 64);
    *--top = nullptr;  // keeps the stack aligned as a call would
    *--top = reinterpret_cast<void*>(Enter);
    for (int r = 0; r < kSavedRegisters; ++r) *--top = nullptr;
    thread.stack_pointer = top;
  }
}

// One round over all threads; whether any is left.
bool RunRound(std::vector<int>& order) {
  Machine& m = machine();
  if (m.schedule.order == Schedule::kShuffled) {
    std::shuffle(order.begin(), order.end(), random_bits);
  }
  if (m.schedule.order != Schedule::kSkewed) {
    for (int i : order) {
      if (!m.threads[i].done) Resume(m.threads[i]);
    }
  } else {  // one warp runs as far ahead of the others as it can
    const int num_warps = m.warps.size();
    const int first = random_bits() % num_warps;
    for (int w = 0; w < num_warps; ++w) {
      const int begin = (first + w) % num_warps * kWarpSize;
      const int end = std::min<int>(begin + kWarpSize, m.threads.size());
      uint64_t before;
      do {
        before = m.progress;
        for (int i = begin; i < end; ++i) {
          if (!m.threads[i].done) Resume(m.threads[i]);
        }
      } while (m.progress != before && m.fault.empty());
    }
  }
  return std::any_of(m.threads.begin(), m.threads.end(), [](const Thread& t) { return !t.done; });
}

void RunBlock() {
  Machine& m = machine();
  BeginBlock();
  std::vector<int> order(m.threads.size());
  std::iota(order.begin(), order.end(), 0);
  int idle = 0;
  uint64_t before = m.progress;
  while (m.fault.empty() && RunRound(order)) {
    idle = m.progress == before ? idle + 1 : 0;
    if (idle > 0 && m.waits_for_before && m.run_before) {
      std::exchange(m.run_before, nullptr)();
      idle = 0;
    }
    before = m.progress;
    if (idle >= kIdleRounds) throw Fault("deadlock: threads wait for what will never come");
  }
  if (m.fault.empty()) EndProducts();
}

// Runs all blocks of a grid, and the grids before when they are waited for, or in the end.
void Run(const Submitted& grid, std::function<void()> run_before) {
  Machine& m = machine();
  const std::vector<char> memory(SharedBase(), SharedBase() + (depth ? kMaxSharedBytes : 0));
  Grid outer = std::exchange(static_cast<Grid&>(m), Grid());
  void* const outer_stack = scheduler_stack;
  ++depth;
  m.grid = grid.launch.grid;
  m.block = grid.launch.block;
  m.shared_bytes = grid.launch.shared_bytes;
  m.kernel = grid.kernel;
  m.run_before = std::move(run_before);
  random_bits.seed(m.schedule.seed);
  std::vector<uint64_t> blocks(uint64_t{m.grid.x} * m.grid.y * m.grid.z);
  std::iota(blocks.begin(), blocks.end(), 0);
  if (m.schedule.order != Schedule::kInTurn) {
    std::shuffle(blocks.begin(), blocks.end(), random_bits);
  }
  std::vector<int64_t> copied_bytes(blocks.size());
  for (uint64_t i : blocks) {
    m.block_index = {static_cast<unsigned>(i % m.grid.x),
                     static_cast<unsigned>(i / m.grid.x % m.grid.y),
                     static_cast<unsigned>(i / (uint64_t{m.grid.x} * m.grid.y))};
    m.copied_bytes = 0;
    try {
      RunBlock();
    } catch (const Fault& fault) {
      m.fault = fault.what();
    }
    copied_bytes[i] = m.copied_bytes;
    if (m.fault.empty()) continue;
    if (m.fault.back() != ')') {
      m.fault += " (block " + std::to_string(m.block_index.x) + ", " +
                 std::to_string(m.block_index.y) + ", " + std::to_string(m.block_index.z) + ")";
    }
    break;
  }
  if (grid.number < m.launches.size()) m.launches[grid.number].copied_bytes = copied_bytes;
  if (m.run_before && m.fault.empty()) m.run_before();
  --depth;
  scheduler_stack = outer_stack;
  static_cast<Grid&>(m) = std::move(outer);
  std::copy(memory.begin(), memory.end(), SharedBase());
}

// Runs the first grids that were submitted.
void RunFirst(size_t count) {
  if (count == 0) return;
  Run(submitted[count - 1], count == 1 ? nullptr : std::function([=] { RunFirst(count - 1); }));
}

}  // namespace

Machine& machine() {
  static Machine* the_machine = new Machine;
  return *the_machine;
}

bool RunGrid(const Launch& launch, std::function<void()> kernel) {
  Machine& m = machine();
  m.fault.clear();
  m.launches.push_back(launch);
  Run({m.launches.size() - 1, launch, std::move(kernel)}, nullptr);
  return m.fault.empty();
}

bool Submit(const Launch& launch, std::function<void()> kernel) {
  Machine& m = machine();
  const bool is_done = launch.begins_early || RunSubmitted(/*launcher_ends=*/false);
  m.launches.push_back(launch);
  submitted.push_back({m.launches.size() - 1, launch, std::move(kernel)});
  return is_done;
}

void FreeAfterSubmitted(void* memory) { freed.push_back(memory); }

void PreferShared(const void* kernel) { preferring.insert(kernel); }

bool PrefersShared(const void* kernel) { return preferring.count(kernel) != 0; }

bool RunSubmitted(bool launcher_ends) {
  Machine& m = machine();
  if (launcher_ends && m.launchers_overlap) return true;
  m.fault.clear();
  RunFirst(submitted.size());
  submitted.clear();
  for (void* memory : freed) std::free(memory);
  freed.clear();
  return m.fault.empty();
}

void WaitForGridBefore() {
  machine().waits_for_before = true;
  WaitUntil([] { return machine().run_before == nullptr; });
}

void WaitUntil(const std::function<bool()>& condition) {
  while (!condition()) Yield();
  ++machine().progress;
}

void MeetInWarp(const char* operation, void* mine, const std::function<void(void**)>& combine,
                bool is_aligned) {
  Machine& m = machine();
  Warp& warp = m.warps[m.current->linear / kWarpSize];
  const uint64_t path = std::exchange(m.current->path, 0);
  if (warp.arrived > 0 && is_aligned && path != warp.path) {
    throw Fault(std::string(operation) + ".aligned in a warp whose threads took other branches");
  }
  warp.path = path;
  if (warp.arrived > 0 && warp.operation != operation) {
    throw Fault(std::string("threads of a warp meet in ") + warp.operation + " and in " +
                operation);
  }
  warp.operation = operation;
  warp.slots[m.current->linear % kWarpSize] = mine;
  const uint64_t phase = warp.phase;
  if (++warp.arrived == kWarpSize) {
    combine(warp.slots);
    warp.arrived = 0;
    ++warp.phase;
    ++m.progress;
  } else {
    WaitUntil([&] { return warp.phase != phase; });
  }
}

}  // namespace emulator

extern "C" void emulator_set_schedule(int order, int eager, unsigned seed) {
  emulator::machine().schedule = {order, eager != 0, seed};
}

// How many multiprocessors the device says it has; 0: as usual.
extern "C" void emulator_set_multiprocessors(int count) {
  emulator::machine().num_multiprocessors = count > 0 ? count : emulator::kUsualMultiprocessors;
}

// How much shared memory a block may have, at most as much as usual; 0: as usual.
extern "C" void emulator_set_block_shared_bytes(int64_t num_bytes) {
  emulator::machine().max_shared_bytes = num_bytes > 0 ? num_bytes : emulator::kMaxSharedBytes;
}

// Of what PTX the device says that its code was made; 0: as usual.
extern "C" void emulator_set_ptx_version(int version) {
  emulator::machine().ptx_version = version > 0 ? version : emulator::kUsualPtxVersion;
}

// Whether kernels may begin before those of the launcher before have ended. Ends what is under way;
// what it failed with, or null.
extern "C" const char* emulator_let_launchers_overlap(int overlap) {
  emulator::machine().launchers_overlap = overlap != 0;
  const bool is_done = emulator::RunSubmitted(/*launcher_ends=*/false);
  return is_done ? nullptr : emulator::machine().fault.c_str();
}

extern "C" void emulator_clear_launches() { emulator::machine().launches.clear(); }

// Grid x, y, z, threads of a block, bytes of shared memory of launch `i`, and whether it begins
// early; 0 past the last one.
extern "C" int emulator_launch(int i, int64_t* out) {
  const auto& launches = emulator::machine().launches;
  if (i >= static_cast<int>(launches.size())) return 0;
  const emulator::Launch& launch = launches[i];
  const int64_t threads = int64_t{launch.block.x} * launch.block.y * launch.block.z;
  const int64_t values[] = {launch.grid.x,
                            launch.grid.y,
                            launch.grid.z,
                            threads,
                            static_cast<int64_t>(launch.shared_bytes),
                            launch.begins_early};
  std::memcpy(out, values, sizeof(values));
  return 1;
}

extern "C" void emulator_set_capturing(int is_capturing) {
  emulator::machine().is_capturing = is_capturing != 0;
}

// Those taken from memory pools since the last call.
extern "C" int64_t emulator_take_num_pool_blocks() {
  return std::exchange(emulator::machine().num_pool_blocks, 0);
}

// Loads that were counted since the last call.
extern "C" int64_t emulator_take_num_loads() {
  return std::exchange(emulator::machine().num_loads, 0);
}

// Bytes that block `block` of launch `i` copied asynchronously.
extern "C" int64_t emulator_copied_bytes(int i, int64_t block) {
  return emulator::machine().launches.at(i).copied_bytes.at(block);
}
