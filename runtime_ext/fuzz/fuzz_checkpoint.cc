// SPDX-License-Identifier: Apache-2.0
/*!
 * \file fuzz_checkpoint.cc
 * \brief Metadata and page numbers of checkpoints, right ones with edits, against a small table.
 *
 * What is refused must leave the table as it was. What is taken must be what the text says: it can
 * be written and read again, and the sequences share the pages that have one number.
 */
#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bytes.h"
#include "checkpoint/checkpoint_metadata.h"
#include "operation_count.h"
#include "state/plans/forward_plan.h"
#include "state/table/sequence_imports.h"

namespace pagedkv {

namespace {

constexpr int64_t kMaxSequences = 5, kMaxId = 6, kMaxLength = 40;

CheckpointLayout DrawLayout(Bytes* bytes) {
  CheckpointLayout layout;
  layout.page_size = int64_t{1} << bytes->Between(0, 3);
  const std::string rope = RopeText(bytes->Next() % 2 ? "normal" : "none", 1e4, 1, "");
  const int64_t num_layers = bytes->Between(1, 3);
  for (int64_t i = 0; i < num_layers; ++i) {
    const int64_t kind = bytes->Between(0, 4), type = kind > 2 ? 1 : bytes->Between(0, 2);
    const char* const types[] = {"float16", "float32", "int8"};
    const int64_t item_bytes[] = {2, 4, 1};
    const int64_t page_bytes = type == 2 ? 64 * layout.page_size : 0;
    auto add = [&](const char* name, int64_t window, int64_t heads, int64_t dim, int64_t v_dim,
                   const std::string& rotation) {
      layout.layers.push_back(
          {name, window, heads, dim, v_dim, rotation, types[type], item_bytes[type], page_bytes});
    };
    if (kind == 0) add("mha", 0, 2, 8, 8, rope);
    if (kind == 1) add("mha_sliding", bytes->Between(1, 9), 2, 8, 8, rope);
    if (kind == 2) add("mla", 0, 1, 24, 16, "");
    if (kind == 3) add("conv", bytes->Between(2, 4), 1, 24, 24, "");
    if (kind == 4) add("recurrent", 0, 1, 20, 20, "");
    CheckpointLayout::Layer& layer = layout.layers.back();
    if (kind > 2) layer.details = "num_heads=2";
    if (kind < 4) continue;
    layer.state_shape = {2, 3, 4};
    if (bytes->Between(0, 1)) {
      layer.state_dtype = "bfloat16";
      layer.state_item_bytes = 2;
    }
    layer.interval = layer.window = layout.page_size << bytes->Between(0, 2);
  }
  return layout;
}

// --- texts --------------------------------------------------------------------------------------

void Replace(std::string* text, const std::string& from, const std::string& to) {
  const size_t at = text->find(from);
  if (at != std::string::npos) text->replace(at, from.size(), to);
}

/*! \brief Metadata as a cache of apache-tvm would write it: layers of one kind without windows. */
void MakeStock(std::string* text, const CheckpointLayout& layout) {
  const CheckpointLayout::Layer& layer = layout.layers[0];
  Replace(text, "pagedkv.KVCache", "relax.vm.PagedAttentionKVCache");
  Replace(text, "\"layout\":\"" + layout.Text() + "\"",
          "\"num_kv_heads\":" + std::to_string(layer.num_kv_heads) +
              ",\"qk_head_dim\":" + std::to_string(layer.qk_head_dim) +
              ",\"v_head_dim\":" + std::to_string(layer.v_head_dim) + ",\"rope_mode\":\"" +
              layer.rope.substr(0, layer.rope.find(' ')) +
              "\",\"rotary_scale\":1.0,\"rotary_theta\":1e4,\"has_rope_ext_factors\":false");
}

const char* const kWords[] = {
    "{",     "}",    "[",    "]",    ",",           ":",  "\"",      "\\",           "-",
    "1e999", "null", "true", "9999", "\"groups\":", "[[", "\\u0041", "\"seq_id\":1", " "};

void Edit(std::string* text, Bytes* bytes) {
  const size_t place = bytes->Next() * 256 + bytes->Next();
  const size_t at = place % (text->size() + 1);
  const size_t count = 1 + bytes->Next() % 16;
  switch (bytes->Between(0, 5)) {
    case 0:
      text->insert(at, kWords[bytes->Next() % std::size(kWords)]);
      break;
    case 1:
      text->erase(at, count);
      break;
    case 2:
      text->insert(at, text->substr(at, 4 * count));
      break;
    case 3:
      text->resize(at);
      break;
    case 4:
      if (at < text->size()) (*text)[at] = static_cast<char>(bytes->Next());
      break;
    default: {  // another number, there or wherever it is
      const char* digits = "-0123456789";
      const size_t begin = text->find_first_of(digits, at);
      if (begin == std::string::npos) return;
      const size_t end = std::min(text->find_first_not_of(digits, begin), text->size());
      const std::string from = ":" + text->substr(begin, end - begin);
      const std::string to = std::to_string(bytes->Around(0, kMaxLength));
      if (bytes->Next() % 2) return (void)text->replace(begin, end - begin, to);
      for (size_t i = 0; (i = text->find(from, i)) != std::string::npos; i += to.size()) {
        text->replace(i + 1, from.size() - 1, to);
      }
    }
  }
}

/*! \brief Metadata of a drawn sequence, mostly right ones. */
std::string DrawText(const CheckpointLayout& layout, Bytes* bytes, int64_t* num_edits) {
  SequenceState state{bytes->Between(0, kMaxLength), {}, {}};
  const int64_t num_pages = (state.length + layout.page_size - 1) / layout.page_size;
  for (const CheckpointLayout::Layer& layer : layout.layers) {
    const bool has_slid = layer.window > 0 || bytes->Next() % 16 == 1;
    state.first_pages.push_back(has_slid ? bytes->Between(0, num_pages) : 0);
  }
  for (const CheckpointLayout::Layer& layer : layout.layers) {
    if (layer.interval == 0) continue;
    state.state_lengths.push_back(bytes->Between(0, state.length));
    const int64_t num_full = state.state_lengths.back() / layer.interval;
    state.first_pages.push_back(bytes->Between(0, num_full));
  }
  std::string text = WriteMetadata(layout, bytes->Next(), state);
  if (bytes->Next() % 4 == 1) MakeStock(&text, layout);
  *num_edits = bytes->Next() % 2 ? bytes->Between(0, 6) : 0;
  for (int64_t i = 0; i < *num_edits; ++i) Edit(&text, bytes);
  return text;
}

// --- the table ----------------------------------------------------------------------------------

class World {
 public:
  World(const CheckpointLayout& layout, Bytes* bytes)
      : layout_(layout),
        table_(kMaxSequences, static_cast<int32_t>(layout.page_size), NumPages(layout, bytes),
               Windows(layout), StateGroups(layout), NumStates(layout, bytes)),
        imports_(&table_) {}

