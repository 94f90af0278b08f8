// SPDX-License-Identifier: Apache-2.0
/*!
 * \file run_model.cc
 * \brief A whole model without Python and without a compiler: a batch of prompts, continued.
 *
 * Use: run_model FOLDER NUM_TOKENS PROMPT...
 * FOLDER is what `tvm-pagedkv export` writes; a PROMPT is token ids with commas between them. Takes
 * the most likely token each time, and writes a line of token ids for each prompt.
 */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <numeric>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "libraries.h"

namespace ffi = tvm::ffi;

namespace {

using Map = ffi::Map<ffi::String, ffi::Any>;
using Tokens = std::vector<int32_t>;

constexpr DLDevice kCpu{kDLCPU, 0};
// Tensors come from malloc: the pooled allocator keeps a block for every size that it was asked
// for.
constexpr int kNaiveAllocator = 1;

/*! \brief An int32 tensor of these values. */
ffi::Tensor MakeTensor(const Tokens& values) {
  const ffi::Shape shape{static_cast<int64_t>(values.size())};
  const DLDataType dtype{kDLInt, 32, 1};
  auto tensor = Find("runtime.TVMTensorAllocWithScope")(shape, dtype, kCpu, nullptr);
  std::copy(values.begin(), values.end(),
            static_cast<int32_t*>(tensor.cast<ffi::Tensor>().data_ptr()));
  return tensor.cast<ffi::Tensor>();
}

/*! \brief The most likely token of each row of float32 [rows, vocabulary]. */
Tokens MostLikely(const ffi::Tensor& logits) {
  const auto* row = static_cast<const float*>(logits.data_ptr());
  Tokens tokens;
  for (int64_t i = 0; i < logits.size(0); ++i, row += logits.size(1)) {
    tokens.push_back(static_cast<int32_t>(std::max_element(row, row + logits.size(1)) - row));
  }
  return tokens;
}

/*! \brief The functions of a compiled model, ready to be called. */
ffi::Module LoadModel(const std::string& file) {
  ffi::Module library = ffi::Module::LoadFromFile(file);
  auto vm = library->GetFunction("vm_load_executable").value()().cast<ffi::Module>();
  vm->GetFunction("vm_initialization").value()(static_cast<int>(kDLCPU), 0, kNaiveAllocator);
  return vm;
}

/*! \brief A compiled model with its weights, and a cache for it. */
class Model {
 public:
  Model(const std::string& folder, int64_t max_num_sequences, int64_t max_total_tokens,
        int64_t prefill_chunk_size) {
    // First: it refuses a folder whose code is for another CPU.
    Map bundle = Find("pagedkv.load_bundle")(ffi::String(folder), nullptr, nullptr).cast<Map>();
    vm_ = LoadModel(folder + "/model.so");
    std::ifstream file(folder + "/model.json");
    if (!file) throw std::runtime_error("there is no " + folder + "/model.json");
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    const auto about = ffi::json::Parse(text).cast<Map>();
    for (int64_t token : about["eos_token_ids"].cast<ffi::Array<int64_t>>()) {
      end_of_text_.insert(static_cast<int32_t>(token));
    }
    vocab_size_ = about["vocab_size"].cast<int64_t>();
    longest_text_ = about["longest_text"].cast<ffi::Optional<int64_t>>().value_or(INT64_MAX);

    Find("vm.builtin.tensor_cache.load")(folder + "/weights", static_cast<int>(kDLCPU), 0);
    weights_ = Find("vm.builtin.param_array_from_cache")("weight", -1);
    Find("vm.builtin.tensor_cache.clear")();

    // Capacities are free; all else is what the kernels were compiled for.
    Map config = bundle["config"].cast<Map>();
    config.Set("max_num_sequences", max_num_sequences);
    config.Set("max_total_tokens", max_total_tokens);
    config.Set("prefill_chunk_size", prefill_chunk_size);
    cache_ = Find("pagedkv.create")(config, bundle["kernels"], kCpu);
  }

  bool IsEndOfText(int32_t token) const { return end_of_text_.count(token) != 0; }

  /*! \brief Refuse a text that a rotation of the model cannot reach. */
  void CheckLength(int64_t length) const {
    if (length <= longest_text_) return;
    throw std::out_of_range("a text would have " + std::to_string(length) +
                            " tokens, and the model's longest is " + std::to_string(longest_text_));
  }

  void Add(int64_t sequence) { Find("vm.builtin.kv_state_add_sequence")(cache_, sequence); }

  void Remove(int64_t sequence) { Find("vm.builtin.kv_state_remove_sequence")(cache_, sequence); }

