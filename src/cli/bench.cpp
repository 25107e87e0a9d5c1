// `gka bench`: how fast this machine trains and answers. One file per benchmark.
#include "cli/bench.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <ctime>
#include <fstream>
#include <iostream>
#include <memory>
#include <stdexcept>

#include "gka/info.h"
#include "models/dtypes.h"

namespace gka::cli {
namespace {

struct Benchmark {
  const char* name;
  const char* summary;
  Action (*declare)(CLI::App& app);
};

constexpr std::array kBenchmarks{
    Benchmark{"train", "Tokens per second of training, side by side with the attention model of the same size",
              declare_bench_train},
    Benchmark{"serve", "Tokens per second of the engine, and over HTTP, beside what the machine's memory allows",
              declare_bench_serve},
    Benchmark{"layer", "Time of one layer of each kind, forward and backward, by sequence length", declare_bench_layer},
};

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(std::min(line.size(), line.find(':') + 2));
  }
  return "CPU";
}

/// The last part of what its backend says: the card.
std::string gpu() {
  for (const auto& backend : backends()) {
    const auto end = backend.detail.rfind("; ");
    if (backend.name == "cuda" && end != std::string::npos) return backend.detail.substr(end + 2);
  }
  return "GPU";
}

std::vector<AttentionKernel> attention_kernels() {
  const auto order = [](std::initializer_list<at::SDPBackend> backends) {
    std::vector<std::int64_t> numbers;
    for (const auto backend : backends) numbers.push_back(static_cast<std::int64_t>(backend));
    return numbers;
  };
  using enum at::SDPBackend;
  return {{"cuDNN", order({cudnn_attention, flash_attention, efficient_attention, math})},
          {"flash", order({flash_attention, cudnn_attention, efficient_attention, math})}};
}

}  // namespace

void add_place(CLI::App& app, Place& place) {
  app.add_option("--device", place.device, "auto, cpu, cuda or cuda:N; auto: the first GPU, or the CPU")
      ->capture_default_str();
  app.add_option("--dtype", place.dtype, "auto, float32, bfloat16 or float64; auto: bfloat16 on CUDA, else float32")
      ->capture_default_str();
}

train::Compute choose_compute(const Place& place) {
  // Through the training file's own reader, so that its errors are the same.
  const Json settings{
      {"model", Json::object()}, {"data", Json::object()}, {"length", 1},         {"batch_tokens", 1}, {"steps", 1},
      {"output", "none"},        {"device", place.device}, {"dtype", place.dtype}};
  return train::choose_compute(train::parse(settings));
}

std::string_view name_of(at::ScalarType dtype) { return models::name_of_dtype(dtype); }

std::string describe_machine(at::Device device) {
  const auto where = device.is_cpu() ? processor() + ", " + std::to_string(at::get_num_threads()) + " threads" : gpu();
  return where + ", torch " + GKA_TORCH_VERSION + ", gka " + version();
}

std::string today() {
  const auto now = std::time(nullptr);
  std::array<char, 16> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%d", std::localtime(&now));
  return text.data();
}

void print_line(Json setting, const Json& row) {
  setting.update(row);
  std::cout << setting.dump() << std::endl;
}

double median(std::vector<double> values) {
  if (values.empty()) throw std::logic_error("the median of nothing");
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  if (values.size() % 2 == 1) return *middle;
  return 0.5 * (*middle + *std::max_element(values.begin(), middle));
}

