// SPDX-License-Identifier: Apache-2.0
/*!
 * \file inspector.h
 * \brief The description and statistics of a cache, and checks that tests run on it.
 */
#ifndef TVM_PAGEDKV_INSPECT_INSPECTOR_H_
#define TVM_PAGEDKV_INSPECT_INSPECTOR_H_

#include <tvm/ffi/container/map.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <vector>

#include "checkpoint/page_groups.h"
#include "prefixes/lower_tiers.h"
#include "step/step.h"
#include "step/tree_commit.h"
#include "storage/page_copier.h"
#include "transfer/kv_sender.h"

namespace pagedkv {

/*! \brief The parts of a cache that statistics come from. */
struct InspectedParts {
  Step* step;
  SequenceTable* table;
  const PageCopier& copier;
  const TreeCommit& tree_commit;
  const PageGroups& page_groups;
  const KVSender& sender;
  const LowerTiers& lower_tiers;
};

class Inspector {
 public:
  /*! \brief All parts must outlive this. */
  explicit Inspector(const InspectedParts& parts) : parts_(parts), table_(parts.table) {}

  /*! \brief Counts since the cache was created, and sizes now. */
  ffi::Map<ffi::String, ffi::Any> Stats() const;
  /*! \brief The configuration of the cache as it was understood. */
  ffi::Map<ffi::String, ffi::Any> Describe() const;

  std::vector<int64_t> SequenceIds() const;  // ascending
  /*! \brief The pages that the group keeps of the sequence. */
  std::vector<int64_t> PageTable(int64_t sequence_id, int64_t group) const;
  /*! \brief The positions that the last state of the sequence covers, the state pages that it has
   * given up, and those that it has. */
  std::vector<int64_t> StateTable(int64_t sequence_id, int64_t state_group) const;
  /*! \brief Of a layer group, or of a state group: PageGeometry::StatePool. The least recently used
   * one comes first. */
  std::vector<int64_t> CachedPages(int64_t pool) const;
  /*! \brief The first position that the group keeps. */
  int64_t FirstPosition(int64_t sequence_id, int64_t group) const;
  /*! \brief The window of a sequence (0: none), its sinks, and how many positions it has dropped.
   */
  std::vector<int64_t> Window(int64_t sequence_id) const;

  /*! \throws Error (RuntimeError) that says which invariant is broken. */
  void CheckIntegrity() const;
  /*! \brief Writes NaN to every slot that nobody holds, so that a kernel that reads one shows. */
  void PoisonFreePages();
  /*! \brief Lets the next pages come in another order. */
  void ShuffleFreePages(int64_t seed);

 private:
  const LayerStorage& storage() const { return parts_.step->storage(); }
  ffi::Array<ffi::Any> StateGroups() const;
  ffi::Map<ffi::String, ffi::Any> DescribeRecurrent(const StoredLayer& layer) const;
  void CheckGroup(int64_t group) const;
  ffi::Map<ffi::String, ffi::Any> DescribeLayer(const StoredLayer& layer) const;
  /*! \brief Whether each slot of the group's pool holds something. */
  std::vector<bool> HeldSlots(int32_t group) const;
  void HoldSequence(const Sequence& sequence, int32_t group, std::vector<bool>* is_held) const;

  InspectedParts parts_;
  SequenceTable* table_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_INSPECT_INSPECTOR_H_
