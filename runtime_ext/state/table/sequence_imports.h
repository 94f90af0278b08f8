// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sequence_imports.h
 * \brief Imports: sequences take their pages first and get the content later.
 *
 * Until its import is finished, a sequence can only be removed, together with the others of the
 * import.
 *
 * An import may bring pages that the sequence need not have, those before what a window keeps. They
 * are for forks and pops that go further back: with the end of the import they become cached, as
 * pages that a window leaves behind. Where there is no room for all of them, the first ones are
 * left out.
 */
#ifndef TVM_PAGEDKV_STATE_TABLE_SEQUENCE_IMPORTS_H_
#define TVM_PAGEDKV_STATE_TABLE_SEQUENCE_IMPORTS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "state/table/sequence_table.h"

namespace pagedkv {

/*! \brief One sequence of an import. */
struct ImportedSequence {
  int64_t id;
  int64_t length;
  std::vector<int64_t> first_pages;                // [pool]
  std::vector<std::vector<int64_t>> page_numbers;  // [pool] indices into SequenceImport::pages
  std::vector<int64_t> state_lengths = {};         // [state group], SequenceStates::length
};

class SequenceImports {
 public:
  /*! \brief The table must outlive this. */
  explicit SequenceImports(SequenceTable* table) : table_(table) {}

  /*!
   * \brief Takes the pages of new sequences, or of existing empty ones.
   * \throws Error (ValueError, CacheFullError).
   */
  void Begin(std::vector<ImportedSequence> imported, size_t num_page_groups) const;
  /*! \brief Pages of the sequence in a pool; not positive where its numbers make no sense. */
  int64_t NumPages(const ImportedSequence& sequence, int32_t pool) const;
  /*! \throws Error (KeyError; ValueError when the sequence is not being imported). */
  SequenceImport& At(int64_t id) const;
  /*! \brief Makes all sequences of the import usable, and lets their first pages become cached that
   * they need not have. */
  void Finish(int64_t id) const;
  /*! \brief Sequences that are being imported. */
  int64_t num_importing() const;

 private:
  /*! \brief Adds the sequences that do not exist; others must be empty. \throws Error (ValueError).
   */
  void AddSequences(const std::vector<int64_t>& ids) const;
  void Check(const ImportedSequence& sequence, int32_t pool) const;
  void CheckPositions(const ImportedSequence& sequence, int32_t group) const;
  /*! \brief That any state behind the last full one can be computed from what is kept. */
  void CheckStates(const ImportedSequence& sequence, int32_t state_group) const;
  /*! \brief The first page of a pool that the sequence must have. */
  int64_t FirstNeeded(const ImportedSequence& sequence, int32_t pool) const;
  /*!
   * \brief For each page number of an import in a pool, whether there is room for the page.
   * \throws Error (ValueError, CacheFullError).
   */
  std::vector<bool> PagesToTake(const std::vector<ImportedSequence>& imported, int32_t pool) const;
  /*! \brief Leading pages of a sequence that the import leaves out. */
  static int64_t NumLeftOut(const ImportedSequence& sequence, int32_t pool,
                            const std::vector<bool>& is_taken);

  SequenceTable* table_;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STATE_TABLE_SEQUENCE_IMPORTS_H_
