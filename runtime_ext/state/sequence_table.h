// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sequence_table.h
 * \brief Sequences: a length and a page table per layer group. Fork, pop, remove, slide.
 *
 * A layer group with a window keeps the pages that the next row sees, and those of kPoppable more
 * positions, so that many can always be popped. While a sequence has a token tree, the next row is
 * the one behind the committed positions. Pages that the window moves past become cached. A fork or
 * pop that goes further back takes them back, unless they were reclaimed.
 *
 * A sequence can have a window of its own. In groups without a window it then gives up pages that
 * hold dropped positions only; groups with a window follow that one. It has no token tree.
 *
 * Every call checks its arguments first: one that throws has changed nothing.
 */
#ifndef TVM_PAGEDKV_STATE_SEQUENCE_TABLE_H_
#define TVM_PAGEDKV_STATE_SEQUENCE_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "state/kv_transfer.h"
#include "state/page_history.h"
#include "state/page_pool.h"
#include "state/sequence_window.h"
#include "state/token_tree.h"

namespace pagedkv {

/*! \brief Positions that can always be popped. KVCacheConfig has the same number. */
constexpr int64_t kPoppable = 16;

/*! \brief Sequences that have pages but not yet their content. */
struct SequenceImport {
  std::vector<int64_t> ids;
  std::vector<std::vector<int32_t>> pages;  // [group], without duplicates
  std::vector<int64_t> num_arrived;         // [layer] pages that have their content
};

/*! \brief One sequence of an import. */
struct ImportedSequence {
  int64_t id;
  int64_t length;
  std::vector<int64_t> first_pages;                // [group]
  std::vector<std::vector<int64_t>> page_numbers;  // [group] indices into SequenceImport::pages
};

struct Sequence {
  int64_t id = 0;
  int64_t length = 0;  // positions held, tree nodes included
  TokenTree tree;      // its nodes are the last positions
  SequenceWindow window;
  std::vector<std::vector<int32_t>> pages;  // [group], in order of position
  /*! \brief [group] pages given up: in a group with a window those before the first page, else
   * those behind the pages of the sinks. */
  std::vector<int64_t> first_pages;
  /*! \brief [group] pages before the first one, in groups with a window. During a receive, before
   * the page that was the first one when it began. */
  std::vector<PageHistory> histories;
  std::shared_ptr<SequenceImport> import;  // while its content is missing
  std::unique_ptr<Receive> receive;        // positions at the end that another cache writes
  std::unique_ptr<SendMark> send;          // positions that go to another cache
  uint64_t batch_mark = 0;  // scratch of ForwardPlan, which finds repeated ids with it

  int64_t committed_length() const { return length - tree.size(); }
};

/*! \brief A page to copy before a sequence writes to it. */
struct PageCopy {
  Sequence* sequence;
  int32_t group;
  int64_t index;  // in the page table
  int32_t source;
  int32_t destination;
  int32_t length;  // slots in use
};

/*! \brief Pages with several owners, or with keepers: see PagePool. */
enum class CopiesOf { kSharedPages, kKeptPages };

/*! \brief Page tables of a sequence with room for the positions that it receives. */
struct ReceivePlan {
  Sequence* sequence;
  int64_t count;
  std::vector<std::vector<int32_t>> pages;  // [group]
  std::vector<int64_t> first_pages;         // [group]
  std::vector<PageCopy> copies;             // to make before CommitReceive
  std::unique_ptr<Receive> receive;
};

class SequenceTable {
 public:
  /*!
   * \param max_num_sequences The maximum of one step. Any number of sequences may exist.
   * \param num_pages Pages of each layer group.
   * \param windows Window of each layer group; 0 for none.
   */
  SequenceTable(int64_t max_num_sequences, int32_t page_size, const std::vector<int32_t>& num_pages,
                std::vector<int64_t> windows = {});

