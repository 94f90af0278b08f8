// SPDX-License-Identifier: Apache-2.0
/*!
 * \file listed_attention.cc
 * \brief Attention of the rows of a step to lists of positions or of blocks.
 */
#include "attention/listed_attention.h"

#include <array>
#include <limits>
#include <utility>
#include <vector>

#include "base/error.h"

namespace pagedkv {

namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxBlockSize = 1 << 20;  // so that sums of sizes and positions fit into int32

/*! \brief Calls visit(row, own) with each row of a step and the position of that row. */
template <typename Visit>
void ForEachRow(const ForwardPlan& plan, const Visit& visit) {
  int64_t row = 0;
  for (int64_t i = 0; i < plan.num_sequences(); ++i) {
    const int64_t begin = plan.PastLength(i);
    for (int64_t n = 0; n < plan.NumAppend(i); ++n) visit(row++, begin + n);
  }
}

const int32_t* DataOf(const ffi::Tensor& tensor) {
  return reinterpret_cast<const int32_t*>(static_cast<const char*>(tensor.data_ptr()) +
                                          tensor.byte_offset());
}

/*! \brief Each position, on the host. */
void CheckPositionIds(const ForwardPlan& plan, const ffi::Tensor& positions) {
  const int32_t* data = DataOf(positions);
  const int64_t width = positions.size(1);
  const ffi::ShapeView strides = positions.strides();
  ForEachRow(plan, [&](int64_t row, int64_t own) {
    const int32_t* list = data + row * strides[0];
    bool is_possible = true;
    for (int64_t j = 0; j < width; ++j) {
      const int32_t position = list[j * strides[1]];
      is_possible &= position >= -1 && position <= own;
    }
    if (is_possible) return;
    for (int64_t j = 0; j < width; ++j) {
      const int32_t position = list[j * strides[1]];
      if (position >= -1 && position <= own) continue;
      Raise(kValueError, "positions[", row, ", ", j, "] is ", position, ", but this row is at ",
            own, ": it may list 0 to ", own, ", and -1 for none");
    }
  });
}

/*! \brief Block lists as [T, lists, width]: one list of a row is for all its heads. */
ffi::Tensor WithListAxis(const ffi::Tensor& blocks) {
  if (blocks.ndim() == 3) return blocks;
  const std::array<int64_t, 3> shape{blocks.size(0), 1, blocks.size(1)};
  const std::array<int64_t, 3> strides{blocks.strides()[0], blocks.size(1), blocks.strides()[1]};
  return blocks.as_strided(ffi::ShapeView(shape.data(), 3), ffi::ShapeView(strides.data(), 3));
}

/*! \brief Each block, on the host. \param blocks [T, lists, width]. */
void CheckBlockIds(const ForwardPlan& plan, const ffi::Tensor& blocks, int64_t block_size) {
  const int32_t* data = DataOf(blocks);
  const int64_t num_lists = blocks.size(1), width = blocks.size(2);
  const ffi::ShapeView strides = blocks.strides();
  std::vector<int64_t> last_list;  // of each block, the last list that has it, counted from 1
  ForEachRow(plan, [&](int64_t row, int64_t own) {
    const int64_t own_block = own / block_size;
    if (static_cast<int64_t>(last_list.size()) <= own_block) last_list.resize(own_block + 1);
    for (int64_t i = 0; i < num_lists; ++i) {
      const int32_t* list = data + row * strides[0] + i * strides[1];
      for (int64_t j = 0; j < width; ++j) {
        const int32_t block = list[j * strides[2]];
        if (block == -1) continue;
        if (block < -1 || block > own_block) {
          Raise(kValueError, "blocks[", row, ", ", i, ", ", j, "] is ", block,
                ", but this row is in block ", own_block, " of ", block_size,
                " positions: it may list 0 to ", own_block, ", and -1 for none");
        }
        const int64_t number = row * num_lists + i + 1;
        if (std::exchange(last_list[block], number) == number) {
          Raise(kValueError, "blocks[", row, ", ", i, ", ", j, "] is ", block,
                ", which this list names twice");
        }
      }
    }
  });
}

}  // namespace

void RequireListStep(const ForwardPlan& plan) {
  if (plan.has_windows()) {
    Raise(kValueError, "attention to lists is not possible for sequences with a window");
  }
  if (plan.has_spans()) {
    Raise(kValueError, "attention to lists is not possible in a step with spans");
  }
  if (plan.needs_tree_mask()) {
    Raise(kValueError, "attention to lists is not possible in a step whose token trees branch");
  }
}

