// SPDX-License-Identifier: Apache-2.0
/*!
 * \file json_reader.h
 * \brief Reads JSON whose structure the caller knows, value by value, without a tree.
 *
 * The caller says what must come next; anything else is an error that names the byte. So input of
 * any kind costs neither recursion nor memory beyond what the caller keeps. Strings are printable
 * ASCII, which is all that our own files hold.
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
  /*! \brief A member of an object: `read` reads its value. */
  struct Field {
    const char* name;
    std::function<void()> read;
    bool is_required = true;
  };

  /*! \param what How messages call the text; both it and `text` must outlive the reader. */
  JsonReader(const char* what, std::string_view text) : what_(what), text_(text) {}

  // Each throws Error (ValueError) when something else is there.
  /*! \brief An object that has every required field, no field twice, and no unknown one. */
  void Object(std::initializer_list<Field> fields);
  /*! \brief Calls read_item at each item. */
  void Array(const std::function<void()>& read_item);
  std::string String();
  int64_t Integer();
  double Number();
  bool Boolean();
  /*! \brief Nothing but white space is left. */
  void End();

  /*! \throws Error (ValueError) that says where the reader is. */
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
