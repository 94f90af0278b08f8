// SPDX-License-Identifier: Apache-2.0
/*!
 * \file json_reader_test.cc
 * \brief Values of each kind, and text that is no JSON or not what was expected.
 */
#include "checkpoint/json_reader.h"

#include <vector>

#include "check.h"

namespace pagedkv {

int64_t Integer(const std::string& text) {
  JsonReader reader("text", text);
  int64_t value = reader.Integer();
  reader.End();
  return value;
}

double Number(const std::string& text) {
  JsonReader reader("text", text);
  double value = reader.Number();
  reader.End();
  return value;
}

std::string String(const std::string& text) {
  JsonReader reader("text", text);
  std::string value = reader.String();
  reader.End();
  return value;
}

void TestNumbers() {
  CHECK_EQUAL(Integer(" 12\n"), 12);
  CHECK_EQUAL(Integer("-0"), 0);
  CHECK_EQUAL(Integer("9223372036854775807"), INT64_MAX);
  CHECK_EQUAL(Integer("-9223372036854775808"), INT64_MIN);
  for (const char* text : {"9223372036854775808", "-9223372036854775809", "1.0", "1e3", "1E+3"}) {
    CHECK_RAISES("ValueError", "an integer of 64 bits", Integer(text));
  }
  for (const char* text : {"", "-", "+1", "01", "-01", ".5", "x", "\"1\"", "null", "[1]"}) {
    CHECK_RAISES("ValueError", "expected a number at byte 0", Integer(text));
  }
  for (const char* text : {"1.", "1.e3", "1e", "1e+"}) {
    CHECK_RAISES("ValueError", "expected digits", Integer(text));
  }
  CHECK_RAISES("ValueError", "after the end", Integer("1 2"));
  CHECK_RAISES("ValueError", "after the end", Integer("0x10"));
  CHECK_EQUAL(Number("-12.5e-1"), -1.25);
  CHECK_EQUAL(Number("10000"), 10000.0);
  for (const char* text : {"1e999", "-1e999"}) {
    CHECK_RAISES("ValueError", "a number of 64 bits", Number(text));
  }
  for (const char* text : {"inf", "nan", "-inf"}) {
    CHECK_RAISES("ValueError", "expected a number", Number(text));
  }
}

void TestStrings() {
  CHECK_EQUAL(String("\"\""), "");
  CHECK_EQUAL(String(R"("a b\"\\\/\u0041")"), "a b\"\\/A");
  for (const char* text : {"\"", "\"a", "\"\\", "\"\\\""}) {
    CHECK_RAISES("ValueError", "a string does not end", String(text));
  }
  for (const char* text : {R"("\n")", R"("\u00")", R"("\u00e9")", R"("\u000a")", R"("\u-041")"}) {
    CHECK_RAISES("ValueError", "an escape in a string", String(text));
  }
  CHECK_RAISES("ValueError", "printable ASCII at byte 2", String("\"a\n\""));
  CHECK_RAISES("ValueError", "printable ASCII", String("\"\xc3\xa9\""));
  CHECK_RAISES("ValueError", "printable ASCII", String(std::string("\"\0\"", 3)));
  CHECK_EQUAL(String(JsonString("say \"a\\b\"")), "say \"a\\b\"");
  CHECK_RAISES("ValueError", "printable ASCII", JsonString("\n"));
}

struct Point {
  int64_t x = -1, y = -1;
  std::vector<bool> flags;
};

Point ReadPoint(const std::string& text) {
  JsonReader reader("a point", text);
  Point point;
  reader.Object(
      {{"x", [&] { point.x = reader.Integer(); }},
       {"y", [&] { point.y = reader.Integer(); }, false},
       {"flags", [&] { reader.Array([&] { point.flags.push_back(reader.Boolean()); }); }, false}});
  reader.End();
  return point;
}

void TestObjectsAndArrays() {
  Point point = ReadPoint(" { \"flags\" : [ true , false ] , \"x\" : 3 } ");
  CHECK_EQUAL(point.x, 3);
  CHECK_EQUAL(point.y, -1);
  CHECK_EQUAL(point.flags, (std::vector<bool>{true, false}));
  CHECK_TRUE(ReadPoint("{\"x\":1,\"flags\":[]}").flags.empty());
  CHECK_RAISES("ValueError", "a point: an object lacks the field 'x'", ReadPoint("{}"));
  CHECK_RAISES("ValueError", "'x' is there twice", ReadPoint("{\"x\":1,\"x\":1}"));
  CHECK_RAISES("ValueError", "unknown field 'z'", ReadPoint("{\"x\":1,\"z\":1}"));
  CHECK_RAISES("ValueError", "expected an object", ReadPoint("[]"));
  CHECK_RAISES("ValueError", "expected a string", ReadPoint("{\"x\":1,}"));
  CHECK_RAISES("ValueError", "expected a string", ReadPoint("{x:1}"));
  CHECK_RAISES("ValueError", "expected ':'", ReadPoint("{\"x\" 1}"));
  CHECK_RAISES("ValueError", "expected ',' or '}'", ReadPoint("{\"x\":1 \"y\":2}"));
  CHECK_RAISES("ValueError", "expected ',' or ']'", ReadPoint("{\"x\":1,\"flags\":[true}"));
  CHECK_RAISES("ValueError", "expected true or false", ReadPoint("{\"x\":1,\"flags\":[true,]}"));
  CHECK_RAISES("ValueError", "expected an array", ReadPoint("{\"x\":1,\"flags\":true}"));
  CHECK_RAISES("ValueError", "after the end", ReadPoint("{\"x\":1}}"));
  const std::string text = "{\"flags\":[true,false],\"x\":3}";
  for (size_t length = 0; length < text.size(); ++length) {
    CHECK_RAISES("ValueError", "a point: ", ReadPoint(text.substr(0, length)));
  }
}

}  // namespace pagedkv

int main() {
  pagedkv::TestNumbers();
  pagedkv::TestStrings();
  pagedkv::TestObjectsAndArrays();
}