void RequireBlockSize(int64_t block_size, int64_t page_size) {
  if (block_size > 0 && block_size % page_size == 0 && block_size <= kMaxBlockSize) return;
  Raise(kValueError, "block_size must be a positive multiple of the page size (", page_size,
        ") and at most ", kMaxBlockSize, ", got ", block_size);
}

void ListedAttention::Check(const StoredLayer& layer, const RowLists& lists) const {
  const bool has_blocks = lists.block_size.has_value();
  if (!layer.kernels->Has(has_blocks ? KernelName::kAttendBlocks : KernelName::kAttendListed)) {
    Raise(kValueError, "layer ", layer.config.id,
          " was made without attention to lists: its LayerSpec needs lists=True");
  }
  // Its kernels attend to other positions, and its page table lacks those before the window.
  if (layer.config.window > 0) {
    Raise(kValueError, "attention to lists is not possible in layer ", layer.config.id,
          ", which has a window");
  }
  RequireListStep(step_->plan());
  if (!lists.ids.defined()) {
    Raise(kTypeError, has_blocks ? "blocks" : "positions", " must be a tensor, got None");
  }
  has_blocks ? CheckBlocks(layer, lists.ids, *lists.block_size) : CheckPositions(lists.ids);
}

void ListedAttention::CheckPositions(const ffi::Tensor& positions) const {
  if (positions.ndim() != 2) {
    Raise(kValueError, "positions must have shape [rows, width], got ",
          ShapeText(positions.shape()));
  }
  const ForwardPlan& plan = step_->plan();
  step_->tensors().CheckInput("positions", positions, {plan.num_rows(), positions.size(1)}, kInt32);
  if (positions.numel() > kMaxInt32) {
    Raise(kValueError, "the lists of a step may have at most 2**31 - 1 positions, got ",
          positions.numel());
  }
  if (step_->storage().device().device_type == kDLCPU) CheckPositionIds(plan, positions);
}

void ListedAttention::CheckBlocks(const StoredLayer& layer, const ffi::Tensor& blocks,
                                  int64_t block_size) const {
  const int64_t page_size = step_->storage().config().page_size;
  RequireBlockSize(block_size, page_size);
  if (blocks.ndim() != 2 && blocks.ndim() != 3) {
    Raise(kValueError, "blocks must have shape [rows, width] or [rows, lists, width], got ",
          ShapeText(blocks.shape()));
  }
  const ForwardPlan& plan = step_->plan();
  const TensorChecks& tensors = step_->tensors();
  if (blocks.ndim() == 2) {
    tensors.CheckInput("blocks", blocks, {plan.num_rows(), blocks.size(1)}, kInt32);
  } else {
    tensors.CheckInput("blocks", blocks, {plan.num_rows(), blocks.size(1), blocks.size(2)}, kInt32);
    const int64_t num_kv_heads = layer.config.num_kv_heads;
    if (blocks.size(1) == 0 || num_kv_heads % blocks.size(1) != 0) {
      Raise(kValueError, "the lists of a row must divide the ", num_kv_heads,
            " KV heads of the layer among them, got ", ShapeText(blocks.shape()));
    }
  }
  const int64_t pages_of_block = block_size / page_size;
  if (blocks.numel() > kMaxInt32 / pages_of_block) {
    Raise(kValueError, "the lists of a step may have at most 2**31 - 1 pages, got ", blocks.numel(),
          " blocks of ", pages_of_block);
  }
  if (step_->storage().device().device_type == kDLCPU) {
    CheckBlockIds(plan, WithListAxis(blocks), block_size);
  }
}

void ListedAttention::Attend(const StoredLayer& layer, const AttentionCall& call,
                             const RowLists& lists) const {
  ffi::Tensor ids = lists.block_size ? WithListAxis(lists.ids) : lists.ids;
  step_->tensors().MakeCompact({&ids}, Alignment::kElement);
  const StepArrays& arrays = step_->arrays();
  const PageTable table = arrays.page_table(layer.group);
  const auto attend = [&](KernelName name, auto... size) {
    const ffi::Function& kernel = layer.kernels->Get(name);
    WithLastArguments(call, /*window=*/std::nullopt, [&](auto... last) {
      kernel(call.q, arrays.query_indptr(), layer.pages, table.indptr, table.page_ids,
             table.lengths, ids, call.o, call.lse, call.sm_scale, size..., last...);
    });
  };
  if (lists.block_size) {
    attend(KernelName::kAttendBlocks, *lists.block_size);
  } else {
    attend(KernelName::kAttendListed);
  }
}

}  // namespace pagedkv
