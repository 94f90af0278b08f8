// SPDX-License-Identifier: Apache-2.0
/*!
 * \file driver.cc
 * \brief Drives a fuzz target where libFuzzer is missing: mutates inputs, keeps those that reach
 * new code, and writes the input that ends the process to a file.
 *
 * Use: TARGET [--seconds=10] [--seed=1] [--save=FOLDER] [INPUT...]   (inputs: run these only)
 */
#include <fcntl.h>
#include <sanitizer/common_interface_defs.h>
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Input = std::vector<uint8_t>;

constexpr size_t kMaxSize = 512, kNumEdges = 1 << 16;
constexpr time_t kMaxCpuSecondsOfInput = 20;

uint8_t edges[kNumEdges], seen[kNumEdges];
uintptr_t last_place = 0;

std::string save_folder = ".";
const Input* current = nullptr;

/*! \brief Called when a sanitizer is about to end the process. */
void Save() {
  if (current == nullptr) return;
  uint64_t hash = 14695981039346656037u;
  for (uint8_t byte : *current) hash = (hash ^ byte) * 1099511628211u;
  char path[4096];
  std::snprintf(path, sizeof(path), "%s/crash-%016llx", save_folder.c_str(),
                static_cast<unsigned long long>(hash));
  int file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (file >= 0 && write(file, current->data(), current->size()) >= 0) {
    std::fprintf(stderr, "the input is in %s\n", path);
  }
  if (file >= 0) close(file);
  current = nullptr;
}

void OnSignal(int number) {
  std::fprintf(stderr, "%s\n", number == SIGPROF ? "an input takes too long" : "abort");
  Save();
  signal(SIGABRT, SIG_DFL);
  std::abort();
}

/*! \brief Sends SIGPROF after seconds of CPU time; 0: never. A stopped process uses none. */
void LimitCpuTime(time_t seconds) {
  itimerval limit{};
  limit.it_value.tv_sec = seconds;
  setitimer(ITIMER_PROF, &limit, nullptr);
}

void Run(const Input& input) {
  current = &input;
  last_place = 0;
  LimitCpuTime(kMaxCpuSecondsOfInput);
  LLVMFuzzerTestOneInput(input.data(), input.size());
  LimitCpuTime(0);
  current = nullptr;
}

/*! \brief Whether the last run reached a new edge, or one far more often than before. */
bool ReachedSomethingNew() {
  bool is_new = false;
  for (size_t i = 0; i < kNumEdges; ++i) {
    if (edges[i] == 0) {
      uint64_t eight;  // most are zero
      if (i % 8 == 0 && (std::memcpy(&eight, edges + i, 8), eight == 0)) i += 7;
      continue;
    }
    uint8_t bucket = 1;
    while (bucket < 128 && edges[i] >= 2 * bucket) bucket *= 2;
    is_new |= (seen[i] & bucket) == 0;
    seen[i] |= bucket;
    edges[i] = 0;
  }
  return is_new;
}

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  Input Draw(const std::vector<Input>& corpus) {
    Input input = corpus.empty() ? Input() : corpus[Below(corpus.size())];
    const size_t rounds = size_t{1} << Below(5);
    for (size_t i = 0; i < rounds; ++i) Change(&input, corpus);
    return input;
  }

 private:
  size_t Below(size_t n) { return random_() % n; }
  uint8_t Byte() { return static_cast<uint8_t>(random_()); }

  void Change(Input* input, const std::vector<Input>& corpus) {
    const size_t size = input->size(), at = Below(size + 1);
    auto here = input->begin() + static_cast<ptrdiff_t>(at);
    if (size == 0 || (Below(3) == 0 && size < kMaxSize)) {
      Input part(1 + Below(16));
      std::generate(part.begin(), part.end(), [&] { return Byte(); });
      if (!corpus.empty() && Below(2) == 0) {  // splice from another input
        const Input& other = corpus[Below(corpus.size())];
        if (!other.empty()) {
          const size_t from = Below(other.size());
          const size_t count = std::min(other.size() - from, 1 + Below(64));
          part.assign(other.begin() + static_cast<ptrdiff_t>(from),
                      other.begin() + static_cast<ptrdiff_t>(from + count));
        }
      }
      input->insert(here, part.begin(), part.end());
    } else if (at == size) {
      input->pop_back();
    } else if (Below(4) == 0) {
      const size_t count = std::min(size - at, 1 + Below(16));
      input->erase(here, here + static_cast<ptrdiff_t>(count));
    } else if (Below(2) == 0) {
      *here = Byte();
    } else {
      *here = static_cast<uint8_t>(Below(2) ? *here + 1 - Below(3) : *here ^ (1u << Below(8)));
    }
  }

  std::mt19937_64 random_;
};

Input Read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    std::fprintf(stderr, "cannot read %s\n", path);
    std::exit(2);
  }
  return Input(std::istreambuf_iterator<char>(file), {});
}

}  // namespace

/*! \brief The compiler inserts a call on every edge of the code under test. */
extern "C" void __sanitizer_cov_trace_pc() {
  const auto place = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  uint8_t& count = edges[(place ^ (last_place << 1)) % kNumEdges];
  count += count < 255;
  last_place = place;
}

int main(int argc, char** argv) {
  double seconds = 10;
  uint64_t seed = 1;
  std::vector<Input> inputs;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--seconds=", 10) == 0) {
      seconds = std::atof(argv[i] + 10);
    } else if (std::strncmp(argv[i], "--seed=", 7) == 0) {
      seed = std::strtoull(argv[i] + 7, nullptr, 10);
    } else if (std::strncmp(argv[i], "--save=", 7) == 0) {
      save_folder = argv[i] + 7;
    } else {
      inputs.push_back(Read(argv[i]));
    }
  }
  for (const Input& input : inputs) Run(input);
  if (!inputs.empty()) return 0;

  __sanitizer_set_death_callback(Save);
  signal(SIGABRT, OnSignal);
  signal(SIGPROF, OnSignal);
  Mutator mutator(seed);
  std::vector<Input> corpus;
  int64_t num_runs = 0;
  const auto begin = std::chrono::steady_clock::now();
  auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  for (; elapsed() < seconds; ++num_runs) {
    Input input = mutator.Draw(corpus);
    Run(input);
    if (ReachedSomethingNew()) corpus.push_back(std::move(input));
  }
  size_t num_edges = kNumEdges - std::count(std::begin(seen), std::end(seen), 0);
  std::printf("%lld runs in %.0f s with seed %llu, %zu edges reached by %zu inputs\n",
              static_cast<long long>(num_runs), elapsed(), static_cast<unsigned long long>(seed),
              num_edges, corpus.size());
  return 0;
}
