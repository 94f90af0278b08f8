// SPDX-License-Identifier: Apache-2.0
/*!
 * \file method.cc
 * \brief Code that all methods share when they are called through the FFI.
 */
#include "ffi/method.h"

namespace pagedkv {

void CheckCount(const ffi::PackedArgs& args, int num_args, int num_optional) {
  if (args.size() <= num_args && args.size() >= num_args - num_optional) return;
  throw ffi::Error(kTypeError,
                   "Mismatched number of arguments: expected " + std::to_string(num_args) +
                       ", got " + std::to_string(args.size()),
                   "");
}

void RaiseMismatch(int index, const std::string& expected, const std::string& got) {
  throw ffi::Error(kTypeError,
                   "Mismatched type on argument #" + std::to_string(index) + ": expected " +
                       expected + ", got " + got,
                   "");
}

ffi::Function ToFunction(CacheMethod method) {
  return ffi::Function::FromPacked([method](ffi::PackedArgs args, ffi::Any* result) {
    CheckCount(args, method.num_args, method.num_optional);
    const PagedKVCache cache = TakeArgument<PagedKVCache>(args, 0);
    PagedKVCacheObj& object = *cache.get();
    Translate([&] { object.Enter([&] { method.call(object, args, result); }); });
  });
}

ffi::Function ToFunction(TierMethod method) {
  return ffi::Function::FromPacked([method](ffi::PackedArgs args, ffi::Any* result) {
    CheckCount(args, method.num_args, 0);
    const HostMemoryRef memory = TakeArgument<HostMemoryRef>(args, 0);
    if (!memory.defined()) throw ffi::Error(kTypeError, "the host memory must not be None", "");
    Translate([&] {
      memory->process().Require("prefix cache");
      method.call(*memory.get(), args, result);
    });
  });
}

}  // namespace pagedkv
