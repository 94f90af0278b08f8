// SPDX-License-Identifier: Apache-2.0
/*!
 * \file method.h
 * \brief Methods of the cache's parts as FFI functions, whose first argument is the cache.
 *
 * Everything that methods share (the count of arguments, errors, the guard of the cache) is
 * compiled once, in method.cc; each method adds the conversion of its arguments. The FFI's own
 * `FromTyped` compiles all of it for every function, which took half of the time of building the
 * library.
 */
#ifndef TVM_PAGEDKV_FFI_METHOD_H_
#define TVM_PAGEDKV_FFI_METHOD_H_

#include <tvm/ffi/function.h>

#include <cstddef>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "ffi/arguments.h"
#include "ffi/cache_object.h"
#include "prefixes/host_memory_object.h"

namespace pagedkv {

/*! \brief Calls f and turns an Error into the Python exception that it names. */
template <typename F>
auto Translate(F f) -> decltype(f()) {
  try {
    return f();
  } catch (const Error& error) {
    throw ffi::Error(error.kind(), error.message(), "");
  } catch (const std::bad_alloc&) {
    throw ffi::Error(kMemoryError, "the host has no memory left", "");
  }
}

/*! \brief Raises a TypeError that names an argument, counted from 0. */
[[noreturn]] void RaiseMismatch(int index, const std::string& expected, const std::string& got);

/*! \brief Raises a TypeError unless the call has so many arguments, or up to `num_optional` less.
 */
void CheckCount(const ffi::PackedArgs& args, int num_args, int num_optional);

/*! \brief The argument at an index as a T; a missing one is None. */
template <typename T>
[[gnu::noinline]] T TakeArgument(const ffi::PackedArgs& args, int index) {
  const ffi::AnyView argument = index < args.size() ? args[index] : ffi::AnyView(nullptr);
  std::optional<T> value = argument.try_cast<T>();
  if (!value) {
    const TVMFFIAny got = argument.CopyToTVMFFIAny();
    using Traits = ffi::TypeTraits<T>;
    RaiseMismatch(index, Traits::TypeStr(), Traits::GetMismatchTypeInfo(&got));
  }
  return *std::move(value);
}

/*! \brief The type of a pointer to a method, taken apart. */
template <typename Part, typename R, typename... Args>
struct MethodType {
  using Owner = Part;
  static constexpr int kNumArgs = 1 + sizeof...(Args);  // with the object

  template <auto kMethod, size_t... kIndices>
  static void Call(Part& part, [[maybe_unused]] const ffi::PackedArgs& args,
                   [[maybe_unused]] ffi::Any* result, std::index_sequence<kIndices...>) {
    // In one statement, until whose end the shape of a span lives.
    if constexpr (std::is_void_v<R>) {
      (part.*kMethod)(ArgumentOf<std::decay_t<Args>>::Convert(
          TakeArgument<typename ArgumentOf<std::decay_t<Args>>::Type>(args, 1 + kIndices))...);
    } else {
      *result = ConvertResult((part.*kMethod)(ArgumentOf<std::decay_t<Args>>::Convert(
          TakeArgument<typename ArgumentOf<std::decay_t<Args>>::Type>(args, 1 + kIndices))...));
    }
  }

  template <auto kMethod>
  static void Call(Part& part, const ffi::PackedArgs& args, ffi::Any* result) {
    Call<kMethod>(part, args, result, std::index_sequence_for<Args...>());
  }
};

template <typename Part, typename R, typename... Args>
MethodType<Part, R, Args...> TypeOf(R (Part::*)(Args...));
template <typename Part, typename R, typename... Args>
MethodType<Part, R, Args...> TypeOf(R (Part::*)(Args...) const);

using CacheCall = void (*)(PagedKVCacheObj&, const ffi::PackedArgs&, ffi::Any*);
using TierCall = void (*)(HostMemoryObj&, const ffi::PackedArgs&, ffi::Any*);

/*! \brief A method as data, so that tables of them need no code. */
struct CacheMethod {
  CacheCall call;
  int num_args;      // with the cache
  int num_optional;  // of the last arguments, which may be left out
};
struct TierMethod {
  TierCall call;
  int num_args;  // with the tier
};

template <auto kMethod>
constexpr CacheMethod Method(int num_optional = 0) {
  using Type = decltype(TypeOf(kMethod));
  return {[](PagedKVCacheObj& object, const ffi::PackedArgs& args, ffi::Any* result) {
            Type::template Call<kMethod>(*object.part<typename Type::Owner>(), args, result);
          },
          Type::kNumArgs, num_optional};
}

template <auto kMethod>
constexpr TierMethod MethodOfTier() {
  using Type = decltype(TypeOf(kMethod));
  return {&Type::template Call<kMethod>, Type::kNumArgs};
}

/*! \brief A function that makes the call as the only thread inside the cache. */
ffi::Function ToFunction(CacheMethod method);
/*! \brief A function of a tier, which workers call while others are inside the cache. */
ffi::Function ToFunction(TierMethod method);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_FFI_METHOD_H_
