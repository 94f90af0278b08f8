// SPDX-License-Identifier: Apache-2.0
/*!
 * \file debug_kv.h
 * \brief K and V of a sequence as tensors: reads and writes for tests and tools.
 */
#ifndef TVM_PAGEDKV_INSPECT_DEBUG_KV_H_
#define TVM_PAGEDKV_INSPECT_DEBUG_KV_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <vector>

#include "step/step.h"
#include "storage/page_copier.h"
#include "storage/row_io.h"

namespace pagedkv {

class DebugKV {
 public:
  /*! \brief All must outlive this. */
  DebugKV(Step* step, SequenceTable* table, PageCopier* copier)
      : step_(step), table_(table), copier_(copier) {}

  /*!
   * \brief Copies positions [begin, end) of all layers with K and V.
   * \param k [num_layers, end - begin, num_kv_heads, head_dim], written; v as well. Quantized rows
   *   come as numbers of the type that a step has.
   * \throws Error (KeyError; ValueError, also where those layers differ in their heads; IndexError
   *   where a window has dropped the positions).
   */
  void Get(int64_t sequence_id, int64_t begin, int64_t end, ffi::Tensor k, ffi::Tensor v);
  /*! \brief Overwrites the positions from `begin` on; k and v have the shape of Get. */
  void Set(int64_t sequence_id, int64_t begin, ffi::Tensor k, ffi::Tensor v);
  /*! \brief Like Get, of the MLA layers. \param kv [num_layers, end - begin, head_dim], written. */
  void GetMLA(int64_t sequence_id, int64_t begin, int64_t end, ffi::Tensor kv);
  void SetMLA(int64_t sequence_id, int64_t begin, ffi::Tensor kv);

 private:
  /*! \throws Error (ValueError) when there are no such layers, or they differ in their heads. */
  int64_t CountUniformLayers(LayerKind kind, const char* what) const;
  const LayerConfig& ShapeOf(LayerKind kind) const;
  /*! \throws Error (KeyError, ValueError, IndexError) when layers of the kind lack the positions.
   */
  const Sequence& ReadableSequence(LayerKind kind, int64_t sequence_id, int64_t begin,
                                   int64_t end) const;
  Sequence* WritableSequence(int64_t sequence_id, int64_t begin, int64_t count);
  std::vector<int32_t> SlotsOf(const Sequence& sequence, int32_t group, int64_t begin,
                               int64_t end) const;
  /*! \brief Returns SlotsOf each layer group as they will be once the copies are in page tables. */
  std::vector<std::vector<int32_t>> SlotsBehind(const std::vector<PageCopy>& copies,
                                                const Sequence& sequence, int64_t begin,
                                                int64_t end) const;
  /*! \brief Reads the rows of all layers of the kind. */
  void Read(LayerKind kind, const Sequence& sequence, int64_t begin, int64_t end,
            const LayerRows& rows) const;
  /*! \brief Writes rows, to copies of pages that others hold. When it throws all is as before. */
  void Write(LayerKind kind, Sequence* sequence, int64_t begin, int64_t count,
             const LayerRows& rows);
  void WriteToSlots(LayerKind kind, const std::vector<std::vector<int32_t>>& slots,
                    const LayerRows& rows) const;

  Step* step_;
  SequenceTable* table_;
  PageCopier* copier_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_INSPECT_DEBUG_KV_H_
