// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_copier.h
 * \brief Copies shared pages before a sequence writes to them (copy on write).
 *
 * With the kernel `copy_pages` one launch copies many pages of a layer: sequences that were forked
 * together are written together. Without it each page and layer takes a launch of its own.
 */
#ifndef TVM_PAGEDKV_STORAGE_PAGE_COPIER_H_
#define TVM_PAGEDKV_STORAGE_PAGE_COPIER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "device/aux_data.h"
#include "state/table/copy_on_write.h"
#include "storage/layer_storage.h"

namespace pagedkv {

class PageCopier {
 public:
  explicit PageCopier(const LayerStorage& storage);

  /*! \brief Copies in all layers of each page's group, on the current stream. */
  void Copy(const std::vector<PageCopy>& copies);

  /*! \brief Counts copies that are now in page tables; those of a failed change do not count. */
  void CountCommitted(size_t num_copies) { num_copies_ += static_cast<int64_t>(num_copies); }
  /*! \brief Pages copied so far; a page counts once for all layers of its group. */
  int64_t num_copies() const { return num_copies_; }
  /*! \brief Null without the kernel `copy_pages`. */
  const AuxData* arrays() const { return arrays_.get(); }

 private:
  void CopyTogether(const PageCopy* begin, const PageCopy* end);
  void CopyOne(const PageCopy& copy) const;

  const LayerStorage& storage_;
  std::unique_ptr<AuxData> arrays_;
  std::vector<int64_t> array_sizes_;  // [group]
  int64_t num_copies_ = 0;
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_STORAGE_PAGE_COPIER_H_
