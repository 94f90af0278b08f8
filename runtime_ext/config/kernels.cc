// SPDX-License-Identifier: Apache-2.0
/*!
 * \file kernels.cc
 * \brief A kernel set.
 */
#include "config/kernels.h"

#include <optional>

#include "base/error.h"

namespace pagedkv {

namespace {

constexpr const char* kNames[] = {
#define KERNEL(id, name) name,
#include "config/kernel_names.inc"
#undef KERNEL
};

std::string KnownNames() {
  std::string names;
  for (const char* name : kNames) names += (names.empty() ? "" : ", ") + std::string(name);
  return names;
}

}  // namespace

const char* ToString(KernelName name) { return kNames[static_cast<int>(name)]; }

KernelName KernelNameOf(const std::string& name) {
  for (int i = 0; i < static_cast<int>(KernelName::kNumNames); ++i) {
    if (name == kNames[i]) return static_cast<KernelName>(i);
  }
  Raise(kValueError, "unknown kernel '", name, "'; known: ", KnownNames());
}

KernelSet KernelSet::FromMap(const ffi::Map<ffi::String, ffi::Any>& map) {
  KernelSet kernels;
  for (const auto& [key, value] : map) kernels.Set(KernelNameOf(key), value);
  return kernels;
}

void KernelSet::Set(KernelName name, const ffi::AnyView& value) {
  Entry& entry = entries_[static_cast<int>(name)];
  if (value == nullptr) return;
  if (std::optional<ffi::Function> function = value.as<ffi::Function>()) {
    entry.function = *function;
    return;
  }
  std::optional<ffi::Array<ffi::Any>> array = value.as<ffi::Array<ffi::Any>>();
  if (array && array->empty()) return;
  std::optional<ffi::String> tag;
  if (array) tag = (*array)[0].try_cast<ffi::String>();
  if (!tag) {
    Raise(kTypeError, "kernel '", ToString(name), "' must be a function or [tag, function], got ",
          value.GetTypeKey());
  }
  if (*tag == "flashinfer") return SetFlashInfer(name, *array);
  if (*tag != "tirx") {
    Raise(kValueError, "kernel '", ToString(name), "' has tag '", std::string(*tag),
          "'; known: tirx, flashinfer");
  }
  std::optional<ffi::Function> function;
  if (array->size() == 2) function = (*array)[1].as<ffi::Function>();
  if (!function) {
    Raise(kTypeError, "kernel '", ToString(name), "' must have one function after its tag");
  }
  entry.function = *function;
  entry.is_stock = true;
}

void KernelSet::SetFlashInfer(KernelName name, const ffi::Array<ffi::Any>& array) {
  if (name != KernelName::kPrefillRagged && name != KernelName::kPrefill &&
      name != KernelName::kDecode) {
    Raise(kValueError, "FlashInfer's functions cannot be kernel '", ToString(name),
          "', but prefill_ragged, prefill and decode");
  }
  std::optional<ffi::Function> run, plan;
  if (array.size() == 3) {
    run = array[1].as<ffi::Function>();
    plan = array[2].as<ffi::Function>();
  }
  if (!run || !plan) {
    Raise(kTypeError, "kernel '", ToString(name),
          "' must have two functions (run, plan) after its tag \"flashinfer\"");
  }
  Entry& entry = entries_[static_cast<int>(name)];
  entry.function = *run;
  entry.plan = *plan;
}

const ffi::Function& KernelSet::Get(KernelName name) const {
  if (!Has(name))
    Raise(kValueError, "the cache was made without the kernel '", ToString(name), "'");
  return entry(name).function;
}

}  // namespace pagedkv
