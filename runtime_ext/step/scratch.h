// SPDX-License-Identifier: Apache-2.0
/*!
 * \file scratch.h
 * \brief Memory that kernels on a GPU borrow while a layer is called, for partial states.
 */
#ifndef TVM_PAGEDKV_STEP_SCRATCH_H_
#define TVM_PAGEDKV_STEP_SCRATCH_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <vector>

#include "device/device_memory.h"

namespace pagedkv {

/*!
 * \brief Blocks of memory that a cache owns. Its layers run one after the other on one stream, so
 *   every launcher borrows the same blocks.
 *
 * The first calls allocate them. None is freed before the cache, since a CUDA graph that was
 * captured may write to it; sizes are powers of two, so all take at most twice the largest one for
 * each block that a launcher borrows at a time.
 */
class Scratch {
 public:
  Scratch(DLDevice device, ByteCounter counter);

  /*! \brief Lets the launchers that this thread calls borrow memory, until it is destroyed. */
  class Lending {
   public:
    explicit Lending(Scratch* scratch);
    /*! \brief Takes back what a launcher that failed has not returned. */
    ~Lending();
    Lending(const Lending&) = delete;
    Lending& operator=(const Lending&) = delete;

   private:
    Scratch* before_;
  };

  /*!
   * \brief Borrows memory of the cache whose layer this thread calls.
   * \param device_id A CUDA device.
   * \param may_allocate Whether there may be a new block.
   * \return Null if no such cache is on the device, or no block is free.
   */
  static void* Borrow(int64_t device_id, int64_t num_bytes, bool may_allocate);
  /*! \brief Returns what was borrowed; false for other memory. */
  static bool Return(void* memory);

  int64_t num_bytes() const;

 private:
  struct Block {
    ffi::Tensor memory;
    int64_t num_bytes;
    bool is_lent = false;
  };

  Block* Find(int64_t num_bytes);
  void Allocate(int64_t num_bytes);

  DLDevice device_;
  ByteCounter counter_;
  std::vector<Block> blocks_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STEP_SCRATCH_H_
