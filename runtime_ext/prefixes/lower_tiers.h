// SPDX-License-Identifier: Apache-2.0
/*!
 * \file lower_tiers.h
 * \brief The tiers below the pages of a cache: they are opened once, before the first text.
 */
#ifndef TVM_PAGEDKV_PREFIXES_LOWER_TIERS_H_
#define TVM_PAGEDKV_PREFIXES_LOWER_TIERS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/caller_guard.h"
#include "base/process.h"
#include "prefixes/host_memory_object.h"
#include "prefixes/page_transfers.h"
#include "state/table/sequence_table.h"
#include "step/step.h"

namespace pagedkv {

class LowerTiers {
 public:
  /*!
   * \brief The objects must outlive this.
   * \param layout What decides the bytes of a page, in words.
   */
  LowerTiers(Step* step, SequenceTable* table, CallerGuard* guard, std::string layout)
      : step_(step), table_(table), guard_(guard), layout_(std::move(layout)) {}
  /*! \brief Lets the worker finish what is to be written, without waiting for it. In a forked child
   * there is no worker. */
  ~LowerTiers();
  LowerTiers(const LowerTiers&) = delete;
  LowerTiers& operator=(const LowerTiers&) = delete;

  /*!
   * \brief Keeps pages in host memory, and in a store if a worker serves one.
   * \param options See LowerTierOptions.
   * \throws Error (ValueError, TypeError, MemoryError); then nothing has changed.
   */
  HostMemoryRef Open(const ffi::Map<ffi::String, ffi::Any>& options);
  /*! \brief What Open has returned; null before. */
  HostMemoryRef Get() const { return host_memory_; }
  /*! \brief Forgets all texts, in the pools and in host memory. */
  void ForgetTexts();

  // Calls that wait: other threads may use the cache meanwhile, and Python's signals end them.
  /*! \brief Waits until the store has what was to be written. \return Whether it has. */
  bool Flush(double seconds);
  /*! \brief Waits for a lookup. \return Whether it has ended. */
  bool Wait(int64_t ticket, double seconds);
  /*! \brief Lets lookups find what was saved. */
  void Settle() {
    if (transfers_ != nullptr) transfers_->Settle();
  }

  double lookup_timeout() const { return lookup_timeout_; }
  /*!
   * \brief Fills the pages of a new sequence, or removes it again.
   * \return Whether all values were whole. Those that were not are gone.
   */
  bool Load(int64_t sequence_id, const std::vector<PageLoad>& loads);
  /*! \throws Error (RuntimeError). */
  void CheckIntegrity() const;
  /*! \brief Counts since the tiers were opened, and sizes now; empty without tiers. */
  ffi::Map<ffi::String, ffi::Any> Stats() const;

 private:
  OwnProcess process_;
  Step* step_;
  SequenceTable* table_;
  CallerGuard* guard_;
  std::string layout_;
  HostMemoryRef host_memory_;
  std::unique_ptr<PageTransfers> transfers_;
  double lookup_timeout_ = 0;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_PREFIXES_LOWER_TIERS_H_
