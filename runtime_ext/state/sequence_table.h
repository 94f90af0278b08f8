// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sequence_table.h
 * \brief Sequences: a length, and per layer group a list of page ids. Fork, pop, remove, slide.
 *
 * A group of layers with a window keeps the pages that the next row can see, and those of the
 * kPoppable positions before them: so many can always be popped. While a sequence has a token tree
 * the next row is the one after its committed positions. What the window leaves behind is cached,
 * and a fork or pop that goes further back takes it back, unless it was reclaimed meanwhile.
 *
 * A sequence with a window loses, in the other groups, the pages that hold nothing but dropped
 * positions; layers with a window of their own follow that one alone. It has no token tree.
 *
 * Every call checks its arguments before it changes anything: one that throws has changed nothing.
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

/*! \brief Positions that can be popped whatever has slid; KVCacheConfig knows the number too. */
constexpr int64_t kPoppable = 16;

/*! \brief Sequences that have their pages, but not yet what is in these. */
struct SequenceImport {
  std::vector<int64_t> ids;
  std::vector<std::vector<int32_t>> pages;  // [group] without those that are shared twice
  std::vector<int64_t> num_arrived;         // [layer] of these, how many have their content
};

/*! \brief One sequence of an import, and where among the pages of the import its own are. */
struct ImportedSequence {
  int64_t id;
  int64_t length;
  std::vector<int64_t> first_pages;                // [group]
  std::vector<std::vector<int64_t>> page_numbers;  // [group] indices into SequenceImport::pages
};

struct Sequence {
  int64_t id = 0;
  int64_t length = 0;  // positions held, the nodes of the tree included
  TokenTree tree;      // its nodes are the last positions
  SequenceWindow window;
  std::vector<std::vector<int32_t>> pages;  // [group], in order of position
  /*! \brief [group] pages that have slid out: of layers with a window those before the first one,
   * else those behind the sinks' pages. */
  std::vector<int64_t> first_pages;
  /*! \brief [group] pages before the first one, of layers with a window; while a receive is under
   * way, before the one that was first when it began. */
  std::vector<PageHistory> histories;
  std::shared_ptr<SequenceImport> import;  // while its content is still to come
  std::unique_ptr<Receive> receive;        // rows at the end that another cache is to write
  std::unique_ptr<SendMark> send;          // rows that are to go to another cache
  uint64_t batch_mark = 0;  // scratch of ForwardPlan: finds a repeated id without a set

  int64_t committed_length() const { return length - tree.size(); }
};

/*! \brief A page that must be copied before a sequence may write to it. */
struct PageCopy {
  Sequence* sequence;
  int32_t group;
  int64_t index;  // in the sequence's page list
  int32_t source;
  int32_t destination;
  int32_t length;  // slots in use
};

/*! \brief Pages that other sequences own, or that only their histories note. */
enum class CopiesOf { kSharedPages, kKeptPages };

/*! \brief Page lists of a sequence with room for the rows that it is to receive. */
struct ReceivePlan {
  Sequence* sequence;
  int64_t count;
  std::vector<std::vector<int32_t>> pages;  // [group]
  std::vector<int64_t> first_pages;         // [group]
  std::vector<PageCopy> copies;             // to be made before the plan is committed
  std::unique_ptr<Receive> receive;
};

class SequenceTable {
 public:
  /*!
   * \brief A table whose groups have `num_pages[g]` pages and a window (none: 0) each.
   * \param max_num_sequences The most sequences of one step. Any number of them may exist.
   */
  SequenceTable(int64_t max_num_sequences, int32_t page_size, const std::vector<int32_t>& num_pages,
                std::vector<int64_t> windows = {});

