// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sequence.h
 * \brief One sequence: its length, its page table per layer group, and what is under way with it.
 */
#ifndef TVM_PAGEDKV_STATE_SEQUENCES_SEQUENCE_H_
#define TVM_PAGEDKV_STATE_SEQUENCES_SEQUENCE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "state/pages/page_history.h"
#include "state/pages/slot_map.h"
#include "state/prefix_tree/prefix_tree.h"
#include "state/sequences/sequence_window.h"
#include "state/sequences/token_tree.h"

namespace pagedkv {

/*! \brief Sequences that have pages but not yet their content; see sequence_imports.h. */
struct SequenceImport {
  std::vector<int64_t> ids;
  std::vector<std::vector<int32_t>> pages;  // [pool], without duplicates; -1: left out
  std::vector<int64_t> num_arrived;         // [page group] pages that have their content
};

/*!
 * \brief The states of a state group: one behind every `interval` positions, and the last one.
 *
 * Each state but the last is behind the positions of its page: page n has that of the first
 * (n + 1) * interval positions. See recurrent_states.h.
 */
struct SequenceStates {
  int64_t length = 0;          // text positions that the last state covers; 0: there is none
  int64_t first_page = 0;      // pages given up before the first one that is held
  std::vector<int32_t> pages;  // that hold states, one each
  PageHistory history;         // of pages given up

  int64_t end_page() const { return first_page + static_cast<int64_t>(pages.size()); }
};

/*! \brief The state that a sequence returns to when a receive is cancelled; see receives.h. */
struct Receive {
  struct Group {
    int64_t first_page;
    std::vector<int32_t> gone;  // leading pages that the new positions do not need
    size_t num_retained;        // pages behind them that the sequence keeps
    int32_t replaced = -1;      // a shared last page that was replaced by a copy
  };
  int64_t id;
  int64_t begin;  // the length before the receive
  std::vector<Group> groups;
  std::vector<std::optional<SequenceStates>> states;  // [state group], where one is received
  bool is_in_step = false;  // a step uses the sequence; the receive ends with the step
};

/*!
 * \brief Positions [begin, end) of a sequence go to a peer; those before `next` are in blocks. See
 * sends.h.
 */
struct SendMark {
  int64_t id;
  int64_t peer;
  int64_t begin;
  int64_t end;
  int64_t next;
  std::vector<SlotRuns> slots;    // [group] slots of the peer for [begin, end)
  std::vector<StateSlot> states;  // [state group] and its pages
};

/*! \brief The tokens of the first positions of a sequence; see prefix_cache.h. */
struct TokenRecord {
  PrefixTree::Cursor cursor;  // behind the full pages that are in the prefix tree
  std::vector<int32_t> tail;  // the tokens behind them
  int64_t num_kept = 0;       // leading pages that host memory had when it was last asked
};

struct Sequence {
  /*! \brief The value of first_unwritten when every layer has written all rows. */
  static constexpr int64_t kAllWritten = std::numeric_limits<int64_t>::max();

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
  std::vector<SequenceStates> states;      // [state group]
  std::shared_ptr<SequenceImport> import;  // while its content is missing
  std::unique_ptr<Receive> receive;        // positions at the end that another cache writes
  std::unique_ptr<SendMark> send;          // positions that go to another cache
  std::unique_ptr<TokenRecord> tokens;     // when its tokens are recorded
  uint64_t batch_mark = 0;  // scratch of ForwardPlan, which finds repeated ids with it
  /*! \brief The text position of the first row that a layer has left out of its step. The rows
   * behind it were computed from it. A pop back to it removes the mark. */
  int64_t first_unwritten = kAllWritten;

  /*! \brief The text position where the first span begins whose rows see later positions. Rows of
   * a span depend on what follows them in it, so the text before it alone may be found by its
   * tokens. A pop back to it removes the mark. */
  int64_t first_span = kAllWritten;

  /*! \brief Forgets the first span if it begins at this text position or behind it. */
  void ForgetSpansFrom(int64_t position) {
    if (position <= first_span) first_span = kAllWritten;
  }

  int64_t committed_length() const { return length - tree.size(); }
  /*!
   * \brief Leading positions that are committed, have arrived, and were written by every layer.
   *
   * Only these may be sent or saved, and those of them before a span found by their tokens. For
   * sequences without a window: of others, nothing is.
   */
  int64_t publishable_length() const {
    return std::min(receive ? receive->begin : committed_length(), first_unwritten);
  }
  /*! \brief Leading positions that may be found by their tokens, and stored. */
  int64_t recordable_length() const { return std::min(publishable_length(), first_span); }
};

/*! \throws Error (ValueError) when the sequence has a window or dropped positions. */
void RequireNoWindow(const Sequence& sequence, const char* what);

/*! \throws Error (ValueError) when a layer has left out a row before position `end`. */
void RequireWritten(const Sequence& sequence, int64_t end, const char* what);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_SEQUENCES_SEQUENCE_H_
