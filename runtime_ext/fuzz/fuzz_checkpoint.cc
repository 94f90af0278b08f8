// SPDX-License-Identifier: Apache-2.0
/*!
 * \file fuzz_checkpoint.cc
 * \brief Checkpoint metadata of any bytes: an Error, or a state that can be written and read again.
 */
#include <cstdlib>
#include <string>

#include "checkpoint_metadata.h"
#include "error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using pagedkv::CheckpointLayout;
  static const CheckpointLayout layout = [] {
    CheckpointLayout small;
    small.page_size = 4;
    small.dtype = "float32";
    small.item_bytes = 4;
    const std::string rope = pagedkv::RopeText("normal", 1e4, 1, "");
    small.layers = {{"mha", 0, 2, 8, 8, rope}, {"mha_sliding", 5, 2, 8, 8, rope}};
    return small;
  }();
  pagedkv::SequenceState state;
  try {
    state = pagedkv::ReadMetadata({reinterpret_cast<const char*>(data), size}, layout);
  } catch (const pagedkv::Error&) {
    return 0;
  }
  const pagedkv::SequenceState again =
      pagedkv::ReadMetadata(pagedkv::WriteMetadata(layout, 0, state), layout);
  if (again.length != state.length || again.first_pages != state.first_pages) std::abort();
  return 0;
}
