// SPDX-License-Identifier: Apache-2.0
/*!
 * \file shared_memory.h
 * \brief Anonymous host memory that other processes can map read-only by its file descriptor.
 *
 * A forked child does not have it: otherwise it could write what its parent reads.
 */
#ifndef TVM_PAGEDKV_DEVICE_SHARED_MEMORY_H_
#define TVM_PAGEDKV_DEVICE_SHARED_MEMORY_H_

#include <cstdint>

#include "base/process.h"

namespace pagedkv {

class SharedMemory {
 public:
  /*! \throws Error (MemoryError). */
  explicit SharedMemory(int64_t num_bytes);  // data() is null for 0 bytes
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  char* data() const { return data_; }
  int64_t num_bytes() const { return num_bytes_; }
  int descriptor() const { return descriptor_; }

 private:
  void Unmap();

  OwnProcess process_;
  int64_t num_bytes_;
  int descriptor_;
  char* data_ = nullptr;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_DEVICE_SHARED_MEMORY_H_
