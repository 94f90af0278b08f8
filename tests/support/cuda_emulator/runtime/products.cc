// SPDX-License-Identifier: Apache-2.0
// Matrix instructions of four warps, which run on beside them.
#include <utility>
#include <vector>

#include "instructions.h"
#include "machine.h"

namespace emulator {

namespace {

// An operand in shared memory, in slabs of 128 bytes of each row that are swizzled.
struct SharedMatrix {
  uint32_t begin, slab_bytes, atom_bytes;

  explicit SharedMatrix(uint64_t descriptor)
      : begin((descriptor & 0x3fff) << 4),
        slab_bytes((descriptor >> 16 & 0x3fff) << 4),
        atom_bytes((descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 62 != 1) throw Fault("wgmma: the emulator knows swizzles of 128 bytes only");
  }

  // The element at `column` of a row, of 16 bits. A row of A is 16 elements of a slab.
  uint16_t At(int row, int column) const {
    uint32_t address = begin + column / 64 * slab_bytes + column % 64 * 2;
    address += row / 8 * atom_bytes + row % 8 * 128;
    address ^= (address >> 7 & 7) << 4;
    uint16_t bits;
    std::memcpy(&bits, PublishedPointer(address, 2), 2);
    return bits;
  }
};

Warp& CurrentWarp() { return machine().warps[machine().current->linear / kWarpSize]; }

// Products are done at once, or when the warp waits for their group.
void StartProducts(std::function<void()> product) {
  if (machine().schedule.eager) {
    product();
  } else {
    CurrentWarp().open_products.push_back(std::move(product));
  }
}

}  // namespace

void MultiplyTogether(float* const* d, int columns, const uint32_t* a, uint64_t a_descriptor,
                      uint64_t b_descriptor, bool transposed, bool adds, FloatType type) {
  struct Lane {
    std::vector<float*> d;
    uint32_t a[4];
    uint64_t a_descriptor, b_descriptor;
    bool adds;
  } mine{{d, d + columns / 2}, {}, a_descriptor, b_descriptor, adds};
  if (a != nullptr) std::memcpy(mine.a, a, sizeof(mine.a));
  const bool in_registers = a != nullptr;
  const int first_row = machine().current->linear / kWarpSize % 4 * 16;
  auto start = [=](void** slots) {
    std::vector<Lane> lanes;
    for (int i = 0; i < kWarpSize; ++i) lanes.push_back(*static_cast<Lane*>(slots[i]));
    for (const Lane& lane : lanes) {
      if (lane.a_descriptor != lanes[0].a_descriptor ||
          lane.b_descriptor != lanes[0].b_descriptor || lane.adds != lanes[0].adds) {
        throw Fault("wgmma: the lanes of a warp have different descriptors");
      }
    }
    StartProducts([=] {
      float rows[16][16];
      const SharedMatrix b(lanes[0].b_descriptor);
      for (int lane = 0; lane < kWarpSize && in_registers; ++lane) {
        for (int r = 0; r < 4; ++r) {
          for (int e = 0; e < 2; ++e) {
            rows[lane / 4 + r % 2 * 8][lane % 4 * 2 + e + r / 2 * 8] =
                Widen(lanes[lane].a[r] >> 16 * e & 0xffff, type);
          }
        }
      }
      for (int i = 0; i < 16 && !in_registers; ++i) {
        const SharedMatrix shared(lanes[0].a_descriptor);
        for (int k = 0; k < 16; ++k) rows[i][k] = Widen(shared.At(first_row + i, k), type);
      }
      for (int n = 0; n < columns; ++n) {
        float column[16];
        for (int k = 0; k < 16; ++k) column[k] = Widen(transposed ? b.At(k, n) : b.At(n, k), type);
        for (int i = 0; i < 16; ++i) {
          const int lane = i % 8 * 4 + n % 8 / 2, place = n / 8 * 4 + i / 8 * 2 + n % 2;
          float sum = lanes[0].adds ? *lanes[lane].d[place] : 0;
          for (int k = 0; k < 16; ++k) sum += rows[i][k] * column[k];
          *lanes[lane].d[place] = sum;
        }
      }
    });
  };
  MeetInWarp("wgmma", &mine, start, /*is_aligned=*/true);
}

void CommitProducts() {
  MeetInWarp(
      "wgmma.commit_group", nullptr,
      [](void**) {
        Warp& warp = CurrentWarp();
        warp.products.push_back(std::move(warp.open_products));
        warp.open_products.clear();
      },
      /*is_aligned=*/true);
}

void WaitForProducts(int groups_left) {
  auto wait = [=](void**) {
    auto& groups = CurrentWarp().products;
    while (static_cast<int>(groups.size()) > groups_left) {
      for (auto& product : groups.front()) product();
      groups.pop_front();
    }
  };
  MeetInWarp("wgmma.wait_group", nullptr, wait, /*is_aligned=*/true);
}

}  // namespace emulator
