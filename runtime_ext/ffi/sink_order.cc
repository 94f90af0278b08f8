// SPDX-License-Identifier: Apache-2.0
/*!
 * \file sink_order.cc
 * \brief Functions of attention that take learned sinks before or after their outputs.
 */
#include "ffi/sink_order.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>

#include "device/tensor_checks.h"

namespace pagedkv {

namespace {

constexpr int kMaxArguments = 10;

std::optional<int> DimensionsOf(const ffi::AnyView& value) {
  const auto tensor = value.as<ffi::Tensor>();
  return tensor && tensor->defined() ? std::optional<int>(tensor->ndim()) : std::nullopt;
}

std::string TextOf(const ffi::AnyView& value) {
  const auto tensor = value.as<ffi::Tensor>();
  return tensor && tensor->defined() ? ShapeText(tensor->shape()) : value.GetTypeKey();
}

/*! \brief Whether the sinks come before the outputs, in a call with all arguments. */
bool AreSinksFirst(const ffi::PackedArgs& args, int num_outputs) {
  const ffi::AnyView last = args[args.size() - 1];
  if (last == nullptr) return false;
  const ffi::AnyView if_last = args[args.size() - 1 - num_outputs];  // o, if the sinks are last
  const ffi::AnyView if_first = args[args.size() - num_outputs];
  const bool is_last = DimensionsOf(if_last) == 3, is_first = DimensionsOf(if_first) == 3;
  if (is_last != is_first) return is_first;
  if (!DimensionsOf(last)) return false;  // which the method refuses
  throw ffi::Error(kValueError,
                   "an attention call with sink_logits takes its output o, of three dimensions, "
                   "before or after the sinks, of one; got tensors of shapes " +
                       TextOf(if_last) + " and " + TextOf(if_first),
                   "");
}

}  // namespace

ffi::Function WithSinksInEitherOrder(CacheMethod method, int num_outputs, SinkNeed need) {
  method.num_optional = need == SinkNeed::kOptional ? 1 : 0;
  return ffi::Function::FromPacked([attend = ToFunction(method), num_args = method.num_args,
                                    num_outputs, need](ffi::PackedArgs args, ffi::Any* result) {
    if (args.size() != num_args) return attend.CallPacked(args, result);
    std::array<ffi::AnyView, kMaxArguments> ordered;  // a step allocates nothing
    for (int i = 0; i < num_args; ++i) ordered[i] = args[i];
    if (AreSinksFirst(args, num_outputs)) {
      const auto sinks = ordered.begin() + (num_args - 1 - num_outputs);
      std::rotate(sinks, sinks + 1, ordered.begin() + num_args);
    }
    if (need == SinkNeed::kRequired && ordered[num_args - 1] == nullptr) {
      throw ffi::Error(kTypeError, "sink_logits must be a tensor, got None", "");
    }
    attend.CallPacked(ffi::PackedArgs(ordered.data(), num_args), result);
  });
}

}  // namespace pagedkv
