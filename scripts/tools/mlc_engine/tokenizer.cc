// SPDX-License-Identifier: Apache-2.0
// The tokenizers that mlc-llm's engine links, by functions of the process that runs it: Python has
// Hugging Face's tokenizers already, and so neither Rust nor SentencePiece is built.
#include <tokenizers_cpp.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

namespace tokenizers {
namespace {

namespace ffi = tvm::ffi;

class CalledTokenizer : public Tokenizer {
 public:
  explicit CalledTokenizer(const std::string& json)
      : functions_(ffi::Function::GetGlobalRequired("mlc_trial.tokenizer")(ffi::String(json))
                       .cast<ffi::Map<ffi::String, ffi::Function>>()) {}

  std::vector<int32_t> Encode(const std::string& text) final {
    auto ids = functions_["encode"](ffi::Bytes(text)).cast<ffi::Shape>();
    return {ids.begin(), ids.end()};
  }

  std::string Decode(const std::vector<int32_t>& ids) final {
    std::vector<int64_t> values(ids.begin(), ids.end());
    return functions_["decode"](ffi::Shape(values)).cast<ffi::String>();
  }

  size_t GetVocabSize() final { return functions_["vocab_size"]().cast<int64_t>(); }

  std::string IdToToken(int32_t id) final {
    return functions_["id_to_token"](id).cast<ffi::String>();
  }

  int32_t TokenToId(const std::string& token) final {
    return functions_["token_to_id"](ffi::String(token)).cast<int64_t>();
  }

 private:
  ffi::Map<ffi::String, ffi::Function> functions_;
};

std::unique_ptr<Tokenizer> Refuse(const char* kind) {
  TVM_FFI_THROW(ValueError) << "only tokenizer.json is read here, not " << kind;
}

}  // namespace

std::unique_ptr<Tokenizer> Tokenizer::FromBlobJSON(const std::string& json) {
  return std::make_unique<CalledTokenizer>(json);
}

std::unique_ptr<Tokenizer> Tokenizer::FromBlobSentencePiece(const std::string&) {
  return Refuse("SentencePiece");
}

std::unique_ptr<Tokenizer> Tokenizer::FromBlobByteLevelBPE(const std::string&, const std::string&,
                                                           const std::string&) {
  return Refuse("vocab.json and merges.txt");
}

std::unique_ptr<Tokenizer> Tokenizer::FromBlobRWKVWorld(const std::string&) {
  return Refuse("RWKV's vocabulary");
}

}  // namespace tokenizers
