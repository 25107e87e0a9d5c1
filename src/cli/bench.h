// What the benchmarks of `gka bench` share: times taken in turns, the machine's own rate, and torch's ways to compute
// attention.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "cli/commands.h"
#include "train/device.h"

namespace gka::cli {

Action declare_bench_train(CLI::App& app);
Action declare_bench_layer(CLI::App& app);
Action declare_bench_serve(CLI::App& app);

/// Where and in which type a benchmark computes, as `gka train` understands the names.
struct Place {
  std::string device = "auto", dtype = "auto";
};
void add_place(CLI::App& app, Place& place);
train::Compute choose_compute(const Place& place);

std::string_view name_of(at::ScalarType dtype);
/// The processor or GPU in words, and what the program was built with.
std::string describe_machine(at::Device device);

double median(std::vector<double> values);

/// The date here: 2026-11-18.
std::string today();

/// A row by itself, with what all rows have in common, on its way before the next is measured: what a limit of time
/// ends keeps what came before.
void print_line(Json setting, const Json& row);

/// Seconds that `work` takes, the device waited for before and after.
double seconds_of(at::Device device, const std::function<void()>& work);

/// FLOP/s of a large product of two matrices of that type: what utilisation is measured against.
double matrix_rate(at::Device device, at::ScalarType dtype);
/// Bytes/s that a copy of a large tensor reads and writes.
double copy_rate(at::Device device);

/// torch has several attention kernels and takes the first of an order that suits a call.
struct AttentionKernel {
  const char* name;
  std::vector<std::int64_t> order;  // of at::SDPBackend
};
void prefer(const AttentionKernel& kernel);
/// The one with which `work`, whose seconds it returns, is fastest; nothing on a CPU, which has but one.
std::optional<AttentionKernel> fastest_attention(at::Device device, const std::function<double()>& work);

/// The same for "auto"; otherwise the one of that name, untried.
std::optional<AttentionKernel> choose_attention(const std::string& name, at::Device device,
                                                const std::function<double()>& work);

/// Whether an error says that memory ran out.
bool is_out_of_memory(std::string_view error);

/// "4096,16384" or "4k,16k", as `option` got it: lengths in rising order.
std::vector<std::int64_t> parse_lengths(const std::string& text, const char* option = "--lengths");
/// 16,384.
std::string grouped(std::int64_t number);

}  // namespace gka::cli
