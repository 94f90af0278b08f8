// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_transfers.h
 * \brief Pages of the layers to slots of host memory and back, in the stream order of the cache.
 *
 * Between pools and slots that are both in host memory, TVM's threads copy blocks, and compute the
 * checksum of each while it is in the cache of their CPU.
 */
#ifndef TVM_PAGEDKV_PREFIXES_PAGE_TRANSFERS_H_
#define TVM_PAGEDKV_PREFIXES_PAGE_TRANSFERS_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "device/device_stream.h"
#include "state/host_memory/host_memory.h"
#include "state/prefix_cache/prefix_cache.h"
#include "storage/layer_storage.h"

namespace pagedkv {

/*! \brief [pool] sizes of the values of a page of all its layers. */
std::vector<ValueSize> ValueSizesOf(const LayerStorage& storage);

class PageTransfers final : public PageSaver {
 public:
  /*!
   * \brief All must outlive this.
   * \param memory The memory of the slots.
   */
  PageTransfers(const LayerStorage& storage, StreamOrder* order, HostMemory* host_memory,
                ffi::Tensor memory);

  /*!
   * \brief On a device, the copy is queued: Settle lets others find the value.
   *
   * The host must not wait for the device in every step.
   */
  void Save(const std::vector<PageSave>& saves) noexcept override;
  /*! \brief Waits for queued copies, if there are any. */
  void Settle() noexcept;
  /*!
   * \brief Fills pages. They may be read in stream order; their slots are free to go on return.
   * \return Whether all values were whole. Those that were not are gone.
   */
  bool Load(const std::vector<PageLoad>& loads);
  /*! \brief Copies that failed, such as those of a device that is lost. */
  int64_t num_failed_saves() const { return num_failed_saves_; }

 private:
  struct QueuedSave {
    int32_t slot;
    PageText text;                // of `tokens`
    std::vector<int32_t> tokens;  // moving it leaves its data in place
  };

  void SaveOnHost(const std::vector<PageSave>& saves);
  void Queue(const std::vector<PageSave>& saves);
  void QueueOne(const PageSave& save, int32_t slot) noexcept;

  enum class Direction { kSave, kLoad };

  /*! \brief The pages of a layer in a pool: of K and V, of rows, or of states. */
  struct LayerPages {
    ffi::Tensor pages;
    int64_t page_bytes;
    int64_t used_bytes;  // before the padding
  };

  /*! \brief Calls copy(layer, offset in host memory) for each layer of a pool. */
  template <typename Copy>
  void ForEachLayer(int32_t group, int32_t slot, Copy copy) const;
  /*! \brief Copies a block of a value on the host. \return What it adds to the checksum. */
  uint64_t CopyBlock(Direction direction, const PageLoad& value, int64_t block) const;
  /*! \brief [value] checksums of the data. On the host, this copies them to or from their pages. */
  std::vector<uint64_t> CopyBlocks(Direction direction, const std::vector<PageLoad>& values) const;

  const LayerStorage& storage_;
  StreamOrder* order_;
  HostMemory* host_memory_;
  ffi::Tensor memory_;
  std::vector<std::vector<LayerPages>> layers_;  // [pool]
  std::vector<std::vector<int64_t>> offsets_;  // [pool][layer] in the data of a value, and the end
  std::vector<QueuedSave> queued_;
  int64_t num_failed_saves_ = 0;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_PREFIXES_PAGE_TRANSFERS_H_
