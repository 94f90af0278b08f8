// SPDX-License-Identifier: Apache-2.0
/*!
 * \file drawn_step.h
 * \brief The arguments of a step, decoded from bytes: mostly right ones.
 */
#ifndef TVM_PAGEDKV_FUZZ_DRAWN_STEP_H_
#define TVM_PAGEDKV_FUZZ_DRAWN_STEP_H_

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "bytes.h"

namespace pagedkv {

struct DrawnStep {
  std::vector<int64_t> ids, lengths;
  std::optional<std::vector<int64_t>> parents;  // of a step with token trees

  /*! \param num_nodes_of Called with an id: the nodes that the sequence's tree has. */
  template <typename NumNodes>
  DrawnStep(Bytes* bytes, int64_t max_id, int64_t max_rows, NumNodes num_nodes_of) {
    const int64_t batch = bytes->Between(0, 4);
    const bool is_decode = bytes->Next() % 2;
    for (int64_t i = 0; i < batch; ++i) {
      ids.push_back(bytes->Around(0, max_id));
      lengths.push_back(is_decode ? 1 : bytes->Around(1, max_rows / 2));
    }
    if (bytes->Next() % 16 == 0) lengths.push_back(1);
    if (bytes->Next() % 4 != 0) return;
    parents.emplace();
    for (int64_t i = 0; i < batch; ++i) {
      const int64_t first = num_nodes_of(ids[i]);
      for (int64_t n = 0; n < std::min<int64_t>(lengths[i], max_rows); ++n) {
        const bool is_chain = bytes->Next() % 2;
        const int64_t last = std::min<int64_t>(first + n - 1, 200);
        parents->push_back(is_chain ? first + n - 1 : bytes->Around(-1, last));
      }
    }
  }
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_FUZZ_DRAWN_STEP_H_
