// SPDX-License-Identifier: Apache-2.0
/*!
 * \file shared_memory.cc
 * \brief A sealed memfd: no file is left behind, nobody shrinks it, and nobody else writes to it.
 */
#include "device/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010  // Linux 5.1
#endif

namespace pagedkv {

SharedMemory::SharedMemory(int64_t num_bytes) : num_bytes_(num_bytes) {
  auto fail = [&](const char* what) {
    const int reason = errno;
    if (descriptor_ >= 0) close(descriptor_);
    Raise(kMemoryError, "cannot share ", num_bytes, " bytes with other processes: ", what, ": ",
          std::strerror(reason));
  };
  descriptor_ = memfd_create("tvm_pagedkv", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor_ < 0) fail("memfd_create");
  if (ftruncate(descriptor_, num_bytes) != 0) fail("ftruncate");
  if (num_bytes > 0) {  // a stage whose layers are all linear has no pages
    void* data = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
    if (data == MAP_FAILED) fail("mmap");
    data_ = static_cast<char*>(data);
  }
  const int seals = F_SEAL_SHRINK | F_SEAL_GROW;
  // Older kernels do not know the seal against writes of others; the rest is not optional.
  if (fcntl(descriptor_, F_ADD_SEALS, seals | F_SEAL_FUTURE_WRITE) != 0 &&
      fcntl(descriptor_, F_ADD_SEALS, seals) != 0) {
    const int reason = errno;
    Unmap();
    errno = reason;
    fail("sealing");
  }
  if (data_ == nullptr) return;
  if (madvise(data_, num_bytes_, MADV_DONTFORK) != 0) {
    const int reason = errno;
    Unmap();
    errno = reason;
    fail("madvise");
  }
  madvise(data_, num_bytes_, MADV_HUGEPAGE);  // a hint
}

SharedMemory::~SharedMemory() {
  Unmap();
  close(descriptor_);
}

void SharedMemory::Unmap() {
  // In a forked child, the addresses may have become those of something else.
  if (data_ != nullptr && process_.IsThis()) munmap(data_, num_bytes_);
}

}  // namespace pagedkv
