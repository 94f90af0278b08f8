// SPDX-License-Identifier: Apache-2.0
/*!
 * \file scratch.h
 * \brief Memory that kernels borrow while a layer is called, for partial states and tiles.
 */
#ifndef TVM_PAGEDKV_STEP_SCRATCH_H_
#define TVM_PAGEDKV_STEP_SCRATCH_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <vector>

#include "device/device_memory.h"

namespace pagedkv {

/*!
 * \brief Blocks of memory that a cache owns. Its layers run one after the other, so all of them
 *   borrow the same blocks. The first calls allocate them, and none is freed before the cache.
 *
 * A launcher on a GPU borrows a block by a global function. Sizes are powers of two, so all blocks
 * take at most twice the largest one for each that a launcher borrows at a time; none is replaced,
 * since a CUDA graph that was captured may write to it.
 *
 * A kernel on a CPU asks `TVMBackendAllocWorkspace`, whose place `ServeCPUKernels` takes. Its first
 * request gets the first block, its second one the second, and so on. A block that is too small is
 * replaced by one of the size of the request, so a block is as large as the largest request.
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

  /*!
   * \brief Lets compiled code for CPUs borrow, too, in libraries that are loaded from now on.
   *
   * Where no cache on a CPU calls, and in threads of TVM's pool, such code has TVM's workspaces, as
   * before.
   */
  static void ServeCPUKernels();

  int64_t num_bytes() const;

 private:
  struct Block {
    ffi::Tensor memory;
    int64_t num_bytes = 0;
    bool is_lent = false;
  };

  static void* AllocateWorkspace(int device_type, int device_id, uint64_t num_bytes, int type_code,
                                 int type_bits);
  static int FreeWorkspace(int device_type, int device_id, void* memory);
  void* LendOnCPU(uint64_t num_bytes);
  Block* Find(int64_t num_bytes);
  void Allocate(int64_t num_bytes);

  DLDevice device_;
  ByteCounter counter_;
  std::vector<Block> blocks_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STEP_SCRATCH_H_