double seconds_of(at::Device device, const std::function<void()>& work) {
  train::wait_for(device);
  const auto start = std::chrono::steady_clock::now();
  work();
  train::wait_for(device);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double matrix_rate(at::Device device, at::ScalarType dtype) {
  const at::NoGradGuard no_gradients;
  const std::int64_t n = device.is_cpu() ? 1024 : 8192;
  const auto options = at::TensorOptions(device).dtype(dtype);
  // Random numbers: zeros draw less power and run faster than anything does.
  const auto a = at::randn({n, n}, options), b = at::randn({n, n}, options);
  std::vector<double> times;
  for (int i = 0; i < 13; ++i) {
    const auto time = seconds_of(device, [&] { at::mm(a, b); });
    if (i >= 3) times.push_back(time);
  }
  return 2 * static_cast<double>(n) * static_cast<double>(n) * static_cast<double>(n) / median(times);
}

double copy_rate(at::Device device) {
  const std::int64_t bytes = device.is_cpu() ? std::int64_t{1} << 28 : std::int64_t{1} << 31;
  const auto from = at::ones({bytes}, at::TensorOptions(device).dtype(at::kChar));
  auto to = at::zeros_like(from);
  std::vector<double> times;
  for (int i = 0; i < 8; ++i) {
    const auto time = seconds_of(device, [&] { to.copy_(from); });
    if (i >= 3) times.push_back(time);
  }
  return 2 * static_cast<double>(bytes) / median(times);
}

void prefer(const AttentionKernel& kernel) { at::globalContext().setSDPPriorityOrder(kernel.order); }

std::optional<AttentionKernel> fastest_attention(at::Device device, const std::function<double()>& work) {
  if (device.is_cpu()) return std::nullopt;
  work();  // torch settles its own order on the first call
  std::optional<AttentionKernel> fastest;
  double least = 0;
  for (const auto& kernel : attention_kernels()) {
    prefer(kernel);
    work();
    const auto seconds = work();
    if (!fastest || seconds < least) least = seconds, fastest = kernel;
  }
  return fastest;
}

std::optional<AttentionKernel> choose_attention(const std::string& name, at::Device device,
                                                const std::function<double()>& work) {
  if (name == "auto" || device.is_cpu()) return fastest_attention(device, work);
  const auto kernels = attention_kernels();
  const auto found = std::ranges::find_if(kernels, [&](const auto& kernel) { return name == kernel.name; });
  if (found == kernels.end()) throw std::invalid_argument("there is no attention kernel called '" + name + "'");
  prefer(*found);
  return *found;
}

bool is_out_of_memory(std::string_view error) {
  return error.find("out of memory") != std::string_view::npos ||
         error.find("allocate memory") != std::string_view::npos;
}

std::vector<std::int64_t> parse_lengths(const std::string& text, const char* option) {
  constexpr std::int64_t kMostTokens = std::int64_t{1} << 31;  // whose products with other sizes fit 64 bits
  std::vector<std::int64_t> lengths;
  for (std::size_t begin = 0; begin <= text.size();) {
    const auto end = std::min(text.find(',', begin), text.size());
    const auto word = text.substr(begin, end - begin);
    std::size_t read = 0;
    std::int64_t length = 0;
    try {
      length = std::stoll(word, &read);
    } catch (const std::exception&) {
    }
    const bool thousands = read + 1 == word.size() && (word[read] == 'k' || word[read] == 'K');
    if (length < 1 || length > kMostTokens || (read != word.size() && !thousands)) {
      throw std::runtime_error(std::string(option) + " got '" + word +
                               "'; it takes whole numbers up to 2^31, such as 4096,16384 or 4k,16k.");
    }
    lengths.push_back(thousands ? 1024 * length : length);
    begin = end + 1;
  }
  std::ranges::sort(lengths);
  lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
  return lengths;
}

std::string grouped(std::int64_t number) {
  auto text = std::to_string(number);
  for (auto place = static_cast<std::ptrdiff_t>(text.size()) - 3; place > 0; place -= 3) {
    text.insert(static_cast<std::size_t>(place), ",");
  }
  return text;
}

Action declare_bench(CLI::App& app) {
  app.require_subcommand(1);
  const auto chosen = std::make_shared<Action>();
  for (const auto& [name, summary, declare] : kBenchmarks) {
    auto* benchmark = app.add_subcommand(name, summary);
    benchmark->parse_complete_callback([chosen, action = declare(*benchmark)] { *chosen = action; });
  }
  return [chosen] { return (*chosen)(); };
}

}  // namespace gka::cli
