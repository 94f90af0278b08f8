// SPDX-License-Identifier: Apache-2.0
/*!
 * \file json_reader.cc
 * \brief A pull parser for JSON with a known structure.
 */
#include "checkpoint/json_reader.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <vector>

#include "base/error.h"

namespace pagedkv {

namespace {

bool IsPrintable(char c) { return c >= 0x20 && c < 0x7f; }
bool IsDigit(char c) { return c >= '0' && c <= '9'; }

}  // namespace

void JsonReader::Fail(const std::string& why) const {
  Raise(kValueError, what_, ": ", why, " at byte ", position_, " of ", text_.size());
}

void JsonReader::SkipSpace() {
  position_ = std::min(text_.find_first_not_of(" \t\r\n", position_), text_.size());
}

bool JsonReader::Accept(char c) {
  SkipSpace();
  if (position_ == text_.size() || text_[position_] != c) return false;
  ++position_;
  return true;
}

void JsonReader::Expect(char c, const char* why) {
  if (!Accept(c)) Fail(why);
}

bool JsonReader::AcceptWord(std::string_view word) {
  SkipSpace();
  if (text_.substr(position_, word.size()) != word) return false;
  position_ += word.size();
  return true;
}

void JsonReader::Object(std::initializer_list<Field> fields) {
  Expect('{', "expected an object");
  std::vector<bool> is_there(fields.size(), false);
  if (!Accept('}')) {
    do {
      std::string name = String();
      auto field = std::find_if(fields.begin(), fields.end(),
                                [&](const Field& each) { return each.name == name; });
      if (field == fields.end()) Fail("unknown field '" + name.substr(0, 40) + "'");
      if (is_there[field - fields.begin()]) Fail("field '" + name + "' is there twice");
      is_there[field - fields.begin()] = true;
      Expect(':', "expected ':'");
      field->read();
    } while (Accept(','));
    Expect('}', "expected ',' or '}'");
  }
  for (const Field& field : fields) {
    if (field.is_required && !is_there[&field - fields.begin()]) {
      Fail("an object lacks the field '" + std::string(field.name) + "'");
    }
  }
}

void JsonReader::Array(const std::function<void()>& read_item) {
  Expect('[', "expected an array");
  if (Accept(']')) return;
  do {
    read_item();
  } while (Accept(','));
  Expect(']', "expected ',' or ']'");
}

std::string JsonReader::String() {
  Expect('"', "expected a string");
  std::string value;
  while (true) {
    if (position_ == text_.size()) Fail("a string does not end");
    char c = text_[position_];
    if (!IsPrintable(c)) Fail("a string must be printable ASCII");
    ++position_;
    if (c == '"') return value;
    value += c == '\\' ? EscapedCharacter() : c;
  }
}

char JsonReader::EscapedCharacter() {
  if (position_ == text_.size()) Fail("a string does not end");
  char c = text_[position_++];
  if (c == '"' || c == '\\' || c == '/') return c;
  if (c == 'u') {
    unsigned code = 0;
    const char* begin = text_.data() + position_;
    size_t length = std::min<size_t>(4, text_.size() - position_);
    auto result = std::from_chars(begin, begin + length, code, 16);
    if (length == 4 && result.ec == std::errc() && result.ptr == begin + 4 && code < 0x80 &&
        IsPrintable(static_cast<char>(code))) {
      position_ += 4;
      return static_cast<char>(code);
    }
  }
  Fail("an escape in a string must stand for printable ASCII");
}

size_t JsonReader::Digits(size_t at) const {
  size_t end = at;
  while (end < text_.size() && IsDigit(text_[end])) ++end;
  return end - at;
}

std::string_view JsonReader::NumberToken() {
  SkipSpace();
  size_t end = position_;
  if (end < text_.size() && text_[end] == '-') ++end;
  size_t num_digits = Digits(end);
  if (num_digits == 0 || (num_digits > 1 && text_[end] == '0')) Fail("expected a number");
  end += num_digits;
  if (end < text_.size() && text_[end] == '.') {
    if (Digits(end + 1) == 0) Fail("expected digits after the point of a number");
    end += 1 + Digits(end + 1);
  }
  if (end < text_.size() && (text_[end] == 'e' || text_[end] == 'E')) {
    size_t exponent = end + 1;
    if (exponent < text_.size() && (text_[exponent] == '+' || text_[exponent] == '-')) ++exponent;
    if (Digits(exponent) == 0) Fail("expected digits in the exponent of a number");
    end = exponent + Digits(exponent);
  }
  return text_.substr(position_, end - position_);
}

int64_t JsonReader::Integer() {
  std::string_view token = NumberToken();
  int64_t value = 0;
  const char* end = token.data() + token.size();
  auto result = std::from_chars(token.data(), end, value);
  if (result.ec != std::errc() || result.ptr != end) Fail("expected an integer of 64 bits");
  position_ += token.size();
  return value;
}

double JsonReader::Number() {
  std::string_view token = NumberToken();
  double value = 0;
  auto result = std::from_chars(token.data(), token.data() + token.size(), value);
  if (result.ec != std::errc() || !std::isfinite(value)) Fail("expected a number of 64 bits");
  position_ += token.size();
  return value;
}

bool JsonReader::Boolean() {
  if (AcceptWord("true")) return true;
  if (AcceptWord("false")) return false;
  Fail("expected true or false");
}

void JsonReader::End() {
  SkipSpace();
  if (position_ != text_.size()) Fail("unexpected text after the end");
}

std::string JsonString(const std::string& text) {
  std::string quoted = "\"";
  for (char c : text) {
    if (!IsPrintable(c)) Raise(kValueError, "a string must be printable ASCII");
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + '"';
}

}  // namespace pagedkv
