// SPDX-License-Identifier: Apache-2.0
/*!
 * \file json_reader.h
 * \brief A pull parser for JSON with a known structure.
 *
 * The caller asks for the next value; any other input is an error with its byte offset. So hostile
 * input costs neither recursion nor memory beyond what the caller keeps: tvm::ffi::json, which
 * reads trusted files, overflows the stack at a million nested arrays. Strings are printable ASCII,
 * as in our own files.
 */
#ifndef TVM_PAGEDKV_CHECKPOINT_JSON_READER_H_
#define TVM_PAGEDKV_CHECKPOINT_JSON_READER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>

namespace pagedkv {

class JsonReader {
 public:
  /*! \brief A member of an object; `read` reads its value. */
  struct Field {
    const char* name;
    std::function<void()> read;
    bool is_required = true;
  };

  /*! \param what Names the text in error messages. Both must outlive the reader. */
  JsonReader(const char* what, std::string_view text) : what_(what), text_(text) {}

  // Each throws Error (ValueError) when the next value is of another kind.
  /*! \brief An object with every required field, no duplicate and no unknown one. */
  void Object(std::initializer_list<Field> fields);
  /*! \brief Calls read_item at each item. */
  void Array(const std::function<void()>& read_item);
  std::string String();
  int64_t Integer();
  double Number();
  bool Boolean();
  /*! \brief The end of the text, after white space. */
  void End();

  /*! \throws Error (ValueError) with the byte offset. */
  [[noreturn]] void Fail(const std::string& why) const;

 private:
  void SkipSpace();
  bool Accept(char c);
  void Expect(char c, const char* why);
  bool AcceptWord(std::string_view word);
  char EscapedCharacter();
  std::string_view NumberToken();
  size_t Digits(size_t at) const;

  const char* what_;
  std::string_view text_;
  size_t position_ = 0;
};

/*! \brief The text as a JSON string; it must be printable ASCII. */
std::string JsonString(const std::string& text);

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_CHECKPOINT_JSON_READER_H_
