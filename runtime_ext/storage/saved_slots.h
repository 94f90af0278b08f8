// SPDX-License-Identifier: Apache-2.0
/*!
 * \file saved_slots.h
 * \brief The content of some slots of some layers, to be restored after a failure.
 */
#ifndef TVM_PAGEDKV_STORAGE_SAVED_SLOTS_H_
#define TVM_PAGEDKV_STORAGE_SAVED_SLOTS_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <vector>

#include "storage/layer_storage.h"

namespace pagedkv {

class SavedSlots {
 public:
  /*! \param num_slots Slots of each layer that will be saved. */
  SavedSlots(const LayerStorage& storage, int64_t num_slots);

  /*! \brief Copies slots on the current stream. The array must outlive this. */
  void Save(const StoredLayer& layer, const int32_t* slots, int64_t count);
  void Restore();

 private:
  struct Entry {
    const StoredLayer* layer;
    const int32_t* slots;
    int64_t count;
    int64_t offset;  // in the buffer
  };

  void* stream_;
  ffi::Tensor buffer_;
  int64_t end_ = 0;
  std::vector<Entry> saved_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STORAGE_SAVED_SLOTS_H_