  /*! \return Whether the operation was done; else it was refused. */
  bool Apply(Bytes* bytes) {
    bool was_done = true;
    const State before = Look();
    try {
      switch (bytes->Between(0, 9)) {
        case 0:
          imports_.Finish(bytes->Around(0, kMaxId));
          break;
        case 1:
          table_.Remove(bytes->Around(0, kMaxId));
          break;
        case 2:
          table_.Add(bytes->Around(0, kMaxId));
          break;
        case 3:
          Step(bytes->Around(0, kMaxId), bytes->Between(1, 12));
          break;
        case 4:
          table_.Fork(bytes->Around(0, kMaxId), bytes->Around(0, kMaxId), -1);
          break;
        case 5:
          table_.EnableWindow(bytes->Around(0, kMaxId), bytes->Between(1, 9), bytes->Between(0, 3));
          break;
        default:
          Import(bytes);
      }
    } catch (const Error&) {
      was_done = false;
      FUZZ_CHECK(Look() == before);
    }
    table_.CheckIntegrity();
    return was_done;
  }

  /*! \brief Nothing is left behind. */
  void End() {
    while (table_.num_sequences() > 0) table_.Remove(table_.sequences().begin()->first);
    FUZZ_CHECK(table_.total_length() == 0);
    for (int32_t p = 0; p < table_.geometry().num_pools(); ++p) {
      FUZZ_CHECK(table_.pool(p).num_used() == 0);
    }
  }

