// SPDX-License-Identifier: Apache-2.0
/*!
 * \file checkpoint_metadata.h
 * \brief The metadata of a checkpoint, as JSON, and which caches can read it.
 *
 * A checkpoint of a sequence is this text, a page group per layer and another one for the states of
 * each recurrent layer. It does not depend on page ids or on what else was in the cache.
 */
#ifndef TVM_PAGEDKV_CHECKPOINT_CHECKPOINT_METADATA_H_
#define TVM_PAGEDKV_CHECKPOINT_CHECKPOINT_METADATA_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint_layout.h"

namespace pagedkv {

/*! \brief The state of a sequence without the content of its pages. */
struct SequenceState {
  int64_t length = 0;
  std::vector<int64_t> first_pages;         // [page group] pages that the window has moved past
  std::vector<int64_t> state_lengths = {};  // [layer with states] what its last state covers
};

/*! \brief The metadata of sequence `sequence_id`. */
std::string WriteMetadata(const CheckpointLayout& layout, int64_t sequence_id,
                          const SequenceState& state);

/*!
 * \brief Reads metadata of a cache with this layout, ours or one of apache-tvm.
 * \throws Error (ValueError) unless it is complete, consistent and matches the layout.
 */
SequenceState ReadMetadata(std::string_view text, const CheckpointLayout& layout);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_CHECKPOINT_CHECKPOINT_METADATA_H_
