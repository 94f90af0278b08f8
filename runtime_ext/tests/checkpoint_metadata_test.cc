// SPDX-License-Identifier: Apache-2.0
/*!
 * \file checkpoint_metadata_test.cc
 * \brief Metadata comes back as it was written, and damaged metadata does not.
 */
#include "checkpoint/checkpoint_metadata.h"

#include <locale>
#include <random>
#include <sstream>

#include "check.h"

namespace pagedkv::checkpoint_metadata_test {

namespace {

CheckpointLayout MakeLayout() {
  CheckpointLayout layout;
  layout.page_size = 4;
  const std::string rope = RopeText("normal", 1e4, 1, "");
  layout.layers = {{"mha", 0, 2, 8, 8, rope, "float16", 2, 0},
                   {"mha_sliding", 5, 2, 8, 8, rope, "float16", 2, 0},
                   {"mha_sliding", 5, 2, 8, 8, rope, "float16", 2, 0},
                   {"mla", 0, 1, 24, 16, "", "float16", 2, 0}};
  return layout;
}

/*! \brief The same layers, of which the first two are quantized. */
CheckpointLayout MakeQuantizedLayout() {
  CheckpointLayout layout = MakeLayout();
  for (int i = 0; i < 2; ++i) {
    layout.layers[i].kv_dtype = "int8.1";
    layout.layers[i].item_bytes = 1;
    layout.layers[i].codec_page_bytes = 192;
  }
  return layout;
}

TEST_CASE("checkpoint metadata: words") {
  CheckpointLayout layout = MakeLayout();
  const std::string rope = " v_head_dim=8 rope=normal theta=10000 scale=1; ";
  REQUIRE_EQ(layout.Text(), "page_size=4 dtype=float16; 1 x mha num_kv_heads=2 qk_head_dim=8" +
                                rope + "2 x mha_sliding window=5 num_kv_heads=2 qk_head_dim=8" +
                                rope + "1 x mla qk_head_dim=24 v_head_dim=16");
  REQUIRE_EQ(RopeText("none", 5, 6, "x"), "none");
  REQUIRE_EQ(RopeText("inline", 0.1, 2, "x"), "inline theta=0.10000000000000001 scale=2 x");
  REQUIRE_EQ(HexHash(""), "cbf29ce484222325");  // the published values of FNV-1a
  REQUIRE_EQ(HexHash("a"), "af63dc4c8601ec8c");
  REQUIRE_EQ(layout.PageBytes(0), 2 * 2 * 4 * 8 * 2);
  REQUIRE_EQ(layout.PageBytes(3), 4 * 24 * 2);
  REQUIRE_EQ(layout.GroupShape(1, 7), (std::vector<int64_t>{1, 7, 2, 2, 4, 8}));
  REQUIRE_EQ(layout.GroupShape(3, 7), (std::vector<int64_t>{1, 7, 4, 24}));
}

TEST_CASE("checkpoint metadata: codecs") {
  CheckpointLayout layout = MakeQuantizedLayout();
  REQUIRE_EQ(layout.Types(), "2 x int8.1, 2 x float16");
  REQUIRE_EQ(layout.Text().substr(0, 49), "page_size=4 dtype=2 x int8.1, 2 x float16; 1 x mh");
  REQUIRE_EQ(layout.GroupShape(1, 7), (std::vector<int64_t>{1, 7, 192}));
  REQUIRE_EQ(layout.PageBytes(1), 192);
  REQUIRE_EQ(layout.layers[1].GroupDtype(), "uint8");
  REQUIRE_EQ(layout.layers[2].GroupDtype(), "float16");
  const std::string text = WriteMetadata(layout, 0, {5, {0, 0, 0, 0}});
  REQUIRE_EQ(ReadMetadata(text, layout).length, 5);
  // Other caches refuse it by name, and say that a file can be converted.
  for (const char* what : {"another layout",
                           "they differ only in kv_dtype, 2 x int8.1, 2 x float16 "
                           "and float16",
                           "convert=True"}) {
    REQUIRE_RAISES("ValueError", what, ReadMetadata(text, MakeLayout()));
  }
  layout.layers[1].codec_page_bytes = 256;
  REQUIRE_RAISES("ValueError", "nbytes of group 1", ReadMetadata(text, layout));
  layout = MakeQuantizedLayout();
  auto altered = [&](const std::string& from, const std::string& to) {
    std::string copy = text;
    copy.replace(copy.find(from), from.size(), to);
    return copy;
  };
  const std::string codec = "\"dtype\":\"uint8\",\"kv_dtype\":\"int8.1\"";
  const char* what = "shape or dtype of group 0";
  for (const char* other : {"\"dtype\":\"uint8\"", "\"dtype\":\"uint8\",\"kv_dtype\":\"int4\"",
                            "\"dtype\":\"float16\",\"kv_dtype\":\"int8.1\""}) {
    REQUIRE_RAISES("ValueError", what, ReadMetadata(altered(codec, other), layout));
  }
}

TEST_CASE("checkpoint metadata: round trip") {
  for (CheckpointLayout layout : {MakeLayout(), MakeQuantizedLayout()})
    for (int64_t length : {0, 1, 4, 5, 22, 4000}) {
      const int64_t first = length > 20 ? 3 : 0;
      std::string text = WriteMetadata(layout, -7, {length, {0, first, first, 0}});
      SequenceState state = ReadMetadata(text, layout);
      REQUIRE_EQ(state.length, length);
      REQUIRE_EQ(state.first_pages, (std::vector<int64_t>{0, first, first, 0}));
    }
}

/*! \brief Writes 10000.5 as 1'00'00,5. */
class Grouped : public std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '\''; }
  std::string do_grouping() const override { return "\2"; }
};