 private:
  /*! \brief All that a failed call must leave as it was. */
  using State = std::vector<std::vector<int64_t>>;

  static std::vector<int32_t> NumPages(const CheckpointLayout& layout, Bytes* bytes) {
    std::vector<int32_t> numbers;
    for (size_t i = 0; i < layout.layers.size(); ++i) {
      numbers.push_back(static_cast<int32_t>(bytes->Between(1, 60)));
    }
    return numbers;
  }

  static std::vector<int64_t> Windows(const CheckpointLayout& layout) {
    std::vector<int64_t> windows;
    for (const CheckpointLayout::Layer& layer : layout.layers) windows.push_back(layer.window);
    return windows;
  }

  static std::vector<StateGroup> StateGroups(const CheckpointLayout& layout) {
    std::vector<StateGroup> groups;
    for (size_t i = 0; i < layout.layers.size(); ++i) {
      const int64_t interval = layout.layers[i].interval;
      if (interval > 0) groups.push_back({static_cast<int32_t>(i), interval});
    }
    return groups;
  }

  static std::vector<int32_t> NumStates(const CheckpointLayout& layout, Bytes* bytes) {
    std::vector<int32_t> numbers;
    for (size_t i = 0; i < StateGroups(layout).size(); ++i) {
      numbers.push_back(static_cast<int32_t>(bytes->Between(1, 20)));
    }
    return numbers;
  }

  State Look() const {
    State state{{table_.total_length(), table_.num_sequences(), imports_.num_importing()}};
    std::set<int64_t> ids;
    for (const auto& [id, sequence] : table_.sequences()) ids.insert(id);
    for (int64_t id : ids) {
      const Sequence& sequence = table_.Peek(id);
      state.push_back({id, sequence.length, sequence.import != nullptr, sequence.window.size,
                       sequence.window.num_sinks, sequence.window.num_dropped});
      state.emplace_back(sequence.first_pages);
      for (const auto& pages : sequence.pages) state.emplace_back(pages.begin(), pages.end());
      for (const SequenceStates& states : sequence.states) {
        state.push_back({states.length, states.first_page});
        state.emplace_back(states.pages.begin(), states.pages.end());
      }
    }
    for (int32_t p = 0; p < table_.geometry().num_pools(); ++p) {
      const std::vector<int32_t>& free = table_.pool(p).free_pages();
      state.emplace_back(free.begin(), free.end());
    }
    return state;
  }

  void Step(int64_t id, int64_t length) {
    ForwardPlan plan(&table_, kMaxLength);
    plan.Prepare({&id, 1}, {&length, 1});
    plan.Acquire();
    plan.Commit();
    plan.Finish();
  }

  /*! \brief The content of a text, which another write and read must preserve. */
  SequenceState Read(Bytes* bytes) const {
    const bool is_foreign = bytes->Next() % 8 == 1;
    const CheckpointLayout writer = is_foreign ? DrawLayout(bytes) : layout_;
    int64_t num_edits = 0;
    const std::string text = DrawText(writer, bytes, &num_edits);
    const SequenceState state = ReadMetadata(text, layout_);
    FUZZ_CHECK(num_edits > 0 || writer.Text() == layout_.Text());
    const SequenceState again = ReadMetadata(WriteMetadata(layout_, 0, state), layout_);
    FUZZ_CHECK(again.length == state.length && again.first_pages == state.first_pages);
    FUZZ_CHECK(again.state_lengths == state.state_lengths);
    return state;
  }

