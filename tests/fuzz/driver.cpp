// A small fuzzer for machines without clang's: mutates a corpus with a seed, so that a run can be had again.
//
//   gka_fuzz                        replay: every file of the corpus, then some mutations of each target, as tests do
//   gka_fuzz --seconds 60 [TARGET]  as many as fit, over new seeds; of one target or all in turns
//
// An input that ends the process is left as crash-TARGET in the current folder, and `gka_fuzz TARGET FILE` runs it
// once.
#include <fcntl.h>
#include <sys/time.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <vector>

#include "targets.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace gka::fuzz {
namespace {

constexpr std::size_t kLongest = 64 << 10;
constexpr int kMostSeconds = 20;  // of processor time for one input, under the sanitizers

// What runs now, for the moment in which the process ends.
const Target* g_target = nullptr;
const std::string* g_input = nullptr;

void keep_input() {
  if (!g_target || !g_input) return;
  char name[64] = "crash-";
  std::strncat(name, g_target->name.data(), 40);
  const int file = ::open(name, O_WRONLY | O_CREAT | O_TRUNC, 0666);
  [[maybe_unused]] const auto written = ::write(file, g_input->data(), g_input->size());
  std::fprintf(stderr, "\ngka_fuzz: the input of %zu bytes is in %s\n", g_input->size(), name);
  g_target = nullptr;
}

void on_signal(int number) {
  keep_input();
  std::signal(number, SIG_DFL);
  std::raise(number);
}

using Random = std::mt19937_64;

std::size_t below(Random& random, std::size_t limit) { return limit == 0 ? 0 : random() % limit; }

constexpr std::array<std::uint64_t, 12> kNumbers{
    0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF, ~0ULL, 1ULL << 32, 1ULL << 62};
constexpr std::array<std::string_view, 24> kWords{
    "null",     "true", "-1",   "0",  "1e999", "4294967301",   "9223372036854775807",
    "1e18",     "5.9",  "\"\"", "[]", "{}",    "[[[[[[[[",     "((((((((",
    "\\p{Han}", "(?i:", "{,3}", "\\", "\xff",  "\xed\xa0\x80", "\"a\":",
    "..",       "\n",   "x("};

void change(std::string& text, const std::string& other, Random& random) {
  const auto at = below(random, text.size() + 1);
  const auto length = 1 + below(random, 16);
  switch (below(random, 9)) {
    case 0:
      if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << below(random, 8)));
      break;
    case 1:
      if (at < text.size()) text[at] = static_cast<char>(random());
      break;
    case 2: text.erase(at, length); break;
    case 3: text.insert(at, text.substr(below(random, text.size() + 1), length)); break;
    case 4: text.insert(at, kWords[below(random, kWords.size())]); break;
    case 5: {  // a piece of another file
      const auto from = below(random, other.size() + 1);
      text.replace(at, below(random, 64), other.substr(from, below(random, 256)));
      break;
    }
    case 6: {  // a number as it lies in memory
      const auto number = kNumbers[below(random, kNumbers.size())] + below(random, 3) - 1;
      const auto width = std::size_t{1} << below(random, 4);
      if (at + width <= text.size()) std::memcpy(text.data() + at, &number, width);
      break;
    }
    case 7: {  // a number as it is written
      const auto digit = text.find_first_of("0123456789", at);
      if (digit == std::string::npos) break;
      const auto end = std::min(text.find_first_not_of("0123456789.e", digit), text.size());
      text.replace(digit, end - digit, std::to_string(kNumbers[below(random, kNumbers.size())]));
      break;
    }
    default: {  // a run of one thing
      const auto word = kWords[below(random, kWords.size())];
      std::string many;
      for (std::size_t i = below(random, 1000); i > 0; --i) many += word.front();
      text.insert(at, many);
    }
  }
  if (text.size() > kLongest) text.resize(kLongest);
}

using Corpus = std::vector<std::string>;

Corpus read_corpus(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path());
  std::ranges::sort(paths);
  Corpus corpus;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  if (corpus.empty()) throw std::runtime_error(folder.string() + " has no files to start from");
  return corpus;
}

/// 0: no limit. By the processor's clock: on a busy machine an input may well wait for long.
void limit_time(int seconds) {
  const itimerval limit{.it_interval = {0, 0}, .it_value = {seconds, 0}};
  ::setitimer(ITIMER_PROF, &limit, nullptr);
}

void run(const Target& target, const std::string& input) {
  g_target = &target;
  g_input = &input;
  limit_time(kMostSeconds);
  target.run(std::as_bytes(std::span(input)));
  limit_time(0);
  g_target = nullptr;
}

void mutate(const Target& target, const Corpus& corpus, std::uint64_t seed, std::int64_t runs) {
  Random random(seed);
  for (std::int64_t i = 0; i < runs; ++i) {
    auto input = corpus[below(random, corpus.size())];
    for (std::size_t changes = 1 + below(random, 6); changes > 0; --changes) {
      change(input, corpus[below(random, corpus.size())], random);
    }
    run(target, input);
  }
}

struct Arguments {
  double seconds = 0;
  std::uint64_t seed = 1;
  std::int64_t runs = 500;  // of each target, where no time is given
  std::vector<std::string> words{};
};

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto value = [&] { return i + 1 < argc ? std::stod(argv[++i]) : 0.0; };
    if (word == "--seconds") {
      arguments.seconds = value();
    } else if (word == "--seed") {
      arguments.seed = static_cast<std::uint64_t>(value());
    } else if (word == "--runs") {
      arguments.runs = static_cast<std::int64_t>(value());
    } else {
      arguments.words.push_back(word);
    }
  }
  return arguments;
}

int main_of(const Arguments& arguments) {
  std::map<std::string_view, std::int64_t> executions;
  const auto wanted = [&](const Target& target) {
    return arguments.words.empty() || arguments.words.front() == target.name;
  };
  if (arguments.words.size() == 2) {
    std::ifstream file(arguments.words[1], std::ios::binary);
    const std::string input{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    for (const auto& target : kTargets) {
      if (wanted(target)) run(target, input);
    }
    return 0;
  }
  std::map<std::string_view, Corpus> corpora;
  for (const auto& target : kTargets) {
    if (!wanted(target)) continue;
    corpora[target.name] = read_corpus(std::filesystem::path(GKA_FUZZ_CORPUS) / target.name);
    for (const auto& input : corpora[target.name]) run(target, input);
    executions[target.name] += static_cast<std::int64_t>(corpora[target.name].size());
  }
  using Clock = std::chrono::steady_clock;
  const auto end =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(arguments.seconds));
  auto seed = arguments.seed;
  do {
    for (const auto& target : kTargets) {
      if (!wanted(target)) continue;
      mutate(target, corpora[target.name], seed, arguments.runs);
      executions[target.name] += arguments.runs;
    }
    ++seed;
  } while (Clock::now() < end);
  for (const auto& [name, count] : executions)
    std::printf("%s: %lld inputs\n", std::string(name).c_str(), static_cast<long long>(count));
  return 0;
}

}  // namespace
}  // namespace gka::fuzz

int main(int argc, char** argv) {
  for (const int signal : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL, SIGPROF})
    std::signal(signal, gka::fuzz::on_signal);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_set_death_callback(gka::fuzz::keep_input);
#endif
  return gka::fuzz::main_of(gka::fuzz::parse(argc, argv));
}
