// SPDX-License-Identifier: Apache-2.0
#include "base/sha256.h"

#include <string>

#include "check.h"

using pagedkv::Sha256;

TEST_CASE("sha256: whole") {
  // What hashlib of Python says, for ends of every kind.
  REQUIRE_EQ(Sha256(std::string(0, 'a')),
             "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  REQUIRE_EQ(Sha256(std::string(3, 'a')),
             "9834876dcfb05cb167a5c24953eba58c4ac89b1adf57f28f2f9d09af107ee8f0");
  REQUIRE_EQ(Sha256(std::string(55, 'a')),
             "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
  REQUIRE_EQ(Sha256(std::string(56, 'a')),
             "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a");
  REQUIRE_EQ(Sha256(std::string(64, 'a')),
             "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");
  REQUIRE_EQ(Sha256(std::string(1000, 'a')),
             "41edece42d63e8d9bf515a9ba6932e1c20cbc9f5a5d134645adb5db1b9737ea3");
}

TEST_CASE("sha256: chunks") {
  const std::string bytes(1000, 'a');
  for (size_t chunk : {1, 7, 63, 64, 65, 999}) {
    pagedkv::Sha256Stream stream;
    for (size_t i = 0; i < bytes.size(); i += chunk) stream.Add(bytes.substr(i, chunk));
    REQUIRE_EQ(stream.Finish(), Sha256(bytes));
  }
}

TEST_CASE("sha256: bytes") {
  for (size_t size : {0, 1, 55, 56, 63, 64, 65, 96, 119, 120, 1000}) {
    CAPTURE(size);
    const std::string text(size, 'x');
    std::string digits;
    for (uint8_t byte : pagedkv::Sha256Bytes(text.data(), size)) {
      digits += "0123456789abcdef"[byte >> 4];
      digits += "0123456789abcdef"[byte & 15];
    }
    REQUIRE_EQ(digits, Sha256(text));
  }
}
