// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sequence_table.h
 * \brief Sequences: a length and a page table per layer group. Fork, pop, remove, slide.
 *
 * Which pages a group keeps: see page_geometry.h. Pages that a window moves past become cached. A
 * fork or pop that goes further back takes them back, unless they were reclaimed.
 *
 * Copies before a write, imports and transfers are classes of their own that work on a table:
 * CopyOnWrite, SequenceImports, Receives, Sends.
 *
 * Every call checks its arguments first: one that throws has changed nothing.
 */
#ifndef TVM_PAGEDKV_STATE_TABLE_SEQUENCE_TABLE_H_
#define TVM_PAGEDKV_STATE_TABLE_SEQUENCE_TABLE_H_

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "state/pages/page_pins.h"
#include "state/pages/page_pool.h"
#include "state/prefix_cache/prefix_cache.h"
#include "state/sequences/page_geometry.h"
#include "state/sequences/sequence.h"
#include "state/sequences/window_histories.h"

namespace pagedkv {

class SequenceTable {
 public:
  /*!
   * \param max_num_sequences The maximum of one step. Any number of sequences may exist.
   * \param num_pages Pages of each layer group.
   * \param windows Window of each layer group, as PageGeometry takes it; 0 for none.
   * \param state_groups States of recurrent layers.
   * \param num_states Pages of each state group.
   * \param capacity_pages Pages of all texts that the cache has room for; -1: those of the largest
   *   pool. A smaller pool has no room for the histories of all running sequences.
   */
  SequenceTable(int64_t max_num_sequences, int32_t page_size, const std::vector<int32_t>& num_pages,
                std::vector<int64_t> windows = {}, std::vector<StateGroup> state_groups = {},
                const std::vector<int32_t>& num_states = {}, int64_t capacity_pages = -1);

  /*! \brief Other classes point into a table. */
  SequenceTable(const SequenceTable&) = delete;
  SequenceTable& operator=(const SequenceTable&) = delete;

  int32_t page_size() const { return geometry_.page_size(); }
  const PageGeometry& geometry() const { return geometry_; }
  int32_t num_groups() const { return geometry_.num_groups(); }
  int32_t num_state_groups() const { return geometry_.num_state_groups(); }
  int64_t max_num_sequences() const { return max_num_sequences_; }
  int64_t num_sequences() const { return static_cast<int64_t>(sequences_.size()); }
  /*! \brief Sum of the lengths; shared positions count once per sequence. */
  int64_t total_length() const { return total_length_; }
  /*! \brief The pool of a layer group, or with PageGeometry::StatePool of a state group. */
  PagePool& pool(int32_t group) { return pools_[group]; }
  const PagePool& pool(int32_t group) const { return pools_[group]; }
  const std::unordered_map<int64_t, Sequence>& sequences() const { return sequences_; }
  const RecurrentStates& states() const { return states_; }
  PagePins& pins() { return pins_; }
  const PagePins& pins() const { return pins_; }
  PrefixCache& prefixes() { return prefixes_; }
  const PrefixCache& prefixes() const { return prefixes_; }

  /*!
   * \brief A sequence whose content is complete.
   * \throws Error (KeyError) when there is none; (ValueError) while it is being imported.
   */
  Sequence& At(int64_t id);
  const Sequence& At(int64_t id) const;
  /*! \brief Like At, for a sequence of this table; see num_removals. */
  Sequence& Use(Sequence* sequence);
  /*! \brief Like At, also for a sequence that is being imported. */
  const Sequence& Peek(int64_t id) const;
  /*! \brief Like Peek; nullptr when there is none. */
  Sequence* Find(int64_t id);

