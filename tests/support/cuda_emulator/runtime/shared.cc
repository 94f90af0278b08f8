// SPDX-License-Identifier: Apache-2.0
#include "shared.h"

#include <cstring>
#include <string>

#include "machine.h"

namespace emulator {

namespace {

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

}  // namespace

char* SharedBase() { return shared_memory; }

uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - shared_memory);
}

void BeginShared() {
  Machine& m = machine();
  std::memset(shared_memory, 0xff, sizeof(shared_memory));  // NaN in every float type
  m.published.assign(m.shared_bytes, '\xff');
}

void LoadShared(void* registers, uint32_t address, size_t num_bytes) {
  const char* source = Checked(address, num_bytes);
  std::memcpy(registers, source, num_bytes);
}

void StoreShared(uint32_t address, const void* registers, size_t num_bytes) {
  char* to = Checked(address, num_bytes);
  std::memcpy(to, registers, num_bytes);
  machine().current->written.push_back({address, num_bytes});
}

const char* SharedOfWarp(uint32_t address, size_t num_bytes) { return Checked(address, num_bytes); }

char* BeginSharedWrite(uint32_t address, size_t num_bytes) { return Checked(address, num_bytes); }

void EndSharedWrite(uint32_t address, size_t num_bytes) {
  machine().current->written.push_back({address, num_bytes});
}

void PublishShared() {
  auto& written = machine().current->written;
  char* published = machine().published.data();
  for (const auto& [address, num_bytes] : written) {
    std::memcpy(published + address, shared_memory + address, num_bytes);
  }
  written.clear();
}

void LoadPublished(uint16_t* elements, uint32_t address) {
  const char* latest = SharedOfWarp(address, 16);
  uint16_t written[8];
  std::memcpy(written, latest, 16);
  std::memcpy(elements, &machine().published[address], 16);
  for (int i = 0; i < 8; ++i) {
    if (elements[i] != written[i]) elements[i] = kNotANumber;
  }
}

}  // namespace emulator
