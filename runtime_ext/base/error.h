// SPDX-License-Identifier: Apache-2.0
/*!
 * \file error.h
 * \brief The exception of the runtime: it names the Python exception that users see.
 */
#ifndef TVM_PAGEDKV_BASE_ERROR_H_
#define TVM_PAGEDKV_BASE_ERROR_H_

#include <exception>
#include <locale>
#include <sstream>
#include <string>
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

/*! \brief A stream without digit grouping, whatever locale the program has set. */
class ClassicText : public std::ostringstream {
 public:
  ClassicText() { imbue(std::locale::classic()); }
};

/*! \brief Throws an Error. Its message is the concatenation of the parts. */
template <typename... Parts>
[[noreturn]] void Raise(const char* kind, const Parts&... parts) {
  ClassicText message;
  (message << ... << parts);
  throw Error(kind, message.str());
}

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_BASE_ERROR_H_