  void Add(int64_t id);
  /*!
   * \brief Adds a sequence that begins with the pages of an earlier text of these tokens.
   * \return Its length; see PrefixCache.
   */
  int64_t AddWithPrefix(int64_t id, const std::string& salt, TokenSpan tokens) {
    std::vector<PageLoad> loads;  // none without host memory
    return AddWithPrefix(id, salt, tokens, &loads);
  }
  /*!
   * \brief The same, in a cache with host memory.
   * \param loads Pages that the caller fills; then it calls FinishLoads or CancelLoads, at once.
   */
  int64_t AddWithPrefix(int64_t id, const std::string& salt, TokenSpan tokens,
                        std::vector<PageLoad>* loads);
  void FinishLoads(int64_t id, const std::vector<PageLoad>& loads) noexcept;
  /*! \brief Removes the sequence again. */
  void CancelLoads(int64_t id, const std::vector<PageLoad>& loads) noexcept;
  /*! \brief Removes a sequence. During an import, removes all sequences of the import. */
  void Remove(int64_t id);
  /*!
   * \brief Makes `child` share the first `position` positions of `parent` (-1: all).
   *
   * They must be committed: a token tree has one owner.
   * \throws Error (KeyError; ValueError, also when needed pages have been reclaimed).
   */
  void Fork(int64_t parent, int64_t child, int64_t position);
  /*!
   * \brief Drops the last `count` positions. Tree nodes go first, in reverse order of appending.
   * \throws Error (KeyError; ValueError, also when needed pages have been reclaimed).
   */
  void Pop(int64_t id, int64_t count);
  /*! \brief Raises what Pop would raise, and changes nothing. */
  void CheckPop(int64_t id, int64_t count) const;
  /*!
   * \brief Commits the nodes of a path of the tree, whose rows are in the slots behind the
   * committed positions, and drops the others.
   */
  void CommitNodes(Sequence* sequence, const std::vector<int32_t>& path) noexcept;
  /*! \brief A layer has left out the rows from this position on: they are published to nobody. */
  void NoteUnwritten(Sequence* sequence, int64_t position) noexcept;
  /*! \brief Somebody has written positions [begin, end) of every layer outside of a step. */
  void NoteWritten(Sequence* sequence, int64_t begin, int64_t end) noexcept;
  /*!
   * \brief Gives a sequence a window of `size` positions, `num_sinks` of them its first ones.
   * \param includes_self Whether `size` includes the row itself.
   * \throws Error (ValueError).
   */
  void EnableWindow(int64_t id, int64_t size, int64_t num_sinks, bool includes_self = false);
  /*! \brief The checks of EnableWindow on its arguments. \throws Error (KeyError, ValueError). */
  void CheckNewWindow(int64_t id, int64_t size, int64_t num_sinks) const;
  /*! \brief Drops the positions that have left the windows, and their pages. */
  void Slide(Sequence* sequence) noexcept;
  /*! \throws Error (IndexError) when a group, or this one, no longer holds the page of `position`.
   */
  void RequireKept(const Sequence& sequence, int64_t position) const;
  void RequireKept(const Sequence& sequence, int64_t position, int32_t group) const;
  void Clear();
  /*! \brief Forgets all texts: nothing that was computed so far is found any more. */
  void ForgetTexts() noexcept;
  /*! \brief Called by ForwardPlan when it commits. */
  void Grow(Sequence* sequence, int64_t count) {
    sequence->length += count;
    total_length_ += count;
  }

  /*! \brief Pointers to sequences are valid as long as this number stays the same. */
  int64_t num_removals() const { return num_removals_; }

  /*! \brief Ends an open receive: its positions are there. See receives.h. */
  void FinishReceive(Sequence* sequence) noexcept;
  /*! \brief Restores the sequence as it was before its receive. */
  void CancelReceive(Sequence* sequence) noexcept;

  /*! \throws Error (CacheFullError) that names the sequences with the most pages. */
  [[noreturn]] void RaiseFull(int32_t group, int64_t num_needed,
                              const char* what = "the step") const;

  /*!
   * \brief Checks the invariants; in sequence_table_integrity.cc.
   * \param has_slid False within a step, when pages outside the windows are still there.
   * \throws Error (RuntimeError) that names the broken invariant.
   */
  void CheckIntegrity(bool has_slid = true) const;

 private:
  Sequence* Insert(int64_t id);
  /*! \brief Prepares the histories of a new sequence. */
  Sequence* KeepHistories(Sequence* sequence) noexcept;
  /*! \brief As what the histories of a sequence without a window keep their pages. */
  Keeper KeeperOf(int32_t group) const {
    return pools_[group].num_pages() < capacity_pages_ ? Keeper::kLookup : Keeper::kReturn;
  }
  void RequireArrived(const Sequence& sequence) const;
  void RemoveOne(int64_t id);
  /*! \brief Keeps the allocations of a removed sequence for the next new one. */
  void Recycle(int64_t id) noexcept;
  void CheckWindow(const Sequence& sequence, bool has_slid) const;
  void CheckPages(const Sequence& sequence, int32_t group, bool has_slid) const;
  /*! \brief Adds the keepers of each page. */
  void CheckHistory(const Sequence& sequence, int32_t group, std::vector<int32_t>* num_keepers,
                    std::vector<int32_t>* num_returns) const;
  void Truncate(Sequence* sequence, int64_t length) noexcept;

  int64_t max_num_sequences_;
  int64_t capacity_pages_;
  PageGeometry geometry_;
  int64_t total_length_ = 0;
  std::vector<PagePool> pools_;
  PagePins pins_;
  RecurrentStates states_;
  WindowHistories histories_;
  PrefixCache prefixes_;
  using Sequences = std::unordered_map<int64_t, Sequence>;
  Sequences sequences_;
  std::vector<Sequences::node_type> spare_;
  int64_t num_removals_ = 0;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_TABLE_SEQUENCE_TABLE_H_
