// SPDX-License-Identifier: Apache-2.0
/*!
 * \file parallel.h
 * \brief Loops on the host that share their work among the threads of kernels.
 */
#ifndef TVM_PAGEDKV_DEVICE_PARALLEL_H_
#define TVM_PAGEDKV_DEVICE_PARALLEL_H_

#include <tvm/runtime/c_backend_api.h>

#include <cstdint>

#include "device/parallel_launch.h"

namespace pagedkv {

/*!
 * \brief Calls body(i) for each i in [0, count), in any order.
 * \param body Must not throw, and may be called again for an i that it was called for.
 * \param num_bytes That the loop moves: few are not worth waking threads.
 */
template <typename Body>
void ParallelFor(int64_t count, int64_t num_bytes, const Body& body) {
  constexpr int64_t kMinBytes = 2 << 20;
  struct Loop {
    int64_t count;
    const Body& body;

    static int Run(int task, TVMParallelGroupEnv* group, void* data) {
      const Loop& loop = *static_cast<const Loop*>(data);
      const int64_t end = loop.count * (task + 1) / group->num_task;
      for (int64_t i = loop.count * task / group->num_task; i < end; ++i) loop.body(i);
      return 0;
    }
  };
  Loop loop{count, body};
  const bool is_done = num_bytes >= kMinBytes && ParallelLaunch(&Loop::Run, &loop, 0) == 0;
  for (int64_t i = 0; i < count && !is_done; ++i) body(i);
}

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_DEVICE_PARALLEL_H_
