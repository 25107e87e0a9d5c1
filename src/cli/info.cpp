// `gka info`: what was built, what this machine can run, and which kernel a call takes and why.
#include <CLI/CLI.hpp>
#include <charconv>
#include <iomanip>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <vector>

#include "cli/commands.h"
#include "gka/info.h"

namespace gka::cli {
namespace {

using kernels::DType;
using Json = nlohmann::ordered_json;

std::string device_name(const CallInfo& call) {
  return call.device + (call.device_index != 0 ? ":" + std::to_string(call.device_index) : "");
}

/// What a call has that most have not.
std::string particulars(const CallInfo& call) {
  const CallInfo usual;
  std::string text;
  if (call.iterations != usual.iterations) text += ", " + std::to_string(call.iterations) + " iterations";
  if (call.part != usual.part) text += ", part " + std::string(name_of(call.part));
  if (!call.refine) text += ", not refined";
  if (call.report) text += ", with a report";
  return text;
}

/// Shown when no particular call is asked about.
std::vector<CallInfo> typical_calls() {
  return {
      CallInfo{},
      CallInfo{.dtype = DType::bfloat16},
      CallInfo{.dtype = DType::float64, .key_dim = 64, .value_dim = 64, .solver = Solver::exact},
      CallInfo{.gradient = Gradient::unrolled},
      CallInfo{.device = "cuda", .dtype = DType::bfloat16},
  };
}

Json describe_build() {
  return {
      {"version", version()}, {"compiler", GKA_COMPILER}, {"build_type", GKA_BUILD_TYPE}, {"torch", GKA_TORCH_VERSION}};
}

Json describe(const BackendInfo& backend) {
  return {
      {"name", backend.name}, {"built", backend.built}, {"available", backend.available}, {"detail", backend.detail}};
}

Json describe(const CallInfo& call) {
  const auto choice = choose_kernel(call);
  return {{"device", device_name(call)},
          {"dtype", name_of(call.dtype)},
          {"key_dim", call.key_dim},
          {"value_dim", call.value_dim},
          {"solver", name_of(call.solver)},
          {"gradient", name_of(call.gradient)},
          {"ridge_mode", name_of(call.ridge_mode)},
          {"iterations", call.iterations},
          {"ridge", call.ridge},
          {"part", name_of(call.part)},
          {"refine", call.refine},
          {"report", call.report},
          {"kernel", choice.kernel},
          {"reason", choice.reason}};
}

Json describe_all(const std::vector<CallInfo>& calls) {
  Json all{{"build", describe_build()}, {"backends", Json::array()}, {"calls", Json::array()}};
  for (const auto& backend : backends()) all["backends"].push_back(describe(backend));
  for (const auto& call : calls) all["calls"].push_back(describe(call));
  return all;
}

const char* readiness(const BackendInfo& backend) {
  if (!backend.built) return "not built";
  return backend.available ? "ready" : "cannot run";
}

void print(const std::vector<CallInfo>& calls) {
  std::cout << "gka " << version() << ", built by " << GKA_COMPILER << " (" << GKA_BUILD_TYPE << ") with torch "
            << GKA_TORCH_VERSION << "\n\nBackends\n"
            << std::left;
  for (const auto& backend : backends()) {
    std::cout << "  " << std::setw(11) << backend.name << std::setw(12) << readiness(backend) << backend.detail << "\n";
  }
  std::cout << "\nWhich kernel a call of gated_kalmanet takes\n";
  for (const auto& call : calls) {
    const auto choice = choose_kernel(call);
    std::cout << "  " << device_name(call) << ", " << name_of(call.dtype) << ", D " << call.key_dim << ", V "
              << call.value_dim << ", " << name_of(call.solver) << ", " << name_of(call.gradient) << " gradient, "
              << name_of(call.ridge_mode) << " ridge" << particulars(call) << "\n      "
              << (choice.kernel.empty() ? "no kernel" : choice.kernel) << ": " << choice.reason << "\n";
  }
}

/// An option that takes one of the names of `table`.
template <typename Table, typename Value>
CLI::Option* add_choice(CLI::App& app, const std::string& option, const Table& table, Value& value) {
  std::string names;
  for (const auto& [name, entry] : table) names += (names.empty() ? "" : ", ") + std::string(name);
  const auto set = [option, &table, names, &value](const std::string& text) {
    for (const auto& [name, entry] : table) {
      if (text == name) {
        value = entry;
        return;
      }
    }
    throw CLI::ValidationError(option, "got '" + text + "'; it takes one of " + names);
  };
  return app.add_option_function<std::string>(option, set, names)->type_name("NAME");
}

/// "cuda:1" is a type and an index.
void set_device(const std::string& text, CallInfo& call) {
  const auto colon = text.find(':');
  call.device = text.substr(0, colon);
  call.device_index = 0;
  if (colon == std::string::npos) return;
  const char *const first = text.data() + colon + 1, *const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(first, last, call.device_index);
  if (error != std::errc() || end != last || call.device_index < 0) {
    throw CLI::ValidationError("--device", "got '" + text + "'; it takes a type, or a type and a number as in cuda:1");
  }
}

struct Arguments {
  bool json = false;
  CallInfo call;
  std::vector<CLI::Option*> about_the_call;

  /// The call asked about, or the typical ones when no option describes one.
  std::vector<CallInfo> calls() const {
    for (const auto* option : about_the_call) {
      if (option->count() > 0) return {call};
    }
    return typical_calls();
  }
};

}  // namespace

Action declare_info(CLI::App& app) {
  const auto arguments = std::make_shared<Arguments>();
  auto& call = arguments->call;
  app.add_flag("--json", arguments->json, "Print JSON");

  arguments->about_the_call = {
      app.add_option_function<std::string>(
             "--device", [&call](const std::string& text) { set_device(text, call); },
             "cpu, cuda, cuda:1 or another device, as torch spells it")
          ->type_name("NAME"),
      add_choice(app, "--dtype", kernels::kDTypeNames, call.dtype),
      app.add_option("--key-dim", call.key_dim, "D, the width of q and k")->type_name("N"),
      app.add_option("--value-dim", call.value_dim, "V, the width of v")->type_name("N"),
      add_choice(app, "--solver", kSolverNames, call.solver),
      add_choice(app, "--gradient", kGradientNames, call.gradient),
      add_choice(app, "--ridge-mode", kRidgeModeNames, call.ridge_mode),
      app.add_option("--ridge", call.ridge, "the ridge a")->type_name("X"),
      app.add_option("--iterations", call.iterations, "steps of the solver")->type_name("N"),
      add_choice(app, "--part", kernels::kPartNames, call.part),
      app.add_flag("--refine,!--no-refine", call.refine, "Whether low-precision kernels may refine"),
      app.add_flag("--report", call.report, "As gated_kalmanet_report calls it"),
  };
  for (auto* option : arguments->about_the_call) option->group("Explain one call");

  app.footer(
      "Without a call to explain, a few typical ones are shown.\n"
      "In the environment GKA_CPU=portable|avx2|avx512 forces an instruction set,\n"
      "GKA_GPU=plain|hopper the kernels on a GPU. GKA_TRIAL=NAME,… lets kernels run\n"
      "that are on trial (docs/kernels.md).");

  return [arguments] {
    const auto calls = arguments->calls();
    if (arguments->json) {
      std::cout << describe_all(calls).dump(2) << "\n";
    } else {
      print(calls);
    }
    return 0;
  };
}

}  // namespace gka::cli
