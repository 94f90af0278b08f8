// SPDX-License-Identifier: Apache-2.0
/*!
 * \file host_slots.h
 * \brief Slots of host memory that hold values of pages, found by key.
 *
 *     free --Reserve--> reserved --Publish--> published --Reserve (of another)--> reserved
 *       ^                  |                      |
 *       '-----Release------'-------Forget---------'
 *
 * Each layer group has as many slots as every other, of its own size; a state group has fewer. A
 * published slot with pins is not reused; one that is forgotten meanwhile becomes free with its
 * last pin.
 *
 * Eviction takes a slot without pins or children, of the smallest priority, and of these the least
 * recently used one. A child is a slot without
 * pins whose page of text follows, and which was published later. So using the last page of a text
 * keeps all pages before it, without a visit to them.
 *
 * No call allocates memory after construction, and none is safe against other threads.
 */
#ifndef TVM_PAGEDKV_STATE_HOST_MEMORY_HOST_SLOTS_H_
#define TVM_PAGEDKV_STATE_HOST_MEMORY_HOST_SLOTS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "state/host_memory/page_key.h"
#include "state/host_memory/page_value.h"
#include "state/pages/cached_pages.h"

namespace pagedkv {

/*! \brief The values of a group. */
struct ValueSize {
  ValueSize(int64_t bytes, int64_t pages_per_value = 1)  // NOLINT: most groups are a number
      : bytes(bytes), pages_per_value(pages_per_value) {}

  int64_t bytes;            // of a page of all layers
  int64_t pages_per_value;  // pages of text of which one has a value
};

class HostSlots {
 public:
  /*! \return The slots for so many pages of text that fit; 0 if none do, or if there are no groups.
   */
  static int64_t NumSlotsIn(int64_t num_bytes, int32_t page_size,
                            const std::vector<ValueSize>& sizes);
  /*! \brief Bytes of the slots for so many pages of text. */
  static int64_t BytesOf(int64_t num_slots, int32_t page_size, const std::vector<ValueSize>& sizes);

  /*! \brief Values that are not small lie at multiples: disks read and write them in place. */
  static constexpr int64_t kBlockAlignment = 4096;

  /*!
   * \param memory Must outlive this, aligned to kBlockAlignment.
   * \param num_slots Pages of text; groups with a value for each have as many slots.
   * \param sizes [group]
   */
  HostSlots(char* memory, int64_t num_slots, int32_t page_size,
            const std::vector<ValueSize>& sizes);

  int32_t num_slots(int32_t group) const { return groups_[group].num_slots; }
  int32_t num_groups() const { return static_cast<int32_t>(groups_.size()); }
  int64_t num_bytes() const { return num_bytes_; }
  int32_t num_published() const { return num_published_; }
  int64_t num_published_bytes() const { return num_published_bytes_; }
  int64_t num_evicted() const { return num_evicted_; }
  int32_t GroupOf(int32_t slot) const { return slots_[slot].group; }
  const PageValueLayout& LayoutOf(int32_t slot) const { return groups_[GroupOf(slot)].layout; }
  char* ValueOf(int32_t slot) const;
  /*! \brief Changes whenever the slot is given up. */
  uint64_t Generation(int32_t slot) const { return slots_[slot].generation; }
  const PageKey& KeyOf(int32_t slot) const { return slots_[slot].key; }
  bool IsPublished(int32_t slot) const { return slots_[slot].state == State::kPublished; }
  /*! \brief Whether the value came from a store. */
  bool IsFromStore(int32_t slot) const { return slots_[slot].is_from_store; }

  /*! \return The published slot of the key; -1 if there is none. */
  int32_t Find(int32_t group, const PageKey& key) const;
  /*! \brief Takes a free slot, else evicts one. \return -1 when there is none. */
  int32_t Reserve(int32_t group);
  /*! \brief Gives a reserved slot back. */
  void Release(int32_t slot);
  /*!
   * \brief Lets others find a reserved slot whose value is there.
   * \param key Must be new.
   * \param parent The key of the page before.
   */
  void Publish(int32_t slot, const PageKey& key, const PageKey& parent, bool is_from_store,
               uint8_t priority = 0);
  void Pin(int32_t slot);
  /*! \brief Removes a pin; the slot was used just now. */
  void Unpin(int32_t slot);
  /*! \brief Marks a published slot as used just now. */
  void Touch(int32_t slot);
  /*! \brief Lets unused slots of a smaller priority be evicted before a published one. */
  void SetPriority(int32_t slot, uint8_t priority);
  /*! \brief Lets an unused slot without a priority be evicted next. */
  void EvictEarly(int32_t slot);
  /*! \brief Whether a published slot has no pins and no children. */
  bool IsUnused(int32_t slot) const {
    return slots_[slot].num_pins == 0 && slots_[slot].num_children == 0;
  }
  /*! \brief Lets nobody find a published slot any more. */
  void Forget(int32_t slot);

  /*! \throws Error (RuntimeError) that names the broken invariant. */
  void CheckIntegrity() const;

 private:
  static constexpr int32_t kNone = -1;
  enum class State : uint8_t { kFree, kReserved, kPublished, kForgotten };
  struct Slot {
    PageKey key{};
    uint64_t generation = 0;
    int32_t group = 0;
    int32_t num_pins = 0;
    int32_t next = kNone;    // in its bucket
    int32_t parent = kNone;  // the slot of the page before, while it has this generation
    uint64_t parent_generation = 0;
    int32_t num_children = 0;
    uint8_t priority = 0;
    State state = State::kFree;
    bool is_from_store = false;
    bool is_used = false;  // it was used after its children
  };
  struct Group {
    PageValueLayout layout;
    int32_t first_slot;
    int32_t num_slots;
    int64_t offset;  // bytes
    int64_t slot_bytes;
    CachedPages unused;            // published slots without pins or children, from first_slot
    std::vector<int32_t> free;     // a stack
    std::vector<int32_t> buckets;  // the first slot of each; a power of two
  };

  int32_t* BucketOf(int32_t group, const PageKey& key);
  /*! \return The slot's parent; null when there is none. */
  Slot* ParentOf(const Slot& slot);
  /*! \brief A published slot has no pins now: it counts as a child. */
  void Attach(int32_t slot);
  /*! \brief It has pins, or is given up. \param is_in_use Then its parent is in use as well. */
  void Detach(int32_t slot, bool is_in_use);
  void Free(int32_t slot);
  void Unlink(int32_t slot);

  char* memory_;
  int64_t num_bytes_ = 0;
  std::vector<Group> groups_;
  std::vector<Slot> slots_;
  int32_t num_published_ = 0;
  int64_t num_published_bytes_ = 0;
  int64_t num_evicted_ = 0;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_HOST_MEMORY_HOST_SLOTS_H_
