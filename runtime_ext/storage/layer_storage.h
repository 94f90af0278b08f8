// SPDX-License-Identifier: Apache-2.0
/*!
 * \file layer_storage.h
 * \brief The layers that a cache keeps, their groups, and the memory of their pages.
 */
#ifndef TVM_PAGEDKV_STORAGE_LAYER_STORAGE_H_
#define TVM_PAGEDKV_STORAGE_LAYER_STORAGE_H_

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "config/cache_config.h"
#include "config/kernels.h"
#include "device/device_memory.h"
#include "device/shared_memory.h"
#include "state/sequences/page_geometry.h"
#include "storage/slot_layout.h"

namespace pagedkv {

/*! \brief Layers of one shape, window and type of rows. They share a page pool and its page tables.
 */
struct LayerGroup {
  LayerConfig shape;
  std::vector<int64_t> layers;  // indices into LayerStorage::layers
};

struct StoredLayer {
  LayerConfig config;
  int64_t index;  // into LayerStorage::layers
  int32_t group;
  const KernelSet* kernels;
  SlotLayout layout;
  ffi::Tensor pages;   // see SlotLayout; uint8 [num_pages, page_bytes] of quantized ones
  ffi::Tensor states;  // of a recurrent layer: [num_states, heads, key_dim, value_dim]
  int32_t state_group = -1;
};

class LayerStorage {
 public:
  /*!
   * \brief Allocates the pages of all layers.
   * \param config Must outlive the storage.
   * \throws Error (MemoryError) when the machine does not have that much memory.
   */
  explicit LayerStorage(const CacheConfig& config);
  LayerStorage(const LayerStorage&) = delete;
  LayerStorage& operator=(const LayerStorage&) = delete;

  const CacheConfig& config() const { return config_; }
  DLDevice device() const { return config_.device; }
  int32_t num_groups() const { return static_cast<int32_t>(groups_.size()); }
  const std::vector<LayerGroup>& groups() const { return groups_; }
  const std::vector<StoredLayer>& layers() const { return layers_; }
  /*!
   * \brief The layer with this id in the model.
   * \throws Error (IndexError, ValueError) when this cache keeps no K and V of such a layer.
   */
  const StoredLayer& At(int64_t layer_id) const;
  // The same for what recurrent layers and short convolutions keep.
  const StoredLayer& Recurrent(int64_t layer_id) const;
  const StoredLayer& Conv(int64_t layer_id) const;
  void CheckLayer(int64_t layer_id) const { At(layer_id); }
  void CheckRecurrent(int64_t layer_id) const { Recurrent(layer_id); }
  void CheckConv(int64_t layer_id) const { Conv(layer_id); }

  /*! \brief Type of a layer's rows outside of its pages: quantized ones are read as in a step. */
  DLDataType RowDtype(const LayerConfig& layer) const {
    return layer.codec ? config_.dtype : layer.page_dtype;
  }

  std::vector<int32_t> NumPages() const;  // [group]
  std::vector<int64_t> Windows() const;   // [group], as PageGeometry takes them
  std::vector<StateGroup> StateGroups() const;
  std::vector<int32_t> NumStates() const;  // [state group]
  /*! \brief Rows that a short convolution sees before a row; 0 in groups of other layers. */
  std::vector<int64_t> NumTaps() const;  // [group]

  /*! \brief Counts what the whole cache has allocated on its device. */
  const ByteCounter& counter() const { return counter_; }
  int64_t num_bytes() const { return num_bytes_; }
  ffi::Tensor PagesOf(int64_t layer_id) const { return At(layer_id).pages; }
  /*! \brief The pool of a page group: see page_groups.h. \throws Error (IndexError). */
  ffi::Tensor PoolOf(int64_t page_group) const;
  /*!
   * \brief File descriptor and size of the memory that holds all pages, for other processes to map.
   * [-1, 0] where the pages are not in shared memory.
   */
  ffi::Shape SharedPages() const;

 private:
  void MakeGroups();
  int64_t PartAt(int64_t layer_id, int64_t LayerParts::* part) const;
  void AllocateStates(StoredLayer* layer, int64_t shared_offset) const;
  void RequireMemory() const;
  SlotLayout LayoutOf(const LayerConfig& layer) const;
  int64_t PoolBytes(const LayerConfig& layer) const;
  int64_t StatePoolBytes(const LayerConfig& layer) const;
  ffi::Tensor AllocatePages(const LayerConfig& layer, int64_t shared_offset) const;

  const CacheConfig& config_;
  ByteCounter counter_;
  std::vector<LayerGroup> groups_;
  std::shared_ptr<SharedMemory> shared_pages_;  // with enable_kv_transfer on a CPU
  std::vector<StoredLayer> layers_;
  int64_t num_bytes_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STORAGE_LAYER_STORAGE_H_
