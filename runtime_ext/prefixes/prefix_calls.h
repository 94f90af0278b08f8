// SPDX-License-Identifier: Apache-2.0
/*!
 * \file prefix_calls.h
 * \brief Prompts that begin like earlier ones: token ids as callers give them.
 */
#ifndef TVM_PAGEDKV_PREFIXES_PREFIX_CALLS_H_
#define TVM_PAGEDKV_PREFIXES_PREFIX_CALLS_H_

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/container/variant.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <vector>

#include "prefixes/lower_tiers.h"
#include "state/table/sequence_table.h"
#include "step/step.h"

namespace pagedkv {

namespace ffi = tvm::ffi;

/*! \brief Token ids: a Shape, or an int32 or int64 vector on the CPU, which is faster to make from
 * Python. */
using TokenIds = ffi::Variant<ffi::Shape, ffi::Tensor>;

class PrefixCalls {
 public:
  /*! \brief All must outlive this. */
  PrefixCalls(Step* step, SequenceTable* table, LowerTiers* tiers)
      : step_(step), table_(table), tiers_(tiers) {}

  // Token ids are non-negative int32 values. Each call throws Error (ValueError, KeyError); then
  // nothing has changed.
  /*! \brief Returns how many positions Add would reuse for these tokens. */
  int64_t Match(const TokenIds& tokens, const ffi::Bytes& salt);
  /*!
   * \brief Adds a sequence that begins with the pages of an earlier text. Its tokens are recorded.
   * Waits for a store as long as the tiers were opened with.
   * \param salt The namespace: texts of different salts never meet.
   * \return The length of the new sequence, less than the number of tokens.
   */
  int64_t Add(int64_t sequence_id, const TokenIds& tokens, const ffi::Bytes& salt);
  /*! \brief Like Add; waits for a store at most this long. */
  int64_t AddWithin(int64_t sequence_id, const TokenIds& tokens, const ffi::Bytes& salt,
                    double seconds);
  /*! \brief Begins to bring the pages of a text from the store. \return The lookup's ticket. */
  int64_t Prefetch(const TokenIds& tokens, const ffi::Bytes& salt);
  /*!
   * \brief The tier of each full page of a text: 0 none, 1 a pool, 2 host memory, 3 the store.
   * \param seconds The most to wait for the store; what it has not told by then is nowhere.
   * \return [page][group]
   */
  ffi::Shape Locate(const TokenIds& tokens, const ffi::Bytes& salt, double seconds);
  /*!
   * \brief Records the tokens of committed positions, so that others find their pages.
   * \param begin The first position; those before it must be recorded.
   */
  void Record(int64_t sequence_id, int64_t begin, const TokenIds& tokens);
  /*! \brief Records the tokens of all rows of the step; it counts when the step ends. */
  void RecordStep(const TokenIds& tokens);
  // Hints; see eviction_hints.h.
  /*! \param seconds The hint ends after so many; infinity: never. */
  int64_t Retain(const TokenIds& tokens, const ffi::Bytes& salt, int64_t priority, double seconds);
  int64_t Pin(const TokenIds& tokens, const ffi::Bytes& salt, double seconds);
  /*! \return Whether the hint had not ended yet. */
  bool Release(int64_t hint);
  /*! \param tier "host" or "store", where the text goes; empty: host memory, if there is any. */
  int64_t Demote(const TokenIds& tokens, const ffi::Bytes& salt, const ffi::String& tier);
  /*! \brief Loads pages of a text from host memory to the pools. \return Positions that are there.
   */
  int64_t Load(const TokenIds& tokens, const ffi::Bytes& salt);
  /*! \brief Hints expire as if so much time had passed, for tests and replays of traces. */
  void AdvanceClock(double seconds);
  /*! \brief Ends the hints whose time is over, while the cache is idle. */
  void ExpireHints() noexcept;

  /*! \brief Positions of a sequence whose tokens are recorded. */
  int64_t NumRecorded(int64_t sequence_id) const;

 private:
  /*! \brief The view is valid until the next call. */
  TokenSpan Convert(const TokenIds& tokens);
  TokenSpan Convert(const int64_t* tokens, size_t size);
  void RequireNext(const Sequence& sequence, int64_t begin) const;
  int64_t NowUs() const;
  int64_t ExpiryAfter(double seconds) const;

  Step* step_;
  SequenceTable* table_;
  LowerTiers* tiers_;
  std::vector<int32_t> tokens_;  // scratch
  int64_t clock_offset_us_ = 0;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_PREFIXES_PREFIX_CALLS_H_
