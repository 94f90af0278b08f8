// SPDX-License-Identifier: Apache-2.0
/*!
 * \file json_reader_test.cc
 * \brief Values of each kind, and text that is no JSON or not what was expected.
 */
#include "checkpoint/json_reader.h"

#include <vector>

#include "check.h"

namespace pagedkv::json_reader_test {

namespace {

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

TEST_CASE("json reader: numbers") {
  REQUIRE_EQ(Integer(" 12\n"), 12);
  REQUIRE_EQ(Integer("-0"), 0);
  REQUIRE_EQ(Integer("9223372036854775807"), INT64_MAX);
  REQUIRE_EQ(Integer("-9223372036854775808"), INT64_MIN);
  for (const char* text : {"9223372036854775808", "-9223372036854775809", "1.0", "1e3", "1E+3"}) {
    REQUIRE_RAISES("ValueError", "an integer of 64 bits", Integer(text));
  }
  for (const char* text : {"", "-", "+1", "01", "-01", ".5", "x", "\"1\"", "null", "[1]"}) {
    REQUIRE_RAISES("ValueError", "expected a number at byte 0", Integer(text));
  }
  for (const char* text : {"1.", "1.e3", "1e", "1e+"}) {
    REQUIRE_RAISES("ValueError", "expected digits", Integer(text));
  }
  REQUIRE_RAISES("ValueError", "after the end", Integer("1 2"));
  REQUIRE_RAISES("ValueError", "after the end", Integer("0x10"));
  REQUIRE_EQ(Number("-12.5e-1"), -1.25);
  REQUIRE_EQ(Number("10000"), 10000.0);
  for (const char* text : {"1e999", "-1e999"}) {
    REQUIRE_RAISES("ValueError", "a number of 64 bits", Number(text));
  }
  for (const char* text : {"inf", "nan", "-inf"}) {
    REQUIRE_RAISES("ValueError", "expected a number", Number(text));
  }
}

TEST_CASE("json reader: strings") {
  REQUIRE_EQ(String("\"\""), "");
  REQUIRE_EQ(String(R"("a b\"\\\/\u0041")"), "a b\"\\/A");
  for (const char* text : {"\"", "\"a", "\"\\", "\"\\\""}) {
    REQUIRE_RAISES("ValueError", "a string does not end", String(text));
  }
  for (const char* text : {R"("\n")", R"("\u00")", R"("\u00e9")", R"("\u000a")", R"("\u-041")"}) {
    REQUIRE_RAISES("ValueError", "an escape in a string", String(text));
  }
  REQUIRE_RAISES("ValueError", "printable ASCII at byte 2", String("\"a\n\""));
  REQUIRE_RAISES("ValueError", "printable ASCII", String("\"\xc3\xa9\""));
  REQUIRE_RAISES("ValueError", "printable ASCII", String(std::string("\"\0\"", 3)));
  REQUIRE_EQ(String(JsonString("say \"a\\b\"")), "say \"a\\b\"");
  REQUIRE_RAISES("ValueError", "printable ASCII", JsonString("\n"));
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

TEST_CASE("json reader: objects and arrays") {
  Point point = ReadPoint(" { \"flags\" : [ true , false ] , \"x\" : 3 } ");
  REQUIRE_EQ(point.x, 3);
  REQUIRE_EQ(point.y, -1);
  REQUIRE_EQ(point.flags, (std::vector<bool>{true, false}));
  REQUIRE(ReadPoint("{\"x\":1,\"flags\":[]}").flags.empty());
  REQUIRE_RAISES("ValueError", "a point: an object lacks the field 'x'", ReadPoint("{}"));
  REQUIRE_RAISES("ValueError", "'x' is there twice", ReadPoint("{\"x\":1,\"x\":1}"));
  REQUIRE_RAISES("ValueError", "unknown field 'z'", ReadPoint("{\"x\":1,\"z\":1}"));
  REQUIRE_RAISES("ValueError", "expected an object", ReadPoint("[]"));
  REQUIRE_RAISES("ValueError", "expected a string", ReadPoint("{\"x\":1,}"));
  REQUIRE_RAISES("ValueError", "expected a string", ReadPoint("{x:1}"));
  REQUIRE_RAISES("ValueError", "expected ':'", ReadPoint("{\"x\" 1}"));
  REQUIRE_RAISES("ValueError", "expected ',' or '}'", ReadPoint("{\"x\":1 \"y\":2}"));
  REQUIRE_RAISES("ValueError", "expected ',' or ']'", ReadPoint("{\"x\":1,\"flags\":[true}"));
  REQUIRE_RAISES("ValueError", "expected true or false", ReadPoint("{\"x\":1,\"flags\":[true,]}"));
  REQUIRE_RAISES("ValueError", "expected an array", ReadPoint("{\"x\":1,\"flags\":true}"));
  REQUIRE_RAISES("ValueError", "after the end", ReadPoint("{\"x\":1}}"));
  const std::string text = "{\"flags\":[true,false],\"x\":3}";
  for (size_t length = 0; length < text.size(); ++length) {
    REQUIRE_RAISES("ValueError", "a point: ", ReadPoint(text.substr(0, length)));
  }
}

}  // namespace

}  // namespace pagedkv::json_reader_test
