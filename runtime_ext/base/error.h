// SPDX-License-Identifier: Apache-2.0
/*!
 * \file error.h
 * \brief The exception of the runtime: it names the Python exception that users see.
 */
#ifndef TVM_PAGEDKV_BASE_ERROR_H_
#define TVM_PAGEDKV_BASE_ERROR_H_

#include <exception>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace pagedkv {

inline constexpr const char* kValueError = "ValueError";
inline constexpr const char* kKeyError = "KeyError";
inline constexpr const char* kIndexError = "IndexError";
inline constexpr const char* kTypeError = "TypeError";
inline constexpr const char* kMemoryError = "MemoryError";
inline constexpr const char* kRuntimeError = "RuntimeError";
inline constexpr const char* kCacheFullError = "CacheFullError";

/*! \brief An error with the name of the Python exception that it becomes at the FFI. */
class Error : public std::exception {
 public:
  Error(const char* kind, std::string message) : kind_(kind), message_(std::move(message)) {}

  const char* kind() const { return kind_; }
  const std::string& message() const { return message_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  const char* kind_;
  std::string message_;
};

/*! \brief A part of a message: text or a number, whatever locale the program has set. */
class MessagePart {
 public:
  MessagePart(std::string_view text) : text_(text) {}                     // NOLINT: converts
  MessagePart(const char* text) : text_(text) {}                          // NOLINT: converts
  MessagePart(const std::string& text) : text_(text) {}                   // NOLINT: converts
  MessagePart(char character) : number_(1, character), text_(number_) {}  // NOLINT: converts
  MessagePart(double number);                                             // NOLINT: converts
  template <typename T, typename = std::enable_if_t<std::is_integral_v<T> || std::is_enum_v<T>>>
  MessagePart(T number) : number_(std::to_string(+number)), text_(number_) {}  // NOLINT: converts
  MessagePart(const MessagePart&) = delete;
  MessagePart& operator=(const MessagePart&) = delete;

  std::string_view text() const { return text_; }

 private:
  std::string number_;
  std::string_view text_;
};

/*! \brief Throws an Error whose message is the concatenation of the parts. */
[[noreturn]] void RaiseParts(const char* kind, std::initializer_list<MessagePart> parts);

/*! \brief Throws an Error. Its message is the concatenation of the parts. */
template <typename... Parts>
[[noreturn]] void Raise(const char* kind, const Parts&... parts) {
  RaiseParts(kind, {MessagePart(parts)...});
}

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_BASE_ERROR_H_
