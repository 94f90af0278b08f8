// SPDX-License-Identifier: Apache-2.0
// Matrix instructions of four warps, which run on beside them.
#include <functional>
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
    if (descriptor & 0x3fffc000c000c000) throw Fault("wgmma: a descriptor has other bits set");
  }

  // Eight elements of a row, from `column` on. A row of a step of A is 16 elements of a slab.
  void Load(float* elements, int row, int column, FloatType type) const {
    uint32_t address = begin + column / 64 * slab_bytes + column % 64 * 2;
    address += row / 8 * atom_bytes + row % 8 * 128;
    address ^= (address >> 7 & 7) << 4;
    uint16_t bits[8];
    LoadPublished(bits, address);
    for (int e = 0; e < 8; ++e) elements[e] = Widen(bits[e], type);
  }
};

// What a lane brings to a product.
struct Lane {
  std::vector<float*> d;
  std::vector<const uint32_t*> a;
};

int CurrentWarpNumber() { return machine().current->linear / kWarpSize; }
Warp& CurrentWarp() { return machine().warps[CurrentWarpNumber()]; }

// The warps of a warpgroup have to start the same products, though not at the same time.
void NoteProduct(const Product& what) {
  Machine& m = machine();
  if (!CurrentWarp().is_fenced) throw Fault("wgmma: there is no wgmma.fence before it");
  const size_t group = CurrentWarpNumber() / kWarpgroupWarps;
  if (group >= m.products.size()) throw Fault("wgmma: fewer than four warps");
  const size_t number = CurrentWarp().num_products++;
  std::vector<Product>& started = m.products[group];
  if (number == started.size()) started.push_back(what);
  if (started[number] != what)
    throw Fault("wgmma: the warps of a warpgroup have different operands");
}

void RunProducts(std::vector<std::function<void()>>& products) {
  for (auto& product : products) product();
  products.clear();
}

void Multiply(const std::vector<Lane>& lanes, int first_row, int columns, uint64_t a_descriptor,
              uint64_t b_descriptor, bool transposed, bool adds, FloatType type) {
  constexpr int kDepth = 16, kRows = 16;
  float rows[kRows][kDepth];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    for (size_t r = 0; r < lanes[lane].a.size(); ++r) {
      for (int e = 0; e < 2; ++e) {
        rows[lane / 4 + r % 2 * 8][lane % 4 * 2 + e + r / 2 * 8] =
            Widen(*lanes[lane].a[r] >> 16 * e & 0xffff, type);
      }
    }
  }
  for (int i = 0; i < kRows && lanes[0].a.empty(); ++i) {
    const SharedMatrix a(a_descriptor);
    for (int k = 0; k < kDepth; k += 8) a.Load(&rows[i][k], first_row + i, k, type);
  }
  const SharedMatrix b(b_descriptor);
  for (int begin = 0; begin < columns; begin += 8) {
    float right[kDepth][8];
    for (int i = 0; i < kDepth; ++i) {
      if (transposed) {
        b.Load(right[i], i, begin, type);
      } else {
        float part[8];  // of a column
        b.Load(part, begin + i % 8, i / 8 * 8, type);
        for (int k = 0; k < 8; ++k) right[i / 8 * 8 + k][i % 8] = part[k];
      }
    }
    for (int i = 0; i < kRows; ++i) {
      for (int n = 0; n < 8; ++n) {
        float& d = *lanes[i % 8 * 4 + n / 2].d[begin / 2 + i / 8 * 2 + n % 2];
        float sum = adds ? d : 0;
        for (int k = 0; k < kDepth; ++k) sum += rows[i][k] * right[k][n];
        d = sum;
      }
    }
  }
}

}  // namespace

void MultiplyTogether(float* const* d, int columns, const uint32_t* const* a, uint64_t a_descriptor,
                      uint64_t b_descriptor, bool transposed, bool adds, FloatType type) {
  struct Operands {
    Lane lane;
    Product product;
  } mine;
  mine.lane.d.assign(d, d + columns / 2);
  if (a != nullptr) mine.lane.a.assign(a, a + 4);
  mine.product = {a_descriptor, b_descriptor, adds,          uint64_t(columns),
                  a != nullptr, transposed,   uint64_t(type)};
  const int first_row = CurrentWarpNumber() % kWarpgroupWarps * 16;
  auto start = [=](void** slots) {
    std::vector<Lane> lanes;
    for (int i = 0; i < kWarpSize; ++i) {
      const Operands& operands = *static_cast<Operands*>(slots[i]);
      if (operands.product != mine.product) {
        throw Fault("wgmma: the lanes of a warp have different operands");
      }
      lanes.push_back(operands.lane);
    }
    NoteProduct(mine.product);
    CurrentWarp().open_products.push_back([=] {
      Multiply(lanes, first_row, columns, a_descriptor, b_descriptor, transposed, adds, type);
    });
    if (machine().schedule.has_eager_products()) RunProducts(CurrentWarp().open_products);
  };
  MeetInWarp("wgmma", &mine, start, /*is_aligned=*/true);
}

void FenceProducts() {
  MeetInWarp(
      "wgmma.fence", nullptr, [](void**) { CurrentWarp().is_fenced = true; },
      /*is_aligned=*/true);
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
    Warp& warp = CurrentWarp();
    while (static_cast<int>(warp.products.size()) > groups_left) {
      RunProducts(warp.products.front());
      warp.products.pop_front();
    }
    // Threads may change the registers now, which later products have to be told.
    warp.is_fenced = false;
  };
  MeetInWarp("wgmma.wait_group", nullptr, wait, /*is_aligned=*/true);
}

void EndProducts() {
  Machine& m = machine();
  for (size_t w = 0; w < m.warps.size(); ++w) {
    if (!m.warps[w].open_products.empty()) throw Fault("wgmma: products were never committed");
    const size_t group = w / kWarpgroupWarps;
    if (group < m.products.size() && m.warps[w].num_products != m.products[group].size()) {
      throw Fault("wgmma: a warp of a warpgroup left out what others did");
    }
  }
}

}  // namespace emulator
