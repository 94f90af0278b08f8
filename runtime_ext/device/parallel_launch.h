// SPDX-License-Identifier: Apache-2.0
/*!
 * \file parallel_launch.h
 * \brief The parallel loops of compiled kernels, run by the process's own pool of workers.
 *
 * A library that is loaded finds TVM's `TVMBackendParallelLaunch` by a context symbol, whose place
 * `ServeParallelLaunches` takes. TVM's pool waits for each of its threads, whether or not the
 * system runs it; it has threads for each calling thread, none in a forked child, and the process
 * cannot end before they have spun for a second. Libraries that were loaded before keep TVM's pool.
 */
#ifndef TVM_PAGEDKV_DEVICE_PARALLEL_LAUNCH_H_
#define TVM_PAGEDKV_DEVICE_PARALLEL_LAUNCH_H_

#include <tvm/runtime/c_backend_api.h>

namespace pagedkv {

/*! \brief What `TVMBackendParallelLaunch` does: runs tasks 0 to num_task - 1; 0: one per thread. */
int ParallelLaunch(FTVMParallelLambda function, void* data, int num_task);

/*! \brief What `TVMBackendParallelBarrier` does: a task waits for all the others. */
int ParallelBarrier(int task_id, TVMParallelGroupEnv* env);

/*! \brief Lets the kernels of libraries that are loaded from now on use these functions. */
void ServeParallelLaunches();

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_DEVICE_PARALLEL_LAUNCH_H_
