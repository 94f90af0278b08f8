// SPDX-License-Identifier: Apache-2.0
/*!
 * \file aux_data.h
 * \brief Int32 arrays that the host writes for kernels, with one copy to the device per step.
 *
 * Merged: the arrays are slices of one buffer, each at a multiple of 64 bytes, laid out anew in
 * each step. One copy brings exactly the bytes in use. Plain: each array has a buffer and a copy of
 * its own, for devices that cannot address into a buffer. On a CPU the tensors are views of the
 * host memory, and nothing is copied.
 *
 * On devices with streams there is a ring of four stages, so that the host writes the arrays of a
 * step while kernels of earlier steps read theirs:
 *
 *     stage         0   1   2   3   0   1 ...
 *     copy stream   A   A   B   B   A   A ...
 *
 * Kernels of a step wait for its copy with an event. Before stages 0 and 2 are used again, their
 * copy stream waits for all kernels that read the last arrays of the pair, and the host waits for
 * that stream: DeviceAPI cannot ask whether an event has passed. So the host synchronises in every
 * second step, and blocks only once it is three steps ahead of the device.
 */
#ifndef TVM_PAGEDKV_DEVICE_AUX_DATA_H_
#define TVM_PAGEDKV_DEVICE_AUX_DATA_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/process.h"
#include "device/device_memory.h"

namespace pagedkv {

class AuxData {
 public:
  /*!
   * \brief Allocates arrays of `sizes` rows. They grow when a step needs more.
   * \param row_shapes Shapes of a row, of the first arrays. Rows of the other arrays are numbers.
   */
  AuxData(bool is_merged, DLDevice device, const std::vector<int64_t>& sizes, ByteCounter counter,
          const std::vector<std::vector<int64_t>>& row_shapes = {});
  ~AuxData();
  AuxData(const AuxData&) = delete;
  AuxData& operator=(const AuxData&) = delete;

  /*! \brief Appends arrays; the next Layout must have their sizes. */
  void AddArrays(size_t count, const std::vector<std::vector<int64_t>>& row_shapes = {});

  /*! \brief Lays out the arrays of the next step; their content is undefined until written. */
  void Layout(const std::vector<int64_t>& sizes);
  /*! \brief The memory where the host writes array `i`. */
  int32_t* host(size_t i) { return stage_->arrays[i].host; }
  /*!
   * \brief Copies the arrays to the device.
   *
   * Kernels that are launched later on the current stream see them.
   */
  void Upload();
  /*! \brief Array `i` as kernels take it. */
  const ffi::Tensor& view(size_t i) const { return stage_->arrays[i].view.get(); }

  /*! \brief The first elements of array `i` as a matrix. */
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

  /*! \brief The arrays of one step in the ring. */
  struct Stage {
    std::vector<Array> arrays;
    std::vector<Buffer> buffers;
    std::shared_ptr<DeviceStream> copies;  // shared by a pair of stages
    bool is_uploaded = false;

    /*! \brief Where the elements of an array are: the first buffer if it never had any. */
    const Buffer& buffer_of(const Array& array) const {
      const Buffer& own = buffers[array.buffer];
      return own.capacity > 0 ? own : buffers.front();
    }
  };

  void Reserve(Buffer* buffer, int64_t num_elements);
  void NextStage();
  void WaitForCopies(const Stage& stage);
  void OrderAfterReaders(const Stage& stage);

  bool is_merged_;
  OwnProcess process_;
  DLDevice device_;
  ByteCounter counter_;
  bool has_streams_;
  int64_t num_bytes_copied_ = 0;
  std::vector<Stage> stages_;
  Stage* stage_;  // that of the current step
};

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_DEVICE_AUX_DATA_H_