  int32_t page_size() const { return page_size_; }
  int32_t num_groups() const { return static_cast<int32_t>(pools_.size()); }
  int64_t max_num_sequences() const { return max_num_sequences_; }
  int64_t num_sequences() const { return static_cast<int64_t>(sequences_.size()); }
  /*! \brief Sum of the lengths; shared positions count once per sequence. */
  int64_t total_length() const { return total_length_; }
  PagePool& pool(int32_t group) { return pools_[group]; }
  const PagePool& pool(int32_t group) const { return pools_[group]; }
  const std::unordered_map<int64_t, Sequence>& sequences() const { return sequences_; }
  int64_t PagesFor(int64_t length) const { return (length + page_size_ - 1) / page_size_; }
  /*! \brief Pages of the first `length` positions that the group holds. */
  int64_t NumPages(const Sequence& sequence, int32_t group, int64_t length) const;
  /*! \brief The index of the position's page in the page table; OffsetInPage is its slot there. */
  int64_t PageIndex(const Sequence& sequence, int32_t group, int64_t position) const;
  int64_t OffsetInPage(const Sequence& sequence, int64_t position) const {
    return sequence.window.TextPosition(position) % page_size_;
  }
  /*! \brief The text position of the first slot of a page. */
  int64_t PageBegin(const Sequence& sequence, int32_t group, int64_t index) const;
  /*! \brief The group holds all positions from this one on. */
  int64_t FirstPosition(const Sequence& sequence, int32_t group) const;
  /*! \brief The slot behind the dropped positions, counted from the first page of the page table.
   */
  int64_t WindowBegin(const Sequence& sequence, int32_t group) const {
    const SequenceWindow& window = sequence.window;
    return window.num_sinks + window.num_dropped - sequence.first_pages[group] * page_size_;
  }
  bool HasWindow(int32_t group) const { return windows_[group] > 0; }

  /*!
   * \brief A sequence whose content is complete.
   * \throws Error (KeyError) when there is none; (ValueError) while it is being imported.
   */
  Sequence& At(int64_t id);
  const Sequence& At(int64_t id) const;
  /*! \brief As At, also for a sequence that is being imported. */
  const Sequence& Peek(int64_t id) const;

  void Add(int64_t id);
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
  /*! \brief Makes the first `count` nodes of the tree committed positions and drops the others. */
  void CommitNodes(Sequence* sequence, int64_t count) noexcept;
  /*!
   * \brief Gives a sequence a window of `size` positions, `num_sinks` of them its first ones.
   * \param counts_row Whether `size` includes the row itself.
   * \throws Error (ValueError).
   */
  void EnableWindow(int64_t id, int64_t size, int64_t num_sinks, bool counts_row = false);
  /*! \brief The checks of EnableWindow on its arguments. \throws Error (KeyError, ValueError). */
  void CheckNewWindow(int64_t id, int64_t size, int64_t num_sinks) const;
  /*! \brief Drops the positions that have left the windows, and their pages. */
  void Slide(Sequence* sequence) noexcept;
  /*! \throws Error (IndexError) when a group no longer holds the page of `position`. */
  void RequireKept(const Sequence& sequence, int64_t position) const;
  void Clear();
  /*! \brief Called by ForwardPlan when it commits. */
  void Grow(Sequence* sequence, int64_t count) {
    sequence->length += count;
    total_length_ += count;
  }

  // Imports, in sequence_import.cc.
  /*!
   * \brief Takes the pages of new sequences, or of existing empty ones. They cannot be used before
   * FinishImport.
   * \throws Error (ValueError, CacheFullError).
   */
  void BeginImport(std::vector<ImportedSequence> imported, size_t num_layers);
  /*! \throws Error (KeyError; ValueError when the sequence is not being imported). */
  SequenceImport& ImportOf(int64_t id) const;
  /*! \brief Makes all sequences of the import usable. */
  void FinishImport(int64_t id);
  int64_t num_importing() const;

