// SPDX-License-Identifier: Apache-2.0
/*!
 * \file fuzz_sequence_table.cc
 * \brief Operations on sequences and steps, decoded from bytes, against a list of tokens for each.
 *
 * Slots of pages hold tokens here, so that a page that was not copied, was copied too late or was
 * given away twice shows as a wrong token of some sequence.
 */
#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "../error.h"
#include "../forward_plan.h"
#include "../sequence_table.h"
#include "bytes.h"

namespace pagedkv {

namespace {

constexpr int64_t kMaxSequences = 6, kMaxId = 8, kChunk = 12;

struct Sizes {
  int32_t page_size;
  std::vector<int32_t> num_pages;
  std::vector<int64_t> windows;

  explicit Sizes(Bytes* bytes) {
    page_size = 1 << bytes->Between(0, 3);
    const int64_t num_groups = bytes->Between(1, 3);
    for (int64_t g = 0; g < num_groups; ++g) {
      num_pages.push_back(static_cast<int32_t>(bytes->Between(1, 40)));
      windows.push_back(bytes->Next() % 2 ? bytes->Between(1, 20) : 0);
    }
  }
};

class World {
 public:
  explicit World(const Sizes& sizes)
      : table_(kMaxSequences, sizes.page_size, sizes.num_pages, sizes.windows),
        plan_(&table_, kChunk) {
    for (int32_t n : sizes.num_pages) slots_.emplace_back(n * sizes.page_size, 0);
  }

  void Apply(Bytes* bytes) {
    const State before = Look();
    const auto expected = expected_;
    try {
      Draw(bytes);
    } catch (const Error&) {
      FUZZ_CHECK(Look() == before);
      expected_ = expected;
    }
    Check();
  }

 private:
  /*! \brief All that a failed call must leave as it was. */
  using State = std::vector<std::vector<int64_t>>;

  State Look() const {
    State state{{table_.total_length(), table_.num_sequences()}};
    std::vector<int64_t> ids;
    for (const auto& [id, sequence] : table_.sequences()) ids.push_back(id);
    std::sort(ids.begin(), ids.end());
    for (int64_t id : ids) {
      const Sequence& sequence = table_.At(id);
      state.push_back({id, sequence.length});
      state.emplace_back(sequence.first_pages);
      for (const auto& pages : sequence.pages) state.emplace_back(pages.begin(), pages.end());
    }
    for (int32_t g = 0; g < table_.num_groups(); ++g) {
      const std::vector<int32_t>& free = table_.pool(g).free_pages();
      state.emplace_back(free.begin(), free.end());
    }
    return state;
  }

  void Draw(Bytes* bytes) {
    const int64_t id = bytes->Around(0, kMaxId);
    switch (bytes->Between(0, 9)) {
      case 0:
        table_.Add(id);
        expected_[id].clear();
        break;
      case 1:
        table_.Remove(id);
        expected_.erase(id);
        break;
      case 2:
        Fork(id, bytes);
        break;
      case 3:
        Pop(id, bytes);
        break;
      case 4:
        Overwrite(id, bytes);
        break;
      case 5:
        if (bytes->Next() % 8 == 0) {
          table_.Clear();
          expected_.clear();
        } else {
          for (int32_t g = 0; g < table_.num_groups(); ++g) table_.pool(g).ShuffleFree(id);
        }
        break;
      default:
        Step(bytes);
    }
  }

  int64_t LengthOf(int64_t id) const {
    auto it = expected_.find(id);
    return it == expected_.end() ? 0 : static_cast<int64_t>(it->second.size());
  }

  void Fork(int64_t parent, Bytes* bytes) {
    const int64_t child = bytes->Around(0, kMaxId);
    const int64_t position = bytes->Around(-1, std::min<int64_t>(LengthOf(parent), 200));
    table_.Fork(parent, child, position);
    std::vector<int32_t> tokens = expected_.at(parent);
    if (position != -1) tokens.resize(position);
    expected_[child] = std::move(tokens);
  }

  void Pop(int64_t id, Bytes* bytes) {
    const int64_t count = bytes->Around(0, std::min<int64_t>(LengthOf(id), 24));
    table_.Pop(id, count);
    std::vector<int32_t>& tokens = expected_.at(id);
    tokens.resize(tokens.size() - count);
  }

