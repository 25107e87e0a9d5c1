// Where training takes its batches from: token files, a synthetic task or a mixture of such, named by a small JSON
// object.
//
//   {"kind": "tokens", "files": ["a.tokens", {"path": "b.tokens", "weight": 2}], "seed": 0,
//    "packed": false, "eval_fraction": 0.01}
//   {"kind": "task", "task": "mqar", "seed": 0, "vocab_size": 512, "sizes": [{"tokens": 64, "pairs": 4}, …]}
//   {"kind": "mixture", "seed": 0, "sources": [{"weight": 9, "kind": "tokens", …}, {"weight": 1, "kind": "task", …}]}
//
// What a source hands out depends on its configuration and its position alone, so the position, one integer, is all a
// checkpoint has to keep. An unknown key is an error that names the nearest known one. docs/data.md lists all keys.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "data/accuracy.h"

namespace gka::data {

struct Batch {
  at::Tensor inputs;      // int64 [B,T] on the CPU; packed: [1, B·T]
  at::Tensor targets;     // int64, the same shape: the token to predict, kIgnoredLabel (−100) where there is no loss
  at::Tensor cu_seqlens;  // int32 [N+1] where packed, undefined otherwise
};

class Source {
 public:
  virtual ~Source() = default;

  /// The next `batch` sequences of `tokens` tokens. A task makes sequences of its own sizes, one size per batch, and
  /// ignores `tokens`, so inputs.size(1) is the length that counts.
  virtual Batch next(std::int64_t batch, std::int64_t tokens) = 0;

  /// Sequences handed out so far. With the same batch and tokens per call, seeking to it later continues with the very
  /// same batches.
  virtual std::int64_t position() const = 0;
  virtual void seek(std::int64_t position) = 0;

  /// Sequences of that length before everything was seen once; 0: it never ends.
  virtual std::int64_t epoch(std::int64_t tokens) const = 0;

  /// Every token is below it.
  virtual std::int64_t vocab_size() const = 0;

  /// The longest sequence a batch can have when asked for `tokens`. Throws where what is trained on has too few
  /// tokens for one.
  virtual std::int64_t longest(std::int64_t tokens) const = 0;

  /// One line for a log: "tokens: 2 files, 1.2M tokens, 345 documents (train split)".
  virtual std::string describe() const = 0;
};

/// Training and evaluation never share a sequence: token files are cut in two by eval_fraction, tasks draw from another
/// stream.
enum class Split : std::uint8_t { train, eval };

/// Whether token files are read through once to compare them with their checksums (see TokenFile::verify_once).
enum class Verify : std::uint8_t { no, yes };

/// Throws std::runtime_error (one sentence) for an unknown key, a missing file, a wrong value, a damaged file.
std::unique_ptr<Source> open_source(const nlohmann::ordered_json& config, Split split = Split::train,
                                    Verify verify = Verify::yes);

/// `predicted` int64: one token per target that is not kIgnoredLabel, in the order of the batch, or a tensor of the
/// shape of the targets.
Accuracy accuracy(const at::Tensor& predicted, const at::Tensor& targets);

}  // namespace gka::data
