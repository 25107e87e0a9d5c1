// Checkpoints in the published layout: a folder with config.json and model.safetensors, or several files of weights
// with model.safetensors.index.json beside them. What is saved loads to the same bits, here and elsewhere.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "gka/types.h"
#include "models/decoder.h"
#include "models/safetensors.h"

namespace gka::models {

/// The tensors of a file by name.
using Shapes = std::map<std::string, std::vector<std::int64_t>>;

/// The tensors of a checkpoint folder, whatever number of files they lie in.
class Weights {
 public:
  explicit Weights(const std::filesystem::path& folder);

  std::vector<std::string> names() const;
  Shapes shapes() const;
  /// The type most of the numbers have.
  at::ScalarType usual_type() const;
  /// Of a model whose head is its embedding: throws where the files hold a head that is another matrix.
  void check_tied_head() const;
  bool has(const std::string& name) const { return file_of_.contains(name); }
  at::Tensor tensor(const std::string& name) const;
  /// The same as numbers, where it is stored as int8: a matrix of that shape.
  at::Tensor dense(const std::string& name, at::IntArrayRef shape) const;
  /// Tensors that are stored as int8.
  std::set<std::string> int8() const;
  /// Throws one sentence with the tensor's name where it holds NaN or infinities.
  void refuse_not_finite(const std::string& name) const;

 private:
  std::filesystem::path folder_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, std::size_t> file_of_;
};

inline constexpr std::int64_t kShardBytes = 5'000'000'000;

/// A tensor that is made when its turn to be written comes: all of them together may not fit memory.
struct PlannedTensor {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> shape;
  std::function<at::Tensor()> make;
  std::int64_t bytes() const;
};

/// In the order of names. Splits over files of at most `shard_bytes` (a tensor larger than that has a file to itself),
/// and removes the weights that an earlier save with another split left in the folder.
void write_weights(const std::filesystem::path& folder, std::vector<PlannedTensor> tensors,
                   std::int64_t shard_bytes = kShardBytes);

/// config.json of a model whose weights are of that type; for a hybrid also the line of Python that it names, by which
/// transformers opens the folder (with trust_remote_code) before anybody has imported gka.
void write_config(const std::filesystem::path& folder, const ModelConfig& config, at::ScalarType dtype,
                  bool int8 = false);

/// A parameter as it will be written: of `dtype`, or with `int8` a matrix in bytes with a scale for every 64 numbers.
PlannedTensor planned(const layers::Parameter& parameter, std::string name, at::ScalarType dtype, bool int8,
                      std::function<at::Tensor()> make);

/// What a parameter is called in a file: its own name, but for the sliding layers of a hybrid, which are published as
/// `swa`.
std::string stored_name(const ModelConfig& config, const std::string& parameter);

/// Which stored tensor each parameter is. One that is missing, of another shape, or that no parameter asks for throws
/// one sentence.
struct Match {
  const layers::Parameter* parameter;
  std::string stored;
};
/// `int8`: those stored as such, which a matrix may be.
std::vector<Match> match_weights(const Decoder& decoder, const Shapes& stored, const std::set<std::string>& int8 = {});

struct WeightsOptions {
  bool map = false;  // parameters of the type that is stored are the file's own pages, and no copy of them
  std::function<void(double fraction)> progress{};
};

/// Puts the weights of a folder into the parameters they match.
void load_weights(Decoder& decoder, const Weights& weights, const WeightsOptions& options = {});

/// How inference keeps projections, embedding and head. As stored: bfloat16 under float32 activations on the CPU stays
/// that, and so does int8; all else becomes the activations' type. int8 has a scale for every 64 numbers.
enum class WeightsAs : std::uint8_t { stored, float32, bfloat16, int8 };
inline constexpr std::array<NameTable<WeightsAs>, 4> kWeightsNames{{
    {"stored", WeightsAs::stored},
    {"float32", WeightsAs::float32},
    {"bfloat16", WeightsAs::bfloat16},
    {"int8", WeightsAs::int8},
}};
constexpr const auto& names_of(WeightsAs) { return kWeightsNames; }
/// By its name; "": as stored. `what` is the option's own name, for the sentence about a wrong one.
WeightsAs weights_named(const std::string& what, const std::string& name);
/// The type of the matrices (layers::ParameterOptions) for activations of `dtype`. Throws where a device has none.
at::ScalarType matrices_type(WeightsAs as, at::ScalarType stored, at::ScalarType dtype, at::Device device);

struct LoadOptions {
  at::Device device = at::kCPU;
  std::optional<at::ScalarType> dtype{};  // of the activations; else the type most of the weights have
  std::optional<WeightsAs> weights{};     // for inference; else they have the activations' type and are copied
  bool requires_grad = false;
  std::function<void(double fraction)> progress{};
  Warn warn{};  // else standard error
};

/// The folder's config.json; where a generation_config.json beside it names end tokens, those count, as in
/// transformers. Throws one sentence where the folder is not there or is no checkpoint.
ModelConfig load_config(const std::filesystem::path& folder, const Warn& warn = {});

/// Throws one sentence where the folder is not there, or holds no checkpoint that can be read.
Decoder load_model(const std::filesystem::path& folder, const LoadOptions& options = {});

struct SaveOptions {
  std::optional<at::ScalarType> dtype{};  // else the parameters' own
  bool int8 = false;                      // projections, embedding and head in bytes
  std::int64_t shard_bytes = kShardBytes;
};

/// Makes the folder where there is none. Every file is written beside and renamed, the configuration last.
void save_model(const Decoder& decoder, const std::filesystem::path& folder, const SaveOptions& options = {});

/// Beside a folder's tokenizer.json what transformers wants to know about it: tokenizer_config.json with the end token,
/// the longest text and the chat template, if any. Nothing where the folder has no tokenizer.json.
void write_tokenizer_config(const std::filesystem::path& folder, const ModelConfig& config,
                            const std::string& chat_template = {});

}  // namespace gka::models
