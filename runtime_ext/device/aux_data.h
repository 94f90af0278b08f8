// SPDX-License-Identifier: Apache-2.0
/*!
 * \file aux_data.h
 * \brief The int32 arrays of a step: written on the host, copied to the device at once.
 *
 * Merged: slices of one buffer, each at a multiple of 64 bytes, laid out anew in each step; one
 * copy of exactly the bytes in use. Plain: a buffer and a copy for each array, for devices that
 * cannot address into a buffer. On a CPU the tensors lie on the host memory; nothing is copied.
 *
 * Where the device has streams there are four of all that, in turns: the host writes the arrays of
 * a step, and they travel on a stream for copies, while kernels of the steps before still read
 * theirs. Each pair of turns has such a stream. One event a step lets the kernels wait for their
 * arrays; one for each pair lets its next copies, and the host before it writes, wait for all
 * kernels that read those of the last time. DeviceAPI cannot ask whether they are through, so the
 * host waits in every second step; where it is less than three steps ahead it need not stop.
 */
#ifndef TVM_PAGEDKV_DEVICE_AUX_DATA_H_
#define TVM_PAGEDKV_DEVICE_AUX_DATA_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "device/device_memory.h"

namespace pagedkv {

class AuxData {
 public:
  /*!
   * \brief Room for arrays of `sizes` rows; more is made when a step needs it.
   * \param row_shapes Of the first arrays; those of the others, whose rows are numbers, are empty.
   */
  AuxData(bool is_merged, DLDevice device, const std::vector<int64_t>& sizes, ByteCounter counter,
          const std::vector<std::vector<int64_t>>& row_shapes = {});
  ~AuxData();
  AuxData(const AuxData&) = delete;
  AuxData& operator=(const AuxData&) = delete;

  /*! \brief Adds arrays behind the others, from the next Layout on. */
  void AddArrays(size_t count, const std::vector<std::vector<int64_t>>& row_shapes = {});

  /*! \brief Lays out the arrays of the next step; their content is undefined until written. */
  void Layout(const std::vector<int64_t>& sizes);
  /*! \brief Where the host writes array `i`. */
  int32_t* host(size_t i) { return turn_->arrays[i].host; }
  /*!
   * \brief Copies what the host has written.
   *
   * Kernels see it that are launched after it on the stream that is current now.
   */
  void Upload();
  /*! \brief Array `i` as kernels take it. */
  const ffi::Tensor& view(size_t i) const { return turn_->arrays[i].view.get(); }

  /*! \brief Array `i` from its start as a matrix. */
  ffi::Tensor Matrix(size_t i, int64_t num_rows, int64_t num_columns) const;

  bool is_merged() const { return is_merged_; }
  int64_t num_bytes_copied() const { return num_bytes_copied_; }
  /*! \brief Bytes of the buffers on the device. */
  int64_t num_bytes() const;

 private:
  struct Buffer {
    int64_t capacity = 0;  // elements
    int64_t size = 0;      // elements in use
    ffi::Tensor host;      // the same tensor as `device` on a CPU
    ffi::Tensor device;
  };
  struct Array {
    size_t buffer;
    int64_t row_size;  // elements
    int64_t offset;    // elements
    int32_t* host;
    StepView view;
  };

  /*! \brief All that a step's arrays take; steps take turns. */
  struct Turn {
    std::vector<Array> arrays;
    std::vector<Buffer> buffers;
    std::shared_ptr<DeviceStream> copies;  // of a pair of turns
    bool is_uploaded = false;
  };

  void Reserve(Buffer* buffer, int64_t num_elements);
  void NextTurn();
  void WaitForCopies(const Turn& turn);
  void OrderAfterReaders(const Turn& turn);

  bool is_merged_;
  DLDevice device_;
  ByteCounter counter_;
  bool has_streams_;
  int64_t num_bytes_copied_ = 0;
  std::vector<Turn> turns_;
  Turn* turn_;  // that of the step
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_DEVICE_AUX_DATA_H_