  /*! \brief Append tokens to each of these sequences; the most likely next token of each. */
  Tokens Step(const std::vector<int64_t>& sequences, const std::vector<Tokens>& tokens) {
    std::vector<int64_t> lengths;
    Tokens flat, last_rows;
    for (const Tokens& each : tokens) {
      CheckTokens(each);
      lengths.push_back(static_cast<int64_t>(each.size()));
      flat.insert(flat.end(), each.begin(), each.end());
      last_rows.push_back(static_cast<int32_t>(flat.size()) - 1);
    }
    Find("vm.builtin.kv_state_begin_forward")(cache_,
                                              ffi::Shape(sequences.begin(), sequences.end()),
                                              ffi::Shape(lengths.begin(), lengths.end()));
    const ffi::Any x = Call("embed", MakeTensor(flat), weights_);
    const ffi::Any logits = flat.size() == sequences.size()
                                ? Call("decode", x, cache_, weights_)
                                : Call("prefill", x, MakeTensor(last_rows), cache_, weights_);
    Find("vm.builtin.kv_state_end_forward")(cache_);
    return MostLikely(logits.cast<ffi::Tensor>());
  }

 private:
  /*! \brief The compiled code reads a row of the embedding for each token, and asks no questions.
   */
  void CheckTokens(const Tokens& tokens) const {
    for (int32_t token : tokens) {
      if (token < 0 || token >= vocab_size_) {
        throw std::out_of_range("the model has no token " + std::to_string(token));
      }
    }
  }

  template <typename... Args>
  ffi::Any Call(const char* name, Args&&... args) {
    return vm_.value()->GetFunction(name).value()(std::forward<Args>(args)...);
  }

  ffi::Optional<ffi::Module> vm_;
  ffi::Any weights_, cache_;
  std::set<int32_t> end_of_text_;
  int64_t vocab_size_ = 0, longest_text_ = 0;
};

/*! \brief Continue all prompts in one batch; who has come to an end leaves it. */
std::vector<Tokens> Generate(const std::string& folder, int num_tokens,
                             const std::vector<Tokens>& prompts) {
  int64_t num_rows = 0;
  for (const Tokens& prompt : prompts) num_rows += static_cast<int64_t>(prompt.size());
  const auto batch = static_cast<int64_t>(prompts.size());
  constexpr int64_t kPage = 256;  // the largest there is: each sequence may leave one unfilled
  Model model(folder, batch, num_rows + batch * (num_tokens + kPage), num_rows);

  std::vector<int64_t> running(prompts.size());
  std::iota(running.begin(), running.end(), 0);
  for (const Tokens& each : prompts) model.CheckLength(each.size() + num_tokens);
  for (int64_t sequence : running) model.Add(sequence);
  std::vector<Tokens> texts(prompts.size()), next = prompts;
  for (int step = 0; step < num_tokens && !running.empty(); ++step) {
    const Tokens chosen = model.Step(running, next);
    std::vector<int64_t> still_running;
    next.clear();
    for (size_t i = 0; i < chosen.size(); ++i) {
      const int64_t sequence = running[i];
      if (model.IsEndOfText(chosen[i])) {
        model.Remove(sequence);
        continue;
      }
      texts[sequence].push_back(chosen[i]);
      still_running.push_back(sequence);
      next.push_back({chosen[i]});
    }
    running = std::move(still_running);
  }
  return texts;
}

/*! \brief Token ids with commas between them. */
Tokens ParsePrompt(const std::string& text) {
  Tokens tokens;
  std::stringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    size_t end = 0;
    tokens.push_back(std::stoi(part, &end));
    if (end != part.size()) throw std::invalid_argument(part);
  }
  if (tokens.empty()) throw std::invalid_argument("an empty prompt");
  return tokens;
}

}  // namespace

int main(int argc, char** argv) {
  int num_tokens = 0;
  std::vector<Tokens> prompts;
  try {
    if (argc < 4) throw std::invalid_argument("too few arguments");
    num_tokens = std::stoi(argv[2]);
    if (num_tokens < 1) throw std::invalid_argument(argv[2]);
    for (int i = 3; i < argc; ++i) prompts.push_back(ParsePrompt(argv[i]));
  } catch (const std::exception&) {
    std::fprintf(stderr, "use: run_model FOLDER NUM_TOKENS PROMPT..., a prompt such as 1,15,7\n");
    return 2;
  }
  if (!LoadLibraries(argv[1])) return 1;
  try {
    for (const Tokens& text : Generate(argv[1], num_tokens, prompts)) {
      for (size_t i = 0; i < text.size(); ++i) std::printf("%s%d", i ? "," : "", text[i]);
      std::printf("\n");
    }
  } catch (const std::exception& error) {  // those of TVM, too
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
