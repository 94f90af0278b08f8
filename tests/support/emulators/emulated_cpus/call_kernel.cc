// SPDX-License-Identifier: Apache-2.0
/*!
 * \file call_kernel.cc
 * \brief Calls a compiled kernel with arguments from a file, and writes what it left in them.
 *
 * Use: call_kernel LIBRARY SYMBOL MEMORY ARGUMENT...
 * An ARGUMENT is "int:5", "float:0.25", "none", or "tensor:DTYPE:BEGIN:OFFSET:DIM,DIM,...": a view
 * of the file MEMORY, whose data begin OFFSET bytes behind byte BEGIN.
 */
#include <dlfcn.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace ffi = tvm::ffi;

namespace {

constexpr size_t kAlignment = 64;

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

struct View {
  std::vector<int64_t> shape;
  DLTensor tensor = {};
};

void MakeView(const std::vector<std::string>& parts, char* memory, View* view) {
  if (parts.size() > 4) {
    for (const std::string& dim : Split(parts[4], ',')) view->shape.push_back(std::stoll(dim));
  }
  view->tensor.data = memory + std::stoull(parts[2]);
  view->tensor.byte_offset = std::stoull(parts[3]);
  view->tensor.device = {kDLCPU, 0};
  view->tensor.ndim = static_cast<int32_t>(view->shape.size());
  view->tensor.dtype = ffi::StringToDLDataType(parts[1]);
  view->tensor.shape = view->shape.data();
}

void Call(const std::vector<std::string>& words, char* memory) {
  const ffi::Module library = ffi::Module::LoadFromFile(words[0]);
  const ffi::Function kernel = library->GetFunction(words[1]).value();
  std::deque<View> views;  // whose addresses stay
  std::vector<ffi::AnyView> arguments;
  for (size_t i = 3; i < words.size(); ++i) {
    const std::vector<std::string> parts = Split(words[i], ':');
    if (parts[0] == "int") {
      arguments.emplace_back(static_cast<int64_t>(std::stoll(parts[1])));
    } else if (parts[0] == "float") {
      arguments.emplace_back(std::stod(parts[1]));
    } else if (parts[0] == "none") {
      arguments.emplace_back(nullptr);
    } else {
      views.emplace_back();
      MakeView(parts, memory, &views.back());
      arguments.emplace_back(&views.back().tensor);
    }
  }
  ffi::Any result;
  kernel.CallPacked(arguments.data(), static_cast<int32_t>(arguments.size()), &result);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() < 3) return 2;
  // It has the threads and the workspaces of kernels.
  if (dlopen("libtvm_runtime.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  std::ifstream in(words[2], std::ios::binary);
  const std::string content{std::istreambuf_iterator<char>(in), {}};
  const size_t size = (content.size() + kAlignment) / kAlignment * kAlignment;
  auto* memory = static_cast<char*>(std::aligned_alloc(kAlignment, size));
  content.copy(memory, content.size());
  try {
    Call(words, memory);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::ofstream(words[2], std::ios::binary)
      .write(memory, static_cast<std::streamsize>(content.size()));
  std::free(memory);
  return 0;
}
