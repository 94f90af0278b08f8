// SPDX-License-Identifier: Apache-2.0
/*!
 * \file stock_window_backend.h
 * \brief Layers with a window over the kernels of the cache inside apache-tvm.
 *
 * Those kernels know the window that they were built for, not the argument that ours take:
 *   - decode_sliding lets a row see all that length_info leaves of its pages;
 *   - prefill_sliding takes pages that hold the past alone, of which row r of a sequence sees the
 *     last `window - r - 1` positions; what the rows see of each other comes from prefill_ragged,
 *     which knows no window, and is merged.
 * So a step is cut into chunks of at most `window - 1` rows, each a sequence of its own for the
 * kernels: no row then sees too much of its chunk, and all see some of the past before it.
 */
#ifndef TVM_PAGEDKV_ATTENTION_STOCK_WINDOW_BACKEND_H_
#define TVM_PAGEDKV_ATTENTION_STOCK_WINDOW_BACKEND_H_

#include <memory>
#include <vector>

#include "attention/layer_call.h"
#include "config/cache_config.h"
#include "device/aux_data.h"
#include "device/device_memory.h"
#include "state/forward_plan.h"

namespace pagedkv {

/*! \brief What the kernels need to know beside it. */
struct StockWindowCall : LayerCall {
  int64_t rotary_mode;
  const ffi::Tensor& pages;
  const ffi::Tensor& positions;  // of the rows
};

class StockWindowBackend {
 public:
  StockWindowBackend(const CacheConfig& config, size_t num_groups, ByteCounter counter);
  static bool IsNeededBy(const CacheConfig& config);
  /*! \brief Whether the attention of the layer is the stock cache's, and has a window. */
  static bool Serves(const KernelSet& kernels, const LayerConfig& layer) {
    return layer.window > 0 &&
           (kernels.IsStock(layer.prefill()) || kernels.IsStock(layer.decode()));
  }

  /*! \brief Forgets the arrays of the last step. */
  void BeginStep();
  /*! \brief Attends to the window; k and v are this step's rows, which the pages hold already. */
  void Attend(const StockWindowCall& call, const ffi::Tensor& k, const ffi::Tensor& v);
  /*! \brief Attends to what the window has of the past. */
  void AttendToPast(const StockWindowCall& call);

 private:
  /*! \brief Some rows of a sequence, and the positions that the kernels find in its pages. */
  struct Chunk {
    const Sequence* sequence;
    int64_t num_rows;
    int64_t begin, end;
  };
  /*! \brief The chunks of a group, as arrays; made when a layer first asks for them in a step. */
  struct Tables {
    bool is_made = false;
    bool has_pages = false;
    std::unique_ptr<AuxData> arrays;
    ffi::Tensor length_info;  // [3, chunks]
  };
  enum Array { kRowIndptr, kPageIndptr, kPageValues, kLengthInfo, kFirstSeen, kPastLengths, kNum };

  static std::vector<Chunk> Cut(const ForwardPlan& batch, int64_t window);
  static std::vector<Chunk> CutForPast(const ForwardPlan& batch, int64_t window);
  const Tables& Make(Tables* tables, int32_t group, const std::vector<Chunk>& chunks);
  void Paged(const StockWindowCall& call, const Tables& tables, const ffi::Tensor& o,
             const ffi::Tensor& lse);

  int64_t page_size_;
  DLDevice device_;
  bool has_merged_aux_;
  DLDataType dtype_;
  ByteCounter counter_;
  std::vector<Tables> whole_, past_;         // by group
  ffi::Tensor o_workspace_, lse_workspace_;  // bytes
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_ATTENTION_STOCK_WINDOW_BACKEND_H_
