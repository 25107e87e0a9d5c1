// Files of models: weights and configurations.
#include <stdexcept>

#include "base/json.h"
#include "models/config.h"
#include "models/pattern.h"
#include "models/safetensors_header.h"
#include "targets.h"

namespace gka::fuzz {

int fuzz_safetensors(Bytes bytes) {
  return expect_sentence([&] {
    const auto text = text_of(bytes);
    const auto header = models::read_safetensors_header("x.safetensors", text);
    for (const auto& [name, tensor] : header.tensors) {
      const auto& type = models::kStoredTypes[tensor.type];
      const auto data = text.substr(header.data + tensor.begin, tensor.end - tensor.begin);
      if (data.size() != models::bytes_of(tensor.shape, type)) std::abort();
      models::all_finite(data, type);
    }
  });
}

int fuzz_config(Bytes bytes) {
  expect_sentence([&] { models::expand_pattern(text_of(bytes)); });
  return expect_sentence([&] {
    const auto json = parse_json(text_of(bytes), "config.json");
    const auto config = models::parse_checkpoint_config(json, "config.json", [](const std::string&) {});
    // What is written back says the same.
    const auto written = models::to_json(config).dump();
    const auto again =
        models::parse_checkpoint_config(parse_json(written, "written"), "written", [](const std::string&) {});
    if (models::to_json(again).dump() != written) std::abort();
  });
}

}  // namespace gka::fuzz
