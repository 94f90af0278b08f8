// SPDX-License-Identifier: Apache-2.0
/*!
 * \file snapshot_table.h
 * \brief The sequences of an RNN state: which page holds the state at which position.
 *
 *     position    0      5      6      7
 *     pages      [3]    [0]    [4]    [1]     snapshots of a sequence of length 7
 *                 kept   kept   kept   owned
 *
 * A page holds the whole state at one position: every state of every layer. A sequence owns the
 * page at its length and is a keeper of those before it, so the pool evicts old snapshots, least
 * recently used first, and never the newest one of a sequence. Sequences share pages after a fork.
 *
 * A step reads the page at the length before it and writes another one. If no page is available,
 * the last owner of a page writes in place, as it must with one page for each sequence. Such a step
 * cannot be aborted once a state has been written.
 *
 * The table knows pages and not their content. Callers write the initial values where it says so.
 */
#ifndef TVM_PAGEDKV_RNN_SNAPSHOT_TABLE_H_
#define TVM_PAGEDKV_RNN_SNAPSHOT_TABLE_H_

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "state/pages/page_pool.h"
#include "state/sequences/token_tree.h"

namespace pagedkv {

class SnapshotTable {
 public:
  /*! \brief No page needs the initial values. */
  static constexpr int32_t kNone = -1;
  static constexpr int64_t kMaxLength = INT32_MAX;

  /*! \brief A sequence of the open step. */
  struct StepItem {
    int64_t id;
    int64_t num_append;
    int32_t read;   // page of the state before the step
    int32_t write;  // page of the state after it; the same one when the step writes in place
    bool keeps_read = true;  // no sequence of the step writes `read`
  };

  /*! \param max_history Pages for each sequence, at least 1. */
  SnapshotTable(int64_t max_num_sequences, int64_t max_history);

  // Each throws Error (KeyError, ValueError, CacheFullError) and changes nothing then.
  void Clear();
  /*! \return The page that the caller fills with the initial values. */
  int32_t Add(int64_t id);
  void Remove(int64_t id);
  /*!
   * \param position From 0 to the parent's length; -1 for the length.
   * \return The page that the caller fills with the initial values, or kNone.
   */
  int32_t Fork(int64_t parent_id, int64_t child_id, int64_t position);
  /*! \return The page that the caller fills with the initial values, or kNone. */
  int32_t PopN(int64_t id, int64_t count);
  /*! \brief Whether the state at a position is kept; 0 always is. */
  bool CanFork(int64_t parent_id, int64_t position) const;
  bool CanPopN(int64_t id, int64_t count) const;

  /*! \brief Takes a page to write for each sequence of a step. */
  void Begin(IntSpan ids, IntSpan append_lengths);
  /*! \brief Says that the step writes now. A page that is written in place is no snapshot of other
   * sequences any more. */
  void BeginWrite();
  bool is_written() const { return is_written_; }
  /*! \brief Whether some sequence of the step has lost the state before it. */
  bool HasWrittenInPlace() const;
  /*! \brief Gives the pages back; evicted snapshots return if the step has not written. */
  void Abort();
  /*! \brief Makes the written pages the newest snapshots; without BeginWrite states stay. */
  void End();
  const std::vector<StepItem>& step() const { return step_; }

  int64_t Length(int64_t id) const { return At(id).length; }
  /*! \brief The page of the state at the length. */
  int32_t Page(int64_t id) const { return At(id).page; }
  int64_t num_sequences() const { return static_cast<int64_t>(sequences_.size()); }
  const PagePool& pool() const { return pool_; }
  /*! \throws Error (RuntimeError) that says what is broken. */
  void CheckIntegrity() const;

 private:
  struct Snapshot {
    int64_t position;
    int32_t page;
    uint64_t generation;
  };
  struct Sequence {
    int64_t length = 0;
    int32_t page = kNone;
    std::vector<Snapshot> kept;  // ascending positions below the length; some may be evicted
  };

  const Sequence& At(int64_t id) const;
  Sequence& At(int64_t id) { return const_cast<Sequence&>(std::as_const(*this).At(id)); }
  void RequireRoom(int64_t id) const;
  bool IsKept(const Snapshot& snapshot) const {
    return pool_.Generation(snapshot.page) == snapshot.generation;
  }
  /*! \brief The page of the state at a position; kNone if only the initial values give it. */
  int32_t Locate(const Sequence& sequence, int64_t id, int64_t position) const;
  bool CanLocate(const Sequence& sequence, int64_t position) const;
  static int64_t PositionAfterPop(const Sequence& sequence, int64_t id, int64_t count);
  static int64_t ForkPosition(const Sequence& parent, int64_t id, int64_t position);
  /*! \brief Drops the snapshots from a position on. */
  void Truncate(Sequence* sequence, int64_t position);
  void DropEvicted(Sequence* sequence) const;
  /*! \brief Gives back the pages that Begin took. */
  void ReturnPages();

  int64_t max_num_sequences_;
  PagePool pool_;
  std::unordered_map<int64_t, Sequence> sequences_;
  std::vector<StepItem> step_;
  std::vector<int32_t> allocated_;  // by Begin, in that order
  bool is_written_ = false;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_RNN_SNAPSHOT_TABLE_H_