  void Import(Bytes* bytes) {
    std::vector<ImportedSequence> imported;
    const int64_t count = bytes->Between(1, 3);
    const int32_t num_pools = table_.geometry().num_pools();
    std::vector<int64_t> num_numbers(num_pools, 0);
    for (int64_t i = 0; i < count; ++i) {
      SequenceState state = Read(bytes);
      const int64_t id = bytes->Around(0, kMaxId);
      imported.push_back({id, state.length, state.first_pages, {}, state.state_lengths});
      // Some first pages are those of the sequences before; the others follow.
      const int64_t num_shared = bytes->Between(0, 8);
      for (int32_t p = 0; p < num_pools; ++p) {
        std::vector<int64_t> numbers;
        for (int64_t n = imports_.NumPages(imported.back(), p); n > 0; --n) {
          const auto k = static_cast<int64_t>(numbers.size());
          numbers.push_back(k < num_shared && k < num_numbers[p] ? k : num_numbers[p]++);
        }
        if (bytes->Next() % 16 == 1) Disturb(&numbers, bytes);
        imported.back().page_numbers.push_back(std::move(numbers));
      }
    }
    imports_.Begin(imported, layout_.LayersOfGroups().size());
    Compare(imported);
    const int64_t id = imported[0].id;
    if (bytes->Next() % 4 > 0) imports_.Finish(id);
  }

  static void Disturb(std::vector<int64_t>* numbers, Bytes* bytes) {
    if (numbers->empty() || bytes->Next() % 4 == 0) return numbers->push_back(bytes->Next() % 4);
    (*numbers)[bytes->Next() % numbers->size()] = bytes->Around(0, 20);
  }

  void Compare(const std::vector<ImportedSequence>& imported) const {
    // What is written to the pages goes by number; one page has one place in its sequences.
    std::map<std::pair<int64_t, int64_t>, size_t> place_of;
    const SequenceImport& import = imports_.At(imported[0].id);
    for (const std::vector<int32_t>& pages : import.pages) {
      std::set<int32_t> ids(pages.begin(), pages.end());
      const auto num_left_out = static_cast<size_t>(std::count(pages.begin(), pages.end(), -1));
      FUZZ_CHECK(ids.size() == pages.size() - num_left_out + (num_left_out > 0));
      for (int32_t page : pages) FUZZ_CHECK(page >= -1);
    }
    for (const ImportedSequence& expected : imported) {
      const Sequence& sequence = table_.Peek(expected.id);
      FUZZ_CHECK(sequence.length == expected.length && sequence.import != nullptr);
      for (int32_t p = 0; p < table_.geometry().num_pools(); ++p) {
        const int32_t s = p - table_.num_groups();
        const auto& pages = s < 0 ? sequence.pages[p] : sequence.states[s].pages;
        const int64_t first = s < 0 ? sequence.first_pages[p] : sequence.states[s].first_page;
        // Only pages of the past are left out, and only where there is no room for them.
        const int64_t num_left_out = first - expected.first_pages[p];
        FUZZ_CHECK(num_left_out == 0 || (num_left_out > 0 && table_.pool(p).num_available() == 0));
        FUZZ_CHECK(s < 0 || sequence.states[s].length == expected.state_lengths[s]);
        const std::vector<int64_t>& numbers = expected.page_numbers[p];
        FUZZ_CHECK(pages.size() + num_left_out == numbers.size());
        for (size_t k = 0; k < pages.size(); ++k) {
          const size_t place = first + k;
          const int64_t number = numbers[k + num_left_out];
          FUZZ_CHECK(pages[k] >= 0 && pages[k] == import.pages[p].at(number));
          FUZZ_CHECK(place_of.try_emplace({p, number}, place).first->second == place);
        }
      }
    }
  }

  CheckpointLayout layout_;
  SequenceTable table_;
  SequenceImports imports_;
};

}  // namespace

}  // namespace pagedkv

pagedkv::OperationCount operations;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  pagedkv::Bytes bytes(data, size);
  const pagedkv::CheckpointLayout layout = pagedkv::DrawLayout(&bytes);
  pagedkv::World world(layout, &bytes);
  while (!bytes.empty()) operations.Add(world.Apply(&bytes));
  world.End();
  return 0;
}
