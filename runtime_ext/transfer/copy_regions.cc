// SPDX-License-Identifier: Apache-2.0
/*!
 * \file copy_regions.cc
 * \brief Many copies between two tensors in one call.
 */
#include "transfer/copy_regions.h"

#include <cstdint>

#include "base/error.h"
#include "device/device_memory.h"
#include "device/device_stream.h"

namespace pagedkv {

namespace {

int64_t NumBytes(const ffi::Tensor& tensor) {
  return tensor.numel() * (tensor.dtype().bits * tensor.dtype().lanes / 8);
}

void CheckTensors(const ffi::Tensor& destination, const ffi::Tensor& source,
                  const ffi::Tensor& regions) {
  for (const ffi::Tensor& each : {destination, source, regions}) {
    if (!each.defined()) Raise(kTypeError, "copy_regions takes three tensors, got None");
    if (!each.IsContiguous()) Raise(kValueError, "the tensors of copy_regions must be contiguous");
  }
  const DLDataType dtype = regions.dtype();
  if (regions.ndim() != 2 || regions.size(1) != 3 || dtype.code != kDLInt || dtype.bits != 64 ||
      dtype.lanes != 1 || regions.device().device_type != kDLCPU) {
    Raise(kValueError, "regions must be int64 [n, 3] on the CPU: destination, source, bytes");
  }
}

}  // namespace

void CopyRegions(const ffi::Tensor& destination, const ffi::Tensor& source,
                 const ffi::Tensor& regions) {
  CheckTensors(destination, source, regions);
  const int64_t limits[] = {NumBytes(destination), NumBytes(source)};
  const auto* rows = reinterpret_cast<const int64_t*>(static_cast<const char*>(regions.data_ptr()) +
                                                      regions.byte_offset());
  for (int64_t i = 0; i < regions.size(0); ++i) {
    const int64_t* row = rows + 3 * i;
    for (int side = 0; side < 2; ++side) {
      if (row[2] < 0 || row[side] < 0 || row[2] > limits[side] ||
          row[side] > limits[side] - row[2]) {
        Raise(kIndexError, "region ", i, " (", row[2], " bytes at ", row[side], ") is not within ",
              limits[side], " bytes of the ", side == 0 ? "destination" : "source");
      }
    }
  }
  const bool is_to_host = destination.device().device_type == kDLCPU;
  const bool is_on_host = is_to_host && source.device().device_type == kDLCPU;
  const DLDevice device = is_to_host ? source.device() : destination.device();
  void* stream = is_on_host ? nullptr : CurrentStream(device);
  for (int64_t i = 0; i < regions.size(0); ++i) {
    const int64_t* row = rows + 3 * i;
    CopyBytes(source, row[1], destination, row[0], row[2], stream);
  }
  // The sender may change the rows once they were read.
  if (!is_on_host) Synchronize(device, stream);
}

}  // namespace pagedkv