  // Copies before a write, in sequence_copies.cc.
  /*!
   * \brief Takes a new page for every shared page with a position of [begin, end), then for pages
   *   with keepers as long as there is room.
   * \throws Error (CacheFullError).
   */
  std::vector<PageCopy> AcquireCopies(Sequence* sequence, int64_t begin, int64_t end);
  /*! \brief The same for one kind of page; appends to `copies`. \throws Error (CacheFullError). */
  void AcquireCopies(Sequence* sequence, int64_t begin, int64_t end, CopiesOf which,
                     std::vector<PageCopy>* copies);
  /*! \param were_made Whether the new pages may have been written. */
  void ReleaseCopies(const std::vector<PageCopy>& copies, bool were_made) noexcept;
  /*! \brief Replaces the source pages by their copies in the page tables. */
  void CommitCopies(const std::vector<PageCopy>& copies) noexcept;
  /*! \brief Drops the keepers of pages that the sequence writes without a copy: [begin, end). */
  void Overwrite(const Sequence& sequence, int64_t begin, int64_t end) noexcept;

  // Transfers between caches, in kv_transfer.cc. A receive is open until it is finished or
  // cancelled. It counts as finished as soon as the sequence is used: by a step, a fork or another
  // receive. A pop of exactly its positions cancels it, any other pop finishes it.
  /*!
   * \brief Takes pages for `count` more positions, without those that windows will not reach.
   * \throws Error (ValueError, CacheFullError).
   */
  ReceivePlan AcquireReceive(Sequence* sequence, int64_t count);
  void ReleaseReceive(const ReceivePlan& plan) noexcept;
  void CommitReceive(ReceivePlan plan, int64_t id) noexcept;
  void FinishReceive(Sequence* sequence) noexcept;
  /*! \brief Restores the sequence as it was before the receive. */
  void CancelReceive(Sequence* sequence) noexcept;
  /*! \brief Pins the pages of the sequence's receive until ReleaseReceivePages. Idempotent. */
  void HoldReceivePages(const Sequence& sequence);
  /*! \brief Unpins the pages of a receive. \return Whether any were held. */
  bool ReleaseReceivePages(int64_t receive_id) noexcept;
  /*! \brief Slots of positions [begin, end), [group]; kNotWanted where the group has none. */
  std::vector<SlotRuns> SlotsOf(const Sequence& sequence, int64_t begin, int64_t end) const;
  /*! \throws Error (ValueError) when positions that the mark needs are gone. */
  void RequireSendable(const Sequence& sequence, const SendMark& mark) const;
  /*! \throws Error (ValueError) when the sequence has a window or dropped positions. */
  void RequireNoWindow(const Sequence& sequence, const char* what) const;
  /*! \brief A block of the new positions of a mark. The last block of a mark removes it. */
  SendBlock AcquireSend(Sequence* sequence);
  void ReleaseSend(const SendBlock& block) noexcept;
  /*! \brief Removes the mark of a sequence if it has this id. */
  void ForgetSend(int64_t sequence_id, int64_t send_id) noexcept;
  /*! \brief Removes all marks for a receiver. */
  void ForgetSends(int64_t peer) noexcept;
  bool IsPinned(int32_t group, int32_t page) const { return pins_[group][page] > 0; }
  /*! \brief Owners that are not sequences: blocks, receives and the step. */
  int64_t num_pins() const { return num_pins_; }
  /*! \brief Moves the ownership of a page from a sequence to a pin. */
  void PinInPlaceOfOwner(int32_t group, int32_t page) noexcept;
  /*! \brief The reverse; the caller puts the page back into the page table. */
  void OwnInPlaceOfPin(int32_t group, int32_t page) noexcept;
  /*! \brief Removes a pin; see PagePool::Release. */
  void Unpin(int32_t group, int32_t page) noexcept;

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
  void RemoveOne(int64_t id);
  /*! \brief Keeps the allocations of a removed sequence for the next new one. */
  void Recycle(int64_t id) noexcept;
  /*! \brief Adds the sequences that do not exist; others must be empty. \throws Error (ValueError).
   */
  void InsertImported(const std::vector<int64_t>& ids);
  void CheckImported(const ImportedSequence& sequence, int32_t group) const;
  /*! \brief Pages of an import in a group. \throws Error (ValueError). */
  int64_t CountImported(const std::vector<ImportedSequence>& imported, int32_t group) const;
  int64_t FirstVisible(int32_t group, int64_t text_length) const;
  int64_t FirstPageToKeep(int32_t group, int64_t text_length) const;
  int64_t NumPagesGone(const Sequence& sequence, int32_t group) const;
  int64_t SinkPages(const Sequence& sequence) const { return PagesFor(sequence.window.num_sinks); }
  /*! \brief Number of committed text positions. */
  static int64_t TextLength(const Sequence& sequence) {
    return sequence.window.TextLength(sequence.committed_length());
  }
  void CheckWindow(const Sequence& sequence, bool has_slid) const;
  void CheckPages(const Sequence& sequence, int32_t group, bool has_slid) const;
  /*! \brief Adds the keepers of each page. */
  void CheckHistory(const Sequence& sequence, int32_t group,
                    std::vector<int32_t>* num_keepers) const;
  // Pages that windows have moved past, in sequence_history.cc.
  /*!
   * \brief Checks that the window of a row at position `length` is held, or can be taken back.
   * \throws Error (ValueError).
   */
  void RequireWindow(const Sequence& sequence, int64_t length, const char* what) const;
  [[noreturn]] void RaiseReclaimed(const Sequence& sequence, int32_t group, int64_t length,
                                   const char* what) const;
  int64_t FirstReachable(const Sequence& sequence) const;
  int64_t FirstPageToSee(int32_t group, int64_t text_length) const {
    return FirstVisible(group, text_length) / page_size_;
  }
  /*! \brief The first page to hold so that a row at this text position sees its window. */
  int64_t FirstPageAt(const Sequence& sequence, int32_t group, int64_t text_length) const;
  /*! \brief A page before the first one that is held; -1 when it was reclaimed. */
  int32_t PageBehind(const Sequence& sequence, int32_t group, int64_t index) const {
    return sequence.histories[group].Find(sequence.first_pages[group] - index, pools_[group]);
  }
  /*! \brief Moves the first page of a group with a window to the history. */
  void LeaveBehind(Sequence* sequence, int32_t group, int32_t page) noexcept;
  /*! \brief Reserves memory for TakeBack. May throw std::bad_alloc. */
  void ReserveTakeBack(Sequence* sequence, int64_t text_length);
  /*! \brief Takes back the pages that RequireWindow has found. */
  void TakeBack(Sequence* sequence, int64_t text_length) noexcept;
  /*! \brief Moves the pages that a receive pushed out of the window to the history. */
  void LeaveReceiveBehind(Sequence* sequence, int32_t group) noexcept;

  /*! \brief Whether to copy a page before a write, when `num_others` pages are taken before it. */
  bool ShouldCopy(int32_t group, int32_t page, int64_t num_others) const {
    const PagePool& pool = pools_[group];
    return pool.RefCount(page) > 1 ||
           (pool.NumKeepers(page) > 0 && num_others < pool.num_available());
  }
  void Truncate(Sequence* sequence, int64_t length) noexcept;
  /*! \brief Releases all pages but the first `keep`. */
  void ReleasePages(Sequence* sequence, int32_t group, size_t keep) noexcept;
  void Pin(int32_t group, int32_t page) noexcept;

  int64_t max_num_sequences_;
  int32_t page_size_;
  int64_t total_length_ = 0;
  std::vector<PagePool> pools_;
  std::vector<std::vector<int32_t>> pins_;  // [group][page] owners that are not sequences
  int64_t num_pins_ = 0;
  std::unordered_map<int64_t, ReceivePages> receive_pages_;  // by the id of the receive
  std::vector<int64_t> windows_;
  using Sequences = std::unordered_map<int64_t, Sequence>;
  Sequences sequences_;
  std::vector<Sequences::node_type> spare_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_SEQUENCE_TABLE_H_
