// SPDX-License-Identifier: Apache-2.0
/*!
 * \file bench_prefix.cc
 * \brief Times of the prefix cache: looking a prompt up, adding one, and finding nothing.
 *
 * The tree has prompts of random length that share random beginnings, as many as fill the pool.
 * Use: bench_prefix [num_pages = 1048576] [prompt = 8192] [page_size = 16]
 */
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <utility>
#include <vector>

#include "state/plans/forward_plan.h"
#include "state/table/sequence_table.h"

namespace {

using pagedkv::ForwardPlan;
using pagedkv::SequenceTable;
using pagedkv::TokenSpan;
using Tokens = std::vector<int32_t>;

double Microseconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

TokenSpan Span(const Tokens& tokens) {
  return {tokens.data(), static_cast<int64_t>(tokens.size())};
}

void Report(const char* what, std::vector<double> values, const char* unit) {
  std::sort(values.begin(), values.end());
  std::printf("%-34s median %8.3f  p99 %8.3f %s  of %zu\n", what, values[values.size() / 2],
              values[values.size() * 99 / 100], unit, values.size());
}

class Bench {
 public:
  Bench(int32_t num_pages, int64_t prompt, int32_t page_size)
      : table_(4, page_size, {num_pages}), plan_(&table_, prompt + 1), prompt_(prompt) {}

  /*! \brief Computes a prompt; the time of adding it to the tree is noted, by the token. */
  void Compute(const Tokens& tokens) {
    int64_t id = 0, length = table_.AddWithPrefix(id, "", Span(tokens));
    int64_t num_rows = static_cast<int64_t>(tokens.size()) - length;
    plan_.Prepare({&id, 1}, {&num_rows, 1});
    plan_.Acquire();
    plan_.Commit();
    plan_.Finish();
    const auto start = std::chrono::steady_clock::now();
    table_.prefixes().Record(&table_.At(id), Span(tokens).From(length));
    table_.prefixes().AddPages(&table_.At(id));
    const auto stop = std::chrono::steady_clock::now();
    if (8 * num_rows >= prompt_) insert_us_.push_back(Microseconds(stop - start) / num_rows);
    table_.Remove(id);
  }

  Tokens RandomTokens(int64_t count) {
    Tokens tokens(count);
    for (int32_t& token : tokens) token = static_cast<int32_t>(engine_() % 128000);
    return tokens;
  }

  void Fill() {
    const auto& pool = table_.pool(0);
    while (pool.num_reclaimed() == 0) {
      Tokens tokens;
      if (!prompts_.empty() && engine_() % 2) {
        tokens = prompts_[engine_() % prompts_.size()];
        tokens.resize(engine_() % tokens.size());
      }
      const Tokens more = RandomTokens(1 + static_cast<int64_t>(engine_() % prompt_));
      tokens.insert(tokens.end(), more.begin(), more.end());
      if (static_cast<int64_t>(tokens.size()) > prompt_) tokens.resize(prompt_);
      Compute(tokens);
      prompts_.push_back(std::move(tokens));
    }
    std::printf("%lld nodes, %lld tokens, %zu prompts, %d pages cached\n",
                static_cast<long long>(table_.prefixes().tree().num_nodes()),
                static_cast<long long>(table_.prefixes().tree().num_tokens()), prompts_.size(),
                pool.num_cached());
  }

  void Run() {
    Fill();
    std::vector<double> hits, adds, misses, num_hit;
    for (int i = 0; i < 2000; ++i) {
      Tokens tokens = prompts_[prompts_.size() / 2 + engine_() % (prompts_.size() / 2)];
      if (static_cast<int64_t>(tokens.size()) < prompt_) {
        --i;
        continue;
      }
      auto start = std::chrono::steady_clock::now();
      const int64_t length = table_.prefixes().Match("", Span(tokens));
      hits.push_back(Microseconds(std::chrono::steady_clock::now() - start));
      num_hit.push_back(static_cast<double>(length));
      start = std::chrono::steady_clock::now();
      table_.AddWithPrefix(1, "", Span(tokens));
      adds.push_back(Microseconds(std::chrono::steady_clock::now() - start));
      table_.Remove(1);
      tokens = RandomTokens(prompt_);
      start = std::chrono::steady_clock::now();
      table_.prefixes().Match("", Span(tokens));
      misses.push_back(Microseconds(std::chrono::steady_clock::now() - start));
    }
    Report("tokens found of a prompt", num_hit, "");
    Report("look up a prompt", hits, "us");
    Report("add a sequence with its pages", adds, "us");
    Report("look up what is not there", misses, "us");
    Report("add to the tree, by the token", insert_us_, "us");
  }

 private:
  std::mt19937_64 engine_{1};
  SequenceTable table_;
  ForwardPlan plan_;
  int64_t prompt_;
  std::vector<Tokens> prompts_;
  std::vector<double> insert_us_;
};

}  // namespace

int main(int argc, char** argv) {
  const int64_t num_pages = argc > 1 ? std::atoll(argv[1]) : 1 << 20;
  const int64_t prompt = argc > 2 ? std::atoll(argv[2]) : 8192;
  const int64_t page_size = argc > 3 ? std::atoll(argv[3]) : 16;
  Bench(static_cast<int32_t>(num_pages), prompt, static_cast<int32_t>(page_size)).Run();
  return 0;
}