  /*! \brief What debug_set_kv does; the copies may fail. */
  void Overwrite(int64_t id, Bytes* bytes) {
    Sequence& sequence = table_.At(id);
    if (sequence.length == 0) return;
    const int64_t begin = bytes->Next() % sequence.length;
    const int64_t end = begin + 1 + bytes->Next() % (sequence.length - begin);
    const bool fails = bytes->Next() % 4 == 0;
    table_.RequireKept(sequence, begin);
    const std::vector<PageCopy> copies = table_.AcquireCopies(&sequence, begin, end);
    Copy(copies);
    if (fails) return table_.ReleaseCopies(copies);
    table_.CommitCopies(copies);
    for (int64_t position = begin; position < end; ++position) {
      expected_.at(id)[position] = ++last_token_;
      for (int32_t g = 0; g < table_.num_groups(); ++g) {
        slots_[g][SlotOf(sequence, g, position)] = last_token_;
      }
    }
  }

  void Step(Bytes* bytes) {
    std::vector<int64_t> ids, lengths;
    const int64_t batch = bytes->Between(0, 4);
    const bool is_decode = bytes->Next() % 2;
    for (int64_t i = 0; i < batch; ++i) {
      ids.push_back(bytes->Around(0, kMaxId));
      lengths.push_back(is_decode ? 1 : bytes->Around(1, kChunk / 2));
    }
    if (bytes->Next() % 16 == 0) lengths.push_back(1);
    const int64_t end = bytes->Between(0, 4);
    plan_.Prepare({ids.data(), ids.size()}, {lengths.data(), lengths.size()});
    plan_.Acquire();
    Copy(plan_.copies());
    if (end == 0) return plan_.Release();  // as after a failed copy

    std::vector<std::vector<int32_t>> slots(table_.num_groups());
    for (int32_t g = 0; g < table_.num_groups(); ++g) {
      slots[g].resize(plan_.num_rows());
      plan_.FillSlots(g, slots[g].data());
      std::vector<int32_t> pages(plan_.NumPages(g, PageRange::kWithStep));
      plan_.FillPageValues(g, PageRange::kWithStep, pages.data());
    }
    plan_.Commit();
    table_.CheckIntegrity(/*has_slid=*/false);
    size_t row = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      for (int64_t n = 0; n < lengths[i]; ++n, ++row) {
        expected_.at(ids[i]).push_back(++last_token_);
        for (int32_t g = 0; g < table_.num_groups(); ++g) slots_[g].at(slots[g][row]) = last_token_;
      }
    }
    plan_.Slide();
  }

  void Copy(const std::vector<PageCopy>& copies) {
    const int64_t page_size = table_.page_size();
    for (const PageCopy& copy : copies) {
      auto source = slots_[copy.group].begin() + copy.source * page_size;
      std::copy_n(source, copy.length, slots_[copy.group].begin() + copy.destination * page_size);
    }
  }

  int64_t SlotOf(const Sequence& sequence, int32_t group, int64_t position) const {
    const int64_t page_size = table_.page_size();
    const int64_t index = position / page_size - sequence.first_pages[group];
    return sequence.pages[group].at(index) * page_size + position % page_size;
  }

  void Check() const {
    try {
      table_.CheckIntegrity();
    } catch (const Error& error) {
      std::fprintf(stderr, "%s\n", error.what());
      FUZZ_CHECK(!"CheckIntegrity");
    }
    FUZZ_CHECK(table_.num_sequences() == static_cast<int64_t>(expected_.size()));
    for (const auto& [id, tokens] : expected_) {
      const Sequence& sequence = table_.At(id);
      FUZZ_CHECK(sequence.length == static_cast<int64_t>(tokens.size()));
      for (int32_t g = 0; g < table_.num_groups(); ++g) {
        for (int64_t i = table_.FirstPosition(sequence, g); i < sequence.length; ++i) {
          FUZZ_CHECK(slots_[g].at(SlotOf(sequence, g, i)) == tokens[i]);
        }
      }
    }
  }

  SequenceTable table_;
  ForwardPlan plan_;
  std::map<int64_t, std::vector<int32_t>> expected_;  // tokens by sequence
  std::vector<std::vector<int32_t>> slots_;           // tokens by group and slot
  int32_t last_token_ = 0;
};

}  // namespace

}  // namespace pagedkv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  pagedkv::Bytes bytes(data, size);
  pagedkv::World world((pagedkv::Sizes(&bytes)));
  while (!bytes.empty()) world.Apply(&bytes);
  return 0;
}
