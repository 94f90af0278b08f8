// SPDX-License-Identifier: Apache-2.0
// Copies, barriers, shuffles and matrix instructions, as the PTX ISA describes them.
#include "instructions.h"

#include <utility>
#include <vector>

#include "machine.h"

namespace emulator {

namespace {

std::vector<float> MakeTable(FloatType type) {
  std::vector<float> table(1 << 16);
  for (uint32_t bits = 0; bits < table.size(); ++bits) {
    if (type == kBFloat16) {
      const uint32_t wide = bits << 16;
      std::memcpy(&table[bits], &wide, 4);
    } else {
      const uint16_t narrow = bits;
      _Float16 value;
      std::memcpy(&value, &narrow, 2);
      table[bits] = value;
    }
  }
  return table;
}

const std::vector<float>& Table(FloatType type) {
  static const std::vector<float> tables[] = {MakeTable(kFloat16), MakeTable(kBFloat16)};
  return tables[type];
}

void RequireAligned(const void* pointer, size_t num_bytes) {
  if (reinterpret_cast<uintptr_t>(pointer) % num_bytes != 0) {
    throw Fault("global memory: an access that is not aligned");
  }
}

}  // namespace

float Widen(uint16_t bits, FloatType type) { return Table(type)[bits]; }

uint16_t Narrow(float value, FloatType type) {
  uint16_t narrow;
  if (type == kFloat16) {
    const _Float16 half = static_cast<_Float16>(value);
    std::memcpy(&narrow, &half, 2);
    return narrow;
  }
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

uint32_t PermuteBytes(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = selector >> 4 * i & 0xf;
    if (digit > 7) throw Fault("prmt: the emulator does not copy signs");
    result |= static_cast<uint32_t>(bytes >> 8 * digit & 0xff) << 8 * i;
  }
  return result;
}

uint32_t FmaPairs(uint32_t a, uint32_t b, uint32_t c, FloatType type) {
  uint32_t result = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const auto half = [&](uint32_t pair) -> double { return Widen(pair >> shift, type); };
    const float sum = static_cast<float>(half(a) * half(b) + half(c));
    result |= uint32_t{Narrow(sum, type)} << shift;
  }
  return result;
}

void SyncBarrier(int id, int num_threads) {
  Machine& m = machine();
  Barrier& barrier = m.barriers[id];
  const uint64_t phase = barrier.phase;
  ArriveAtBarrier(id, num_threads);
  WaitUntil([&] { return barrier.phase != phase; });
  m.current->path = 0;
}

void ArriveAtBarrier(int id, int num_threads) {
  Machine& m = machine();
  Barrier& barrier = m.barriers[id];
  if (barrier.arrived > 0 && barrier.expected != num_threads) {
    throw Fault("threads expect different numbers at a barrier");
  }
  barrier.expected = num_threads;
  barrier.warps |= 1u << m.current->linear / kWarpSize;
  if (++barrier.arrived == num_threads) {
    OrderAccesses(std::exchange(barrier.warps, 0));
    barrier.arrived = 0;
    ++barrier.phase;
  }
  ++m.progress;
}

void CopyAsync(uint32_t to, const void* from, int num_bytes, int source_bytes) {
  char* destination = BeginSharedWrite(to, num_bytes);
  if (source_bytes > 0) RequireAligned(from, num_bytes);
  auto copy = [=] {
    std::memset(destination, 0, num_bytes);
    if (source_bytes > 0) std::memcpy(destination, from, source_bytes);
  };
  Machine& m = machine();
  m.copied_bytes += source_bytes;
  const bool is_eager = m.schedule.eager;
  if (is_eager) copy();
  m.current->open.push_back([=] {
    if (!is_eager) copy();
    EndSharedWrite(to, num_bytes);
  });
}

void CommitCopies() {
  Thread& thread = *machine().current;
  thread.committed.push_back(std::move(thread.open));
  thread.open.clear();
}

void WaitForCopies(int groups_left) {
  Thread& thread = *machine().current;
  while (static_cast<int>(thread.committed.size()) > groups_left) {
    for (auto& copy : thread.committed.front()) copy();
    thread.committed.pop_front();
  }
}