  int32_t page_size() const { return page_size_; }
  int32_t num_groups() const { return static_cast<int32_t>(pools_.size()); }
  int64_t max_num_sequences() const { return max_num_sequences_; }
  int64_t num_sequences() const { return static_cast<int64_t>(sequences_.size()); }
  /*! \brief Sum of the lengths; a position that sequences share counts once for each. */
  int64_t total_length() const { return total_length_; }
  PagePool& pool(int32_t group) { return pools_[group]; }
  const PagePool& pool(int32_t group) const { return pools_[group]; }
  const std::unordered_map<int64_t, Sequence>& sequences() const { return sequences_; }
  int64_t PagesFor(int64_t length) const { return (length + page_size_ - 1) / page_size_; }
  /*! \brief Pages that the group has of the first `length` positions. */
  int64_t NumPages(const Sequence& sequence, int32_t group, int64_t length) const;
  /*! \brief Where a position lies: an index into the group's pages, and an offset in the page. */
  int64_t PageIndex(const Sequence& sequence, int32_t group, int64_t position) const;
  int64_t OffsetInPage(const Sequence& sequence, int64_t position) const {
    return sequence.window.TextPosition(position) % page_size_;
  }
  /*! \brief The text position of the first slot of a page. */
  int64_t PageBegin(const Sequence& sequence, int32_t group, int64_t index) const;
  /*! \brief The first position from which on the group keeps all. */
  int64_t FirstPosition(const Sequence& sequence, int32_t group) const;
  /*! \brief The slot, counted from the group's first page, behind the dropped positions. */
  int64_t WindowBegin(const Sequence& sequence, int32_t group) const {
    const SequenceWindow& window = sequence.window;
    return window.num_sinks + window.num_dropped - sequence.first_pages[group] * page_size_;
  }
  bool HasWindow(int32_t group) const { return windows_[group] > 0; }

  /*!
   * \brief A sequence that may be used.
   * \throws Error (KeyError) when there is none; (ValueError) when its content is still to come.
   */
  Sequence& At(int64_t id);
  const Sequence& At(int64_t id) const;
  /*! \brief As At, of a sequence whose content is still to come too. */
  const Sequence& Peek(int64_t id) const;

  void Add(int64_t id);
  /*! \brief Removes a sequence; of an import under way, all sequences. */
  void Remove(int64_t id);
  /*!
   * \brief Makes `child` share the first `position` positions of `parent` (-1: all).
   *
   * They must be committed: a token tree has one owner.
   * \throws Error (KeyError; ValueError, also where pages that are needed have been reclaimed).
   */
  void Fork(int64_t parent, int64_t child, int64_t position);
  /*!
   * \brief Drops the last `count` positions, of a tree the nodes that were appended last.
   * \throws Error (KeyError; ValueError, also where pages that are needed have been reclaimed).
   */
  void Pop(int64_t id, int64_t count);
  /*! \brief Makes the first `count` nodes of the tree committed positions and drops the others. */
  void CommitNodes(Sequence* sequence, int64_t count) noexcept;
  /*!
   * \brief Gives a sequence a window of `size` positions, `num_sinks` of them its first ones.
   * \param counts_row Whether a row is itself one of the positions that it sees.
   * \throws Error (ValueError).
   */
  void EnableWindow(int64_t id, int64_t size, int64_t num_sinks, bool counts_row = false);
  /*! \throws Error (KeyError, ValueError) when the sequence or the numbers are wrong. */
  void CheckNewWindow(int64_t id, int64_t size, int64_t num_sinks) const;
  /*! \brief Drops the positions that have left the windows, and the pages of these. */
  void Slide(Sequence* sequence) noexcept;
  /*! \throws Error (IndexError) when a group no longer has the pages of `position`. */
  void RequireKept(const Sequence& sequence, int64_t position) const;
  void Clear();
  /*! \brief Called by ForwardPlan when it commits. */
  void Grow(Sequence* sequence, int64_t count) {
    sequence->length += count;
    total_length_ += count;
  }

  // Imports, in sequence_import.cc.
  /*!
   * \brief Takes the pages of new sequences (or of some that are there and empty), which are not to
   * be used before FinishImport.
   * \throws Error (ValueError, CacheFullError).
   */
  void BeginImport(std::vector<ImportedSequence> imported, size_t num_layers);
  /*! \throws Error (KeyError; ValueError when no import of the sequence is under way). */
  SequenceImport& ImportOf(int64_t id) const;
  /*! \brief Makes all sequences of the import usable. */
  void FinishImport(int64_t id);
  int64_t num_importing() const;

