// SPDX-License-Identifier: Apache-2.0
/*!
 * \file arguments.h
 * \brief Arguments and results of methods as the FFI passes them. Tensors, functions and numbers
 * pass as they are; lists and text do so as types of the standard library.
 */
#ifndef TVM_PAGEDKV_FFI_ARGUMENTS_H_
#define TVM_PAGEDKV_FFI_ARGUMENTS_H_

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "state/sequences/token_tree.h"

namespace pagedkv {

namespace ffi = tvm::ffi;

/*! \brief The FFI's type for a parameter of type T. A span is read until the call returns. */
template <typename T>
struct ArgumentOf {
  using Type = T;
  static T Convert(T value) { return value; }
};

template <>
struct ArgumentOf<IntSpan> {
  using Type = ffi::Shape;
  static IntSpan Convert(const ffi::Shape& shape) { return {shape.data(), shape.size()}; }
};

template <>
struct ArgumentOf<std::optional<IntSpan>> {
  using Type = ffi::Optional<ffi::Shape>;
  static std::optional<IntSpan> Convert(const ffi::Optional<ffi::Shape>& shape) {
    if (!shape.has_value()) return std::nullopt;
    return IntSpan{shape.value().data(), shape.value().size()};
  }
};

template <>
struct ArgumentOf<std::string> {
  using Type = ffi::String;
  static std::string Convert(const ffi::String& text) { return text; }
};

template <>
struct ArgumentOf<std::vector<int64_t>> {
  using Type = ffi::Shape;
  static std::vector<int64_t> Convert(const ffi::Shape& shape) {
    return {shape.begin(), shape.end()};
  }
};

template <typename T>
struct ArgumentOf<std::vector<T>> {
  using Type = ffi::Array<typename ArgumentOf<T>::Type>;
  static std::vector<T> Convert(const Type& array) {
    std::vector<T> values;
    for (const auto& value : array) values.push_back(ArgumentOf<T>::Convert(value));
    return values;
  }
};

template <typename T>
T ConvertResult(T result) {
  return result;
}
inline ffi::Shape ConvertResult(const std::vector<int64_t>& numbers) { return ffi::Shape(numbers); }
inline ffi::String ConvertResult(const std::string& text) { return text; }

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_FFI_ARGUMENTS_H_
