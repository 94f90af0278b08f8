// SPDX-License-Identifier: Apache-2.0
/*!
 * \file device_stream.h
 * \brief Streams of a device: the current one, events between two, and the order of a cache's work.
 *
 * All calls go through functions of TVM's FFI, whose signatures are stable. The virtual functions
 * of DeviceAPI are not.
 */
#ifndef TVM_PAGEDKV_DEVICE_DEVICE_STREAM_H_
#define TVM_PAGEDKV_DEVICE_DEVICE_STREAM_H_

#include <tvm/ffi/container/tensor.h>

#include <memory>

#include "base/process.h"

namespace pagedkv {

namespace ffi = tvm::ffi;

/*! \brief Whether the device queues work on streams. */
bool HasStreams(DLDevice device);

/*! \brief The current stream of this thread; null for the default stream. */
void* CurrentStream(DLDevice device);

/*! \brief Blocks the host until all work queued on `stream` has finished. */
void Synchronize(DLDevice device, void* stream);

/*! \brief A copy of a compact tensor's bytes in memory of the host. */
ffi::Tensor BytesOnHost(const ffi::Tensor& tensor);

/*! \brief Lets later work on `after` wait for the work queued on `before` so far (an event). */
void OrderStreams(DLDevice device, void* before, void* after);

/*! \brief A stream that this object owns. */
class DeviceStream {
 public:
  explicit DeviceStream(DLDevice device);
  ~DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  void* get() const { return stream_; }

 private:
  OwnProcess process_;
  DLDevice device_;
  void* stream_;
};

/*!
 * \brief Keeps the work of one cache in the order of its calls, whichever stream each call is on.
 *
 * A step has a home stream: the current stream of begin_forward. A call on another stream gets an
 * event from the home stream before it and an event back after it. So the work of every later call
 * comes after it, and the other stream may be destroyed as soon as the call has returned. Between
 * steps the home stream is the default stream or one that the cache owns, so the stream of a step
 * need not outlive it.
 */
class StreamOrder {
 public:
  explicit StreamOrder(DLDevice device) : device_(device), has_streams_(HasStreams(device)) {}

  /*! \brief A call that queues work. Does nothing on devices without streams. */
  class Call {
   public:
    explicit Call(StreamOrder* order);
    /*! \brief Orders the home stream after this call. Throws only if the call has not thrown. */
    ~Call() noexcept(false);
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    StreamOrder* order_;
    void* stream_ = nullptr;
    bool is_elsewhere_ = false;
    int num_exceptions_;
  };

  /*! \brief Makes the current stream the home stream; within a Call. */
  void BeginStep();
  /*! \brief Leaves the step's stream. */
  void EndStep();
  /*! \brief Blocks the host until all work of the cache has finished. */
  void Synchronize() const;

 private:
  DLDevice device_;
  bool has_streams_;
  void* home_ = nullptr;
  std::unique_ptr<DeviceStream> between_steps_;  // created when a step is not on the default stream
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_DEVICE_DEVICE_STREAM_H_