  // Copies before a write, in sequence_copies.cc.
  /*!
   * \brief Takes a page for every shared page that holds a position of [begin, end), and then for
   *   the kept ones as long as there is room.
   * \throws Error (CacheFullError).
   */
  std::vector<PageCopy> AcquireCopies(Sequence* sequence, int64_t begin, int64_t end);
  /*! \brief The same for one kind of pages, added to `copies`. \throws Error (CacheFullError). */
  void AcquireCopies(Sequence* sequence, int64_t begin, int64_t end, CopiesOf which,
                     std::vector<PageCopy>* copies);
  /*! \param were_made Whether something may have been written to the copies. */
  void ReleaseCopies(const std::vector<PageCopy>& copies, bool were_made) noexcept;
  /*! \brief Puts the copies in the place of their sources. */
  void CommitCopies(const std::vector<PageCopy>& copies) noexcept;
  /*! \brief The sequence writes to positions [begin, end): histories lose pages without a copy. */
  void Overwrite(const Sequence& sequence, int64_t begin, int64_t end) noexcept;

  // Transfers between caches; in kv_transfer.cc. A receive that is under way ends when it is
  // finished or cancelled, and counts as finished as soon as the sequence is used: by a step, a
  // fork, another receive, or a pop of other than its rows (a pop of just these cancels it).
  /*!
   * \brief Takes pages for `count` more positions: of those that a window will see then.
   * \throws Error (ValueError, CacheFullError).
   */
  ReceivePlan AcquireReceive(Sequence* sequence, int64_t count);
  void ReleaseReceive(const ReceivePlan& plan) noexcept;
  void CommitReceive(ReceivePlan plan, int64_t id) noexcept;
  void FinishReceive(Sequence* sequence) noexcept;
  /*! \brief Makes the sequence what it was before. */
  void CancelReceive(Sequence* sequence) noexcept;
  /*! \brief Pins the pages of the sequence's receive until ReleaseReceivePages; once for each. */
  void HoldReceivePages(const Sequence& sequence);
  /*! \brief Unpins the pages of a receive. \return Whether any were held. */
  bool ReleaseReceivePages(int64_t receive_id) noexcept;
  /*! \brief Slots of positions [begin, end), for each group; kNotWanted where they are gone. */
  std::vector<SlotRuns> SlotsOf(const Sequence& sequence, int64_t begin, int64_t end) const;
  /*! \throws Error (ValueError) when rows that the mark needs are gone. */
  void RequireSendable(const Sequence& sequence, const SendMark& mark) const;
  /*! \throws Error (ValueError) when positions of the sequence leave other than at its end. */
  void RequireNoWindow(const Sequence& sequence, const char* what) const;
  /*! \brief The rows that are there and were not in a block yet. Ends the mark with its last row.
   */
  SendBlock AcquireSend(Sequence* sequence);
  void ReleaseSend(const SendBlock& block) noexcept;
  /*! \brief Drops the mark of a sequence, if it is there and has this id. */
  void ForgetSend(int64_t sequence_id, int64_t send_id) noexcept;
  /*! \brief Drops all marks for a receiver. */
  void ForgetSends(int64_t peer) noexcept;
  bool IsPinned(int32_t group, int32_t page) const { return pins_[group][page] > 0; }
  /*! \brief Pages that blocks, receives and a step hold. */
  int64_t num_pins() const { return num_pins_; }
  /*! \brief Lets a pin own a page that a sequence has owned. */
  void PinInPlaceOfOwner(int32_t group, int32_t page) noexcept;
  /*! \brief The reverse: the caller puts the page back into a sequence. */
  void OwnInPlaceOfPin(int32_t group, int32_t page) noexcept;
  /*! \brief Takes a pin away; a page without owners becomes free. */
  void Unpin(int32_t group, int32_t page) noexcept;

  /*! \throws Error (CacheFullError) that says who holds most of the group's pages. */
  [[noreturn]] void RaiseFull(int32_t group, int64_t num_needed,
                              const char* what = "the step") const;

  /*!
   * \brief Proves the invariants; in sequence_table_integrity.cc.
   * \param has_slid Whether no step is under way: then pages beyond the windows are gone.
   * \throws Error (RuntimeError) that says what is broken.
   */
  void CheckIntegrity(bool has_slid = true) const;