void Shuffle(ShuffleMode mode, void* value, size_t num_bytes, int operand, int width) {
  struct Lane {
    char* value;
    int operand;
  } mine{static_cast<char*>(value), operand};
  MeetInWarp("shfl", &mine, [=](void** slots) {
    std::vector<char> values(kWarpSize * num_bytes);
    for (int i = 0; i < kWarpSize; ++i) {
      std::memcpy(&values[i * num_bytes], static_cast<Lane*>(slots[i])->value, num_bytes);
    }
    for (int i = 0; i < kWarpSize; ++i) {
      const Lane& lane = *static_cast<Lane*>(slots[i]);
      const int segment = i & ~(width - 1), own = i & (width - 1);
      int from = lane.operand & (width - 1);
      if (mode == kShuffleXor) from = own ^ lane.operand;
      if (mode == kShuffleDown) from = own + lane.operand;
      if (mode == kShuffleUp) from = own - lane.operand;
      if (from < 0 || from >= width) from = own;
      std::memcpy(lane.value, &values[(segment + from) * num_bytes], num_bytes);
    }
  });
}

bool IsAny(bool condition) {
  struct Lane {
    bool condition, is_any;
  } mine{condition, false};
  MeetInWarp("vote", &mine, [](void** slots) {
    bool is_any = false;
    for (int i = 0; i < kWarpSize; ++i) is_any |= static_cast<Lane*>(slots[i])->condition;
    for (int i = 0; i < kWarpSize; ++i) static_cast<Lane*>(slots[i])->is_any = is_any;
  });
  return mine.is_any;
}

void SyncWarp() {
  const uint32_t warp = 1u << machine().current->linear / kWarpSize;
  MeetInWarp("bar.warp.sync", nullptr, [=](void**) { OrderAccesses(warp); });
}

void LoadMatrices(uint32_t* const* registers, int count, bool transposed, uint32_t address) {
  struct Lane {
    uint32_t* const* registers;
    uint32_t address;
  } mine{registers, address};
  auto load = [=](void** slots) {
    for (int matrix = 0; matrix < count; ++matrix) {
      uint16_t rows[8][8];
      for (int i = 0; i < 8; ++i) {
        const uint32_t row = static_cast<Lane*>(slots[matrix * 8 + i])->address;
        LoadByWarp(rows[i], row, 8);
      }
      for (int lane = 0; lane < kWarpSize; ++lane) {
        const int i = lane / 4, j = lane % 4 * 2;
        const uint16_t low = transposed ? rows[j][i] : rows[i][j];
        const uint16_t high = transposed ? rows[j + 1][i] : rows[i][j + 1];
        *static_cast<Lane*>(slots[lane])->registers[matrix] = low | uint32_t{high} << 16;
      }
    }
  };
  MeetInWarp("ldmatrix", &mine, load, /*is_aligned=*/true);
}

void MultiplyMatrices(float* const* d, const uint32_t* a, const uint32_t* b, const float* c,
                      FloatType type) {
  struct Lane {
    float* const* d;
    const uint32_t *a, *b;
    const float* c;
  } mine{d, a, b, c};
  const float* table = Table(type).data();
  auto multiply = [=](void** slots) {
    float rows[16][16], columns[16][8];  // of A; of B, [k][n]
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const Lane& from = *static_cast<Lane*>(slots[lane]);
      const int group = lane / 4, pair = lane % 4 * 2;
      for (int e = 0; e < 2; ++e) {
        for (int r = 0; r < 4; ++r) {
          rows[group + r % 2 * 8][pair + e + r / 2 * 8] = table[from.a[r] >> 16 * e & 0xffff];
        }
        for (int r = 0; r < 2; ++r) {
          columns[pair + e + r * 8][group] = table[from.b[r] >> 16 * e & 0xffff];
        }
      }
    }
    float products[16][8] = {};
    for (int i = 0; i < 16; ++i) {
      for (int k = 0; k < 16; ++k) {
        for (int n = 0; n < 8; ++n) products[i][n] += rows[i][k] * columns[k][n];
      }
    }
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const Lane& to = *static_cast<Lane*>(slots[lane]);
      const int group = lane / 4, pair = lane % 4 * 2;
      float sums[4];
      for (int r = 0; r < 4; ++r) sums[r] = to.c[r] + products[group + r / 2 * 8][pair + r % 2];
      for (int r = 0; r < 4; ++r) *to.d[r] = sums[r];
    }
  };
  MeetInWarp(type == kFloat16 ? "mma.f16" : "mma.bf16", &mine, multiply, /*is_aligned=*/true);
}

void Load(void* registers, const void* from, size_t num_bytes) {
  RequireAligned(from, num_bytes);
  std::memcpy(registers, from, num_bytes);
}

void Store(void* to, const void* registers, size_t num_bytes) {
  RequireAligned(to, num_bytes);
  std::memcpy(to, registers, num_bytes);
}

}  // namespace emulator
