// SPDX-License-Identifier: Apache-2.0
/*!
 * \file page_io.cc
 * \brief Whole pages of a layer out of its pool and into it.
 */
#include "storage/page_io.h"

#include <algorithm>
#include <cstring>

#include "device/device_stream.h"

namespace pagedkv {

namespace {

/*! \brief Host memory of one byte value, for copies to a device. */
ffi::Tensor HostBytes(int64_t num_bytes, char value) {
  ffi::Tensor bytes = AllocateTensor({num_bytes}, kByte, {kDLCPU, 0}, UncountedBytes());
  std::fill_n(static_cast<char*>(bytes.data_ptr()), num_bytes, value);
  return bytes;
}

/*! \brief Calls copy(begin, count) for every run of pages with consecutive ids; those with a
 * negative one are left out. */
template <typename Copy>
void ForEachRun(const std::vector<int64_t>& pages, Copy copy) {
  for (size_t begin = 0, end; begin < pages.size(); begin = end) {
    end = begin + 1;
    if (pages[begin] < 0) continue;
    while (end < pages.size() && pages[end] == pages[end - 1] + 1) ++end;
    copy(begin, end - begin);
  }
}

/*! \brief Waits where the copy is between host memory, which is the caller's again, and a device.
 */
void FinishCopy(DLDevice device, const ffi::Tensor& tensor, void* stream) {
  if (IsSame(tensor.device(), device) || IsHost(device)) return;
  Synchronize(device, stream);
}

void CopyFromPool(const ffi::Tensor& pool, int64_t page_bytes, const std::vector<int64_t>& pages,
                  const ffi::Tensor& out) {
  void* stream = CurrentStream(pool.device());
  ForEachRun(pages, [&](size_t begin, size_t count) {
    CopyBytes(pool, pages[begin] * page_bytes, out, begin * page_bytes, count * page_bytes, stream);
  });
  FinishCopy(pool.device(), out, stream);
}

void CopyToPool(const ffi::Tensor& pool, int64_t page_bytes, const std::vector<int64_t>& pages,
                const ffi::Tensor& data) {
  void* stream = CurrentStream(pool.device());
  ForEachRun(pages, [&](size_t begin, size_t count) {
    CopyBytes(data, begin * page_bytes, pool, pages[begin] * page_bytes, count * page_bytes,
              stream);
  });
  FinishCopy(pool.device(), data, stream);
}

}  // namespace

void ReadPages(const StoredLayer& layer, const std::vector<int64_t>& pages,
               const std::vector<int64_t>& num_slots, const ffi::Tensor& out) {
  const SlotLayout& layout = layer.layout;
  void* stream = CurrentStream(layer.pages.device());
  CopyFromPool(layer.pages, layout.page_bytes, pages, out);
  const ffi::Tensor zeros = HostBytes(layout.page_bytes, '\0');
  auto clear = [&](int64_t offset, int64_t num_bytes) {
    if (IsHost(out.device())) {
      auto* host = static_cast<char*>(out.data_ptr()) + out.byte_offset();
      std::memset(host + offset, 0, num_bytes);
    } else if (num_bytes > 0) {
      CopyBytes(zeros, 0, out, offset, num_bytes, stream);
    }
  };
  for (size_t i = 0; i < pages.size(); ++i) {
    const int64_t num_unused = layout.page_size - num_slots[i];
    const int64_t page_begin = static_cast<int64_t>(i) * layout.page_size;
    clear(page_begin / layout.page_size * layout.page_bytes + layout.used_bytes(),
          layout.page_bytes - layout.used_bytes());
    if (num_unused == 0) continue;
    for (const SlotLayout::Section& section : layout.sections) {
      for (int64_t row = section.first_row; row < section.end_row(); ++row) {
        clear(layout.RowOffset(section, page_begin + num_slots[i], row),
              num_unused * section.row_bytes);
      }
    }
  }
}

void WritePages(const StoredLayer& layer, const std::vector<int64_t>& pages,
                const ffi::Tensor& data) {
  CopyToPool(layer.pages, layer.layout.page_bytes, pages, data);
}

void ReadStates(const StoredLayer& layer, const std::vector<int64_t>& pages,
                const ffi::Tensor& out) {
  CopyFromPool(layer.states, BytesOfState(layer.states), pages, out);
}

void WriteStates(const StoredLayer& layer, const std::vector<int64_t>& pages,
                 const ffi::Tensor& data) {
  CopyToPool(layer.states, BytesOfState(layer.states), pages, data);
}

int64_t BytesOfState(const ffi::Tensor& states) {
  const auto num_bytes = static_cast<int64_t>(ffi::GetDataSize(*states.GetDLTensorPtr()));
  return num_bytes / states.size(0);
}

void PoisonState(const ffi::Tensor& states, int64_t page) {
  const int64_t num_bytes = BytesOfState(states);
  const ffi::Tensor ones = HostBytes(num_bytes, '\xff');
  CopyBytes(ones, 0, states, page * num_bytes, num_bytes, CurrentStream(states.device()));
  FinishCopy(states.device(), ones, CurrentStream(states.device()));
}

void PoisonSlots(const StoredLayer& layer, const std::vector<bool>& is_held) {
  const SlotLayout& layout = layer.layout;
  const int64_t page_size = layout.page_size;
  // All bits set: a NaN in every floating-point type, also in those of scales.
  const ffi::Tensor ones = HostBytes(layout.page_bytes, '\xff');
  void* stream = CurrentStream(layer.pages.device());
  const auto num_slots = static_cast<int64_t>(is_held.size());
  for (int64_t page_begin = 0; page_begin < num_slots; page_begin += page_size) {
    const int64_t page_end = page_begin + page_size;
    for (int64_t begin = page_begin, end; begin < page_end; begin = end) {
      for (end = begin + 1; end < page_end && is_held[end] == is_held[begin];) ++end;
      if (is_held[begin]) continue;
      if (end - begin == page_size) {
        const int64_t page = begin / page_size;
        CopyBytes(ones, 0, layer.pages, page * layout.page_bytes, layout.page_bytes, stream);
        continue;
      }
      for (const SlotLayout::Section& section : layout.sections) {
        for (int64_t row = section.first_row; row < section.end_row(); ++row) {
          CopyBytes(ones, 0, layer.pages, layout.RowOffset(section, begin, row),
                    (end - begin) * section.row_bytes, stream);
        }
      }
    }
  }
}

}  // namespace pagedkv
