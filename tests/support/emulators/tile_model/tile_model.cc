// SPDX-License-Identifier: Apache-2.0
/*!
 * \file tile_model.cc
 * \brief The tile registers of AMX, eight for each thread, as functions named as the instructions.
 *
 * What hardware refuses is noted as an error and left out. The arithmetic is that of Intel's
 * manual: tdpbf16ps sums the even and the odd products of a row by fused multiply-adds, and then
 * both with the old sum; it rounds to nearest, takes denormal numbers for zeros, and gives zeros
 * for them.
 */
#include <immintrin.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <thread>

namespace {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64, kRowFloats = 16;

struct Tile {
  int rows = 0, row_bytes = 0;
  alignas(64) uint8_t data[kRows][kRowBytes];
};

struct Unit {
  bool is_configured = false;
  Tile tiles[kTiles];
};

thread_local Unit unit;

struct Counts {
  std::atomic<int64_t> begins{0}, ends{0}, loads{0}, stores{0}, dots{0};
};

Counts counts;
std::mutex mutex;
std::string first_error;            // guarded by mutex
std::set<std::thread::id> threads;  // guarded by mutex: those that configured tiles

void Fail(const std::string& what) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (first_error.empty()) first_error = what;
}

/*! \brief The tile of a number, or nullptr with an error. */
Tile* At(uint8_t number, const char* instruction) {
  if (!unit.is_configured) {
    Fail(std::string(instruction) + " without a configuration");
    return nullptr;
  }
  if (number >= kTiles || unit.tiles[number].rows == 0) {
    Fail(std::string(instruction) + " of tile " + std::to_string(number) + ", which has no rows");
    return nullptr;
  }
  return &unit.tiles[number];
}

float Widen(uint16_t number) {
  const uint32_t bits = static_cast<uint32_t>(number) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

/*! \brief sums += a b, where rows of a are `depth` pairs, for 16 columns of b. */
__attribute__((noinline, target("avx2,fma"))) void Multiply(Tile* sums, const Tile& a,
                                                            const Tile& b) {
  const int depth = a.row_bytes / 4, columns = sums->row_bytes / 4;
  float even[kRows][kRowFloats] = {}, odd[kRows][kRowFloats] = {};
  for (int k = 0; k < depth; ++k) {
    uint16_t pair[2];
    for (int n = 0; n < columns; ++n) {
      std::memcpy(pair, &b.data[k][4 * n], 4);
      even[k][n] = Widen(pair[0]);
      odd[k][n] = Widen(pair[1]);
    }
  }
  for (int m = 0; m < a.rows; ++m) {
    float total[2][kRowFloats] = {}, old[kRowFloats];
    for (int k = 0; k < depth; ++k) {
      uint16_t pair[2];
      std::memcpy(pair, &a.data[m][4 * k], 4);
      const float first = Widen(pair[0]), second = Widen(pair[1]);
      for (int n = 0; n < kRowFloats; ++n) {
        total[0][n] = __builtin_fmaf(first, even[k][n], total[0][n]);
        total[1][n] = __builtin_fmaf(second, odd[k][n], total[1][n]);
      }
    }
    std::memcpy(old, sums->data[m], sizeof old);
    for (int n = 0; n < columns; ++n) old[n] += total[0][n] + total[1][n];
    std::memcpy(sums->data[m], old, sizeof old);
  }
}

}  // namespace

extern "C" {

void tile_model_ldtilecfg(const void* config) {
  const auto* bytes = static_cast<const uint8_t*>(config);
  Unit fresh;
  if (bytes[0] != 1 || bytes[1] != 0) Fail("ldtilecfg: palette 1 from row 0 on is expected");
  for (int i = 2; i < 64; ++i) {
    const bool is_reserved = i < 16 || (i >= 32 && i < 48) || i >= 56;
    if (is_reserved && bytes[i] != 0) Fail("ldtilecfg: byte " + std::to_string(i) + " is set");
  }
  for (int i = 0; i < kTiles; ++i) {
    Tile& tile = fresh.tiles[i];
    tile.row_bytes = bytes[16 + 2 * i] | bytes[17 + 2 * i] << 8;
    tile.rows = bytes[48 + i];
    const bool is_absent = tile.rows == 0 && tile.row_bytes == 0;
    if (!is_absent && (tile.rows == 0 || tile.rows > kRows || tile.row_bytes == 0 ||
                       tile.row_bytes > kRowBytes)) {
      Fail("ldtilecfg: a shape that tile " + std::to_string(i) + " cannot have");
      return;
    }
    std::memset(tile.data, 0, sizeof tile.data);
  }
  fresh.is_configured = true;
  unit = fresh;
  ++counts.begins;
  const std::lock_guard<std::mutex> lock(mutex);
  threads.insert(std::this_thread::get_id());
}

void tile_model_tilerelease() {
  if (!unit.is_configured) Fail("tilerelease without a configuration");
  unit.is_configured = false;
  ++counts.ends;
}

void tile_model_tilezero(uint8_t number) {
  if (Tile* tile = At(number, "tilezero")) std::memset(tile->data, 0, sizeof tile->data);
}

void tile_model_tileloadd64(uint8_t number, const void* at, int64_t step) {
  Tile* tile = At(number, "tileloadd");
  if (tile == nullptr) return;
  std::memset(tile->data, 0, sizeof tile->data);
  for (int row = 0; row < tile->rows; ++row) {
    std::memcpy(tile->data[row], static_cast<const char*>(at) + row * step, tile->row_bytes);
  }
  ++counts.loads;
}

void tile_model_tilestored64(uint8_t number, void* at, int64_t step) {
  const Tile* tile = At(number, "tilestored");
  if (tile == nullptr) return;
  for (int row = 0; row < tile->rows; ++row) {
    std::memcpy(static_cast<char*>(at) + row * step, tile->data[row], tile->row_bytes);
  }
  ++counts.stores;
}

void tile_model_tdpbf16ps(uint8_t sums, uint8_t a, uint8_t b) {
  Tile *to = At(sums, "tdpbf16ps"), *left = At(a, "tdpbf16ps"), *right = At(b, "tdpbf16ps");
  if (to == nullptr || left == nullptr || right == nullptr) return;
  if (sums == a || sums == b || a == b) return Fail("tdpbf16ps: tiles are not distinct");
  if (left->rows != to->rows || right->row_bytes != to->row_bytes ||
      left->row_bytes != 4 * right->rows || to->row_bytes % 4 != 0) {
    return Fail("tdpbf16ps: shapes do not match");
  }
  constexpr unsigned kFlush = 0x8040;  // flush to zero, denormals are zeros
  const unsigned before = _mm_getcsr();
  _mm_setcsr((before & ~0x6000u) | kFlush | 0x1f80);
  Multiply(to, *left, *right);
  _mm_setcsr(before);
  ++counts.dots;
}

/*! \brief Forgets errors and counts. */
void tile_model_reset() {
  for (auto* count : {&counts.begins, &counts.ends, &counts.loads, &counts.stores, &counts.dots}) {
    *count = 0;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  first_error.clear();
  threads.clear();
}

/*! \brief Writes counts: configurations, releases, loads, stores, products, threads. */
void tile_model_counts(int64_t* out) {
  const std::lock_guard<std::mutex> lock(mutex);
  const int64_t all[] = {counts.begins, counts.ends, counts.loads,
                         counts.stores, counts.dots, static_cast<int64_t>(threads.size())};
  std::memcpy(out, all, sizeof all);
}

/*! \brief The first error since the last reset, or "". */
const char* tile_model_error() {
  const std::lock_guard<std::mutex> lock(mutex);
  return first_error.c_str();
}
}
