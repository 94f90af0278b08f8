// SPDX-License-Identifier: Apache-2.0
#include "shared.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "machine.h"

namespace emulator {

namespace {

constexpr size_t kUnitBytes = 2;
constexpr uint32_t kLaneBits = 6, kLaneMask = (1 << kLaneBits) - 1, kSeveralLanes = kWarpSize;
constexpr uint16_t kNotANumber = 0x7fff;  // in both types of 16 bits

alignas(1024) char shared_memory[kMaxSharedBytes + kGuardBytes];

char* Checked(uint32_t address, size_t num_bytes) {
  if (address + num_bytes > machine().shared_bytes) {
    throw Fault("shared memory: " + std::to_string(num_bytes) + " bytes at " +
                std::to_string(address) + " of " + std::to_string(machine().shared_bytes));
  }
  if (address % num_bytes != 0) throw Fault("shared memory: an access that is not aligned");
  return shared_memory + address;
}

// When the current thread, or its warp together, does something.
struct Now {
  const uint32_t warp = machine().current->linear / kWarpSize;
  const uint32_t* seen = machine().warps[warp].seen;
  uint32_t when;

  explicit Now(bool by_warp = false) {
    const uint32_t lane = machine().current->linear % kWarpSize;
    when = seen[warp] << kLaneBits | (by_warp ? kSeveralLanes : lane);
  }

  // Whether something orders this behind an access of before, by a warp.
  bool IsBehind(uint32_t before, uint32_t of) const {
    if (before >> kLaneBits < seen[of] || before == 0) return true;
    return of == warp && before == when && (when & kLaneMask) != kSeveralLanes;
  }

  bool IsBehind(const SharedRecord::Write& write) const {
    return (write.same >> warp & 1) != 0 || IsBehind(write.when, write.warp);
  }

  void Refuse(uint32_t of, size_t unit, const char* what) const {
    throw Fault("shared memory: a race at byte " + std::to_string(unit * kUnitBytes) + ": " + what +
                (of == warp ? " another lane of warp " : " warp ") + std::to_string(of) +
                ", and no barrier between");
  }
};

template <typename F>
void ForUnits(uint32_t address, size_t num_bytes, F use) {
  for (size_t u = address / kUnitBytes; u < (address + num_bytes) / kUnitBytes; ++u) use(u);
}

void NoteRead(size_t unit, const Now& now) {
  Machine& m = machine();
  uint32_t& last = m.shared.reads[unit * m.warps.size() + now.warp];
  const bool by_others = last >> kLaneBits == now.when >> kLaneBits && last != now.when;
  last = now.when;
  if (by_others) last = (last & ~kLaneMask) | kSeveralLanes;
}

void NoteWrite(uint32_t address, size_t num_bytes) {
  SharedRecord& record = machine().shared;
  const size_t num_warps = machine().warps.size();
  const Now now;
  ForUnits(address, num_bytes, [&](size_t unit) {
    SharedRecord::Write& write = record.writes[unit];
    if (!now.IsBehind(write.when, write.warp)) {
      now.Refuse(write.warp, unit, "written behind a write by");
    }
    write = {now.when, now.warp, 0};
    uint32_t* reads = &record.reads[unit * num_warps];
    for (size_t w = 0; w < num_warps; ++w) {
      if (!now.IsBehind(std::exchange(reads[w], 0), w)) {
        now.Refuse(w, unit, "written behind a read by");
      }
    }
  });
}

// Writes of what is there already race with nothing, and the warp may read it from now on.
void NoteSameWrite(uint32_t address, size_t num_bytes) {
  const Now now;
  ForUnits(address, num_bytes, [&](size_t unit) {
    SharedRecord::Write& write = machine().shared.writes[unit];
    if (write.when == 0) {
      write = {now.when, now.warp, 0};
    } else {
      write.same |= 1u << now.warp;
    }
  });
}

}  // namespace

char* SharedBase() { return shared_memory; }

uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - shared_memory);
}

void BeginShared() {
  Machine& m = machine();
  std::memset(shared_memory, 0xff, sizeof(shared_memory));  // NaN in every float type
  m.shared.published.assign(m.shared_bytes, '\xff');
  m.shared.writes.assign(m.shared_bytes / kUnitBytes, {});
  m.shared.reads.assign(m.shared_bytes / kUnitBytes * m.warps.size(), 0);
}

void LoadShared(void* registers, uint32_t address, size_t num_bytes) {
  const char* source = Checked(address, num_bytes);
  const Now now;
  ForUnits(address, num_bytes, [&](size_t unit) {
    const SharedRecord::Write& write = machine().shared.writes[unit];
    if (!now.IsBehind(write)) now.Refuse(write.warp, unit, "read behind a write by");
    NoteRead(unit, now);
  });
  std::memcpy(registers, source, num_bytes);
}

void StoreShared(uint32_t address, const void* registers, size_t num_bytes) {
  char* to = Checked(address, num_bytes);
  if (std::memcmp(to, registers, num_bytes) == 0) {
    NoteSameWrite(address, num_bytes);
  } else {
    NoteWrite(address, num_bytes);
  }
  std::memcpy(to, registers, num_bytes);
  machine().current->written.push_back({address, num_bytes});
}

void LoadByWarp(uint16_t* elements, uint32_t address, size_t count) {
  std::memcpy(elements, Checked(address, count * kUnitBytes), count * kUnitBytes);
  const Now now(/*by_warp=*/true);
  ForUnits(address, count * kUnitBytes, [&](size_t unit) {
    if (now.IsBehind(machine().shared.writes[unit])) {
      NoteRead(unit, now);
    } else {
      elements[unit - address / kUnitBytes] = kNotANumber;
    }
  });
}

char* BeginSharedWrite(uint32_t address, size_t num_bytes) {
  char* to = Checked(address, num_bytes);
  NoteWrite(address, num_bytes);
  return to;
}

void EndSharedWrite(uint32_t address, size_t num_bytes) {
  const Now now;
  ForUnits(address, num_bytes,
           [&](size_t unit) { machine().shared.writes[unit] = {now.when, now.warp, 0}; });
  machine().current->written.push_back({address, num_bytes});
}

void PublishShared() {
  auto& written = machine().current->written;
  char* published = machine().shared.published.data();
  for (const auto& [address, num_bytes] : written) {
    std::memcpy(published + address, shared_memory + address, num_bytes);
  }
  written.clear();
}

void LoadPublished(uint16_t* elements, uint32_t address) {
  uint16_t written[8];
  LoadByWarp(written, address, 8);
  std::memcpy(elements, &machine().shared.published[address], 16);
  for (int i = 0; i < 8; ++i) {
    if (elements[i] != written[i]) elements[i] = kNotANumber;
  }
}

void OrderAccesses(uint32_t warps) {
  Machine& m = machine();
  uint32_t joint[kMaxWarps] = {};
  for (int w = 0; w < kMaxWarps; ++w) {
    if ((warps >> w & 1) == 0) continue;
    ++m.warps[w].seen[w];
    for (int of = 0; of < kMaxWarps; ++of) joint[of] = std::max(joint[of], m.warps[w].seen[of]);
  }
  for (int w = 0; w < kMaxWarps; ++w) {
    if (warps >> w & 1) std::memcpy(m.warps[w].seen, joint, sizeof(joint));
  }
}

}  // namespace emulator