 private:
  Sequence* Insert(int64_t id);
  void RemoveOne(int64_t id);
  /*! \brief Keeps a removed sequence for the next new one: its lists need not grow again. */
  void Recycle(int64_t id) noexcept;
  /*! \brief Adds those that are not there and empty. \throws Error (ValueError). */
  void InsertImported(const std::vector<int64_t>& ids);
  void CheckImported(const ImportedSequence& sequence, int32_t group) const;
  /*! \brief Pages of an import in a group. \throws Error (ValueError). */
  int64_t CountImported(const std::vector<ImportedSequence>& imported, int32_t group) const;
  int64_t FirstVisible(int32_t group, int64_t text_length) const;
  int64_t FirstPageToKeep(int32_t group, int64_t text_length) const;
  int64_t NumPagesGone(const Sequence& sequence, int32_t group) const;
  int64_t SinkPages(const Sequence& sequence) const { return PagesFor(sequence.window.num_sinks); }
  /*! \brief Text positions that are committed. */
  static int64_t TextLength(const Sequence& sequence) {
    return sequence.window.TextLength(sequence.committed_length());
  }
  void CheckWindow(const Sequence& sequence, bool has_slid) const;
  void CheckPages(const Sequence& sequence, int32_t group, bool has_slid) const;
  /*! \brief Adds the keepers of each page. */
  void CheckHistory(const Sequence& sequence, int32_t group,
                    std::vector<int32_t>* num_keepers) const;
  // What windows have left behind; in sequence_history.cc.
  /*!
   * \brief Checks that what a row after `length` positions sees is there, or can be taken back.
   * \throws Error (ValueError).
   */
  void RequireWindow(const Sequence& sequence, int64_t length, const char* what) const;
  [[noreturn]] void RaiseReclaimed(const Sequence& sequence, int32_t group, int64_t length,
                                   const char* what) const;
  int64_t FirstReachable(const Sequence& sequence) const;
  int64_t FirstPageToSee(int32_t group, int64_t text_length) const {
    return FirstVisible(group, text_length) / page_size_;
  }
  /*! \brief The first page to hold so that a row after that many text positions sees its window. */
  int64_t FirstPageAt(const Sequence& sequence, int32_t group, int64_t text_length) const;
  /*! \brief A page before the first one that is held; -1 where it is not known any more. */
  int32_t PageBehind(const Sequence& sequence, int32_t group, int64_t index) const {
    return sequence.histories[group].Find(sequence.first_pages[group] - index, pools_[group]);
  }
  /*! \brief Leaves the first held page of a group with a window. */
  void LeaveBehind(Sequence* sequence, int32_t group, int32_t page) noexcept;
  /*! \brief Room for TakeBack. Throws std::bad_alloc at most. */
  void ReserveTakeBack(Sequence* sequence, int64_t text_length);
  /*! \brief Takes back what RequireWindow has found. */
  void TakeBack(Sequence* sequence, int64_t text_length) noexcept;
  /*! \brief The pages that a receive has pushed out of the window. */
  void LeaveReceiveBehind(Sequence* sequence, int32_t group) noexcept;

  /*! \brief Whether a write to the page should go to a copy, given room for others before it. */
  bool ShouldCopy(int32_t group, int32_t page, int64_t num_others) const {
    const PagePool& pool = pools_[group];
    return pool.RefCount(page) > 1 ||
           (pool.NumKeepers(page) > 0 && num_others < pool.num_available());
  }
  void Truncate(Sequence* sequence, int64_t length) noexcept;
  /*! \brief Gives up all pages but the first `keep`, and their content. */
  void ReleasePages(Sequence* sequence, int32_t group, size_t keep) noexcept;
  void Pin(int32_t group, int32_t page) noexcept;

  int64_t max_num_sequences_;
  int32_t page_size_;
  int64_t total_length_ = 0;
  std::vector<PagePool> pools_;
  std::vector<std::vector<int32_t>> pins_;  // [group][page] owners that are no sequences
  int64_t num_pins_ = 0;
  std::unordered_map<int64_t, ReceivePages> receive_pages_;  // by the id of the receive
  std::vector<int64_t> windows_;
  using Sequences = std::unordered_map<int64_t, Sequence>;
  Sequences sequences_;
  std::vector<Sequences::node_type> spare_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_SEQUENCE_TABLE_H_
