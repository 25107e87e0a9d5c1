// One more token for each of many sequences: the model's step and its logits. On a GPU a step is recorded once for each
// size of batch (rounded up to a power of two; rows that belong to nobody work on a spare slot and page) and replayed.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "infer/pool.h"
#include "infer/recording.h"

namespace gka::infer {

struct Batch {
  std::vector<std::int64_t> ids{}, slots{}, positions{};
  std::vector<const Pages*> pages{};
  std::vector<std::int64_t> places{};      // in its pages; empty: the positions (layers::Inference)
  std::vector<std::int64_t> iterations{};  // of GKA's solver, each its own; empty: the model's own
  bool certainty = false;
  bool one_iterations = false;  // all have the same, and the model wants one number

  std::int64_t size() const { return static_cast<std::int64_t>(ids.size()); }
};

struct Stepped {
  at::Tensor logits;                  // [B,V]
  std::vector<at::Tensor> certainty;  // [B] per GKA layer
};

class Stepper {
 public:
  /// With `record`, to be made on the thread that steps (the recorder has a stream of its own).
  Stepper(const models::Decoder& decoder, const Pool& pool, bool record);

  /// With `ids`, int64 [B] on the model's device, in place of the batch's own.
  Stepped step(const Batch& batch, const at::Tensor& ids = {});

 private:
  struct Inputs {
    at::Tensor ids, slots, positions, places, pages, iterations;
  };
  struct Recording {
    Inputs inputs;
    at::Tensor logits;
    std::function<void()> play;  // from the second step of that size on
  };
  // Sequences, pages each, own places, own iterations.
  using Size = std::tuple<std::int64_t, std::int64_t, bool, bool>;

  Inputs inputs_of(const Batch& batch, std::int64_t rows, std::int64_t width) const;
  at::Tensor run(const Inputs& inputs, const layers::Inference& more) const;
  at::Tensor recorded(const Batch& batch, const at::Tensor& ids);

  const models::Decoder& decoder_;
  const Pool& pool_;
  std::unique_ptr<Recorder> recorder_;
  std::map<Size, Recording> recordings_;
};

}  // namespace gka::infer
