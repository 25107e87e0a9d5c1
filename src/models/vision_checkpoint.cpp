// Models for images as folders: config.json and model.safetensors, in which the norms' statistics lie beside what is
// learned.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/files.h"
#include "base/folders.h"
#include "models/checkpoint.h"
#include "models/checksums.h"
#include "models/config.h"
#include "models/matching.h"
#include "models/vision.h"

namespace gka::models {
namespace {

namespace fs = std::filesystem;

constexpr const char* kConfigName = "config.json";
constexpr std::string_view kBatches = ".num_batches_tracked";  // torch's norms store how many batches they have seen

/// Everything that is stored.
std::vector<const layers::Parameter*> tensors_of(const VisionModel& model) {
  std::vector<const layers::Parameter*> all;
  for (const auto* registry : {&model.parameters(), &model.buffers()}) {
    for (const auto& tensor : registry->all()) all.push_back(&tensor);
  }
  return all;
}

}  // namespace

void save_vision(const VisionModel& model, const fs::path& folder) {
  make_folder(folder);
  std::vector<PlannedTensor> planned;
  for (const auto* tensor : tensors_of(model)) {
    planned.push_back(
        {.name = tensor->name, .dtype = tensor->value.scalar_type(), .shape = tensor->shape, .make = [tensor] {
           return tensor->value.detach();
         }});
  }
  write_weights(folder, std::move(planned));
  write_text(folder / kConfigName, to_json(model.config()).dump(2) + "\n");
}

VisionConfig load_vision_config(const fs::path& folder) {
  if (!fs::exists(folder)) {
    throw std::runtime_error("there is no model '" + folder.string() + "': it is a model's folder or a training run");
  }
  if (!fs::is_directory(folder) || !fs::exists(folder / kConfigName)) {
    throw std::runtime_error(folder.string() + " is not a model: that is a folder with a " + kConfigName + " in it");
  }
  verify_if_listed(folder, Checked::model);
  const auto path = folder / kConfigName;
  return parse_vision_config(read_json(path), path.string());
}

void load_vision_weights(VisionModel& model, const fs::path& folder) {
  const at::NoGradGuard no_gradient;
  const Weights weights(folder);
  const auto stored = weights.shapes();
  std::vector<std::string> missing, others;
  const auto tensors = tensors_of(model);
  for (const auto* tensor : tensors) {
    const auto found = stored.find(tensor->name);
    if (found == stored.end()) {
      missing.push_back(tensor->name);
    } else if (found->second != tensor->shape) {
      refuse_shape(tensor->name, found->second, tensor->shape);
    }
  }
  refuse_missing(missing);
  for (const auto& [name, shape] : stored) {
    const bool known = model.parameters().find(name) != nullptr || model.buffers().find(name) != nullptr;
    if (!known && !name.ends_with(kBatches)) others.push_back(name);
  }
  refuse_others(others);
  for (const auto* tensor : tensors) {
    weights.refuse_not_finite(tensor->name);
    at::Tensor(tensor->value).copy_(weights.tensor(tensor->name));
  }
}

VisionModel load_vision(const fs::path& folder, at::Device device, at::ScalarType parameters) {
  VisionModel model(load_vision_config(folder), {.device = device, .dtype = parameters});
  load_vision_weights(model, folder);
  return model;
}

}  // namespace gka::models