std::string MessageOf(int64_t number) {
  try {
    Raise(kValueError, "got ", number);
  } catch (const Error& error) {
    return error.message();
  }
}

TEST_CASE("checkpoint metadata: locale") {
  auto write = [] {
    CheckpointLayout layout = MakeLayout();
    layout.layers[0].rope = RopeText("normal", 10000.5, 0.25, "");
    layout.layers[1].window = 12345;
    return WriteMetadata(layout, 123456, {70000, {0, 12000, 12000, 0}}) + layout.Hash();
  };
  const std::string text = write();
  const std::locale before = std::locale::global(std::locale(std::locale(), new Grouped));
  std::ostringstream probe;
  probe << 10000.5;
  REQUIRE_EQ(probe.str(), "1'00'00,5");
  const std::string in_another = write();
  const std::string message = MessageOf(123456);
  std::locale::global(before);
  REQUIRE_EQ(in_another, text);
  REQUIRE_EQ(message, "got 123456");
}

TEST_CASE("checkpoint metadata: damage") {
  CheckpointLayout layout = MakeQuantizedLayout();
  const std::string text = WriteMetadata(layout, 0, {22, {0, 3, 3, 0}});
  for (size_t length = 0; length < text.size(); ++length) {
    REQUIRE_RAISES("ValueError", "checkpoint metadata",
                   ReadMetadata(text.substr(0, length), layout));
  }
  std::mt19937 random(0);
  for (int i = 0; i < 20000; ++i) {
    std::string damaged = text;
    for (int k = 0; k < 1 + i % 3; ++k) {
      damaged[random() % damaged.size()] = static_cast<char>(random() % 256);
    }
    try {
      SequenceState state = ReadMetadata(damaged, layout);
      REQUIRE_EQ(state.length, 22);
      REQUIRE_EQ(state.first_pages, (std::vector<int64_t>{0, 3, 3, 0}));
    } catch (const Error& error) {
      REQUIRE_EQ(error.kind(), std::string("ValueError"));
    }
  }
}

TEST_CASE("checkpoint metadata: another layout") {
  const std::string text = WriteMetadata(MakeLayout(), 0, {5, {0, 0, 0, 0}});
  auto refuse = [&](const char* what, auto change) {
    CheckpointLayout layout = MakeLayout();
    change(&layout);
    REQUIRE_RAISES("ValueError", "another layout", ReadMetadata(text, layout));
    REQUIRE_RAISES("ValueError", what, ReadMetadata(text, layout));
  };
  refuse("page_size=8", [](auto* layout) { layout->page_size = 8; });
  refuse("dtype=float32", [](auto* layout) {
    for (CheckpointLayout::Layer& layer : layout->layers) layer.kv_dtype = "float32";
  });
  refuse("window=6", [](auto* layout) { layout->layers[2].window = 6; });
  refuse("theta=5", [](auto* layout) { layout->layers[0].rope = RopeText("normal", 5, 1, ""); });
  refuse("3 x", [](auto* layout) {
    layout->layers.insert(layout->layers.begin() + 1, 2, layout->layers[0]);
  });
}

}  // namespace

}  // namespace pagedkv::checkpoint_metadata_test
