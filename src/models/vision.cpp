#include "models/vision.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/tensor.h>

#include <array>
#include <cmath>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "gka/errors.h"
#include "layers/functions.h"
#include "layers/sequences.h"
#include "models/decoder.h"
#include "models/vision_mixers.h"

namespace gka::models {
namespace {

constexpr double kStemEps = 1e-4, kNormEps = 1e-5, kMomentum = 0.1;
constexpr std::int64_t kKernel = 3;

/// Where a part adds what it learns, and what it notes.
struct Place {
  layers::Scope parameters, buffers;
  Place operator/(std::string_view name) const { return {parameters / name, buffers / name}; }
};

/// A 3×3 convolution, drawn as torch draws it: uniform within ±(inputs of an output)^−½.
class Conv {
 public:
  Conv(std::int64_t out, std::int64_t in, std::int64_t stride, bool bias, const layers::Scope& scope)
      : stride_(stride) {
    const double bound = 1.0 / std::sqrt(static_cast<double>(in * kKernel * kKernel));
    const auto init = layers::init::uniform(-bound, bound);
    weight_ = scope.add("weight", {out, in, kKernel, kKernel}, init);
    if (bias) bias_ = scope.add("bias", {out}, init, layers::WeightDecay::no);
  }

  at::Tensor forward(const at::Tensor& x) const {
    const auto type = x.scalar_type();
    const auto bias = bias_.defined() ? bias_.to(type) : at::Tensor();
    return at::conv2d(x, weight_.to(type), bias, stride_, /*padding=*/kKernel / 2);
  }

 private:
  std::int64_t stride_;
  at::Tensor weight_, bias_;
};

at::Tensor ones(std::string_view name, std::int64_t size, const layers::Scope& scope) {
  return scope.add(name, {size}, layers::init::constant(1), layers::WeightDecay::no);
}
at::Tensor zeros(std::string_view name, std::int64_t size, const layers::Scope& scope) {
  return scope.add(name, {size}, layers::init::constant(0), layers::WeightDecay::no);
}

class BatchNorm {
 public:
  BatchNorm(std::int64_t channels, double eps, const Place& place)
      : eps_(eps),
        weight_(ones("weight", channels, place.parameters)),
        bias_(zeros("bias", channels, place.parameters)),
        mean_(zeros("running_mean", channels, place.buffers)),
        variance_(ones("running_var", channels, place.buffers)) {}

  at::Tensor forward(const at::Tensor& x, bool training) const {
    return at::batch_norm(x, weight_, bias_, mean_, variance_, training, kMomentum, eps_,
                          at::globalContext().userEnabledCuDNN());
  }

 private:
  double eps_;
  at::Tensor weight_, bias_, mean_, variance_;
};

class LayerNorm {
 public:
  LayerNorm(std::int64_t channels, const layers::Scope& scope)
      : weight_(ones("weight", channels, scope)), bias_(zeros("bias", channels, scope)) {}

  at::Tensor forward(const at::Tensor& x) const {
    return at::layer_norm(layers::accumulate(x), weight_.sizes(), weight_, bias_, kNormEps).to(x.scalar_type());
  }

 private:
  at::Tensor weight_, bias_;
};

/// What a block adds to the stream: scaled by what it learns, and in training left out by chance, for each row of the
/// batch by itself (then what remains is larger, so that its mean is the same).
class Branch {
 public:
  Branch(std::string_view name, std::int64_t channels, const VisionConfig& config, double drop,
         const layers::Scope& scope)
      : drop_(drop) {
    if (config.layer_scale) {
      gamma_ = scope.add(name, {channels}, layers::init::constant(*config.layer_scale), layers::WeightDecay::no);
    }
  }

  /// `channels` is the dimension that gamma goes along.
  at::Tensor onto(const at::Tensor& x, at::Tensor y, std::int64_t channels, bool training) const {
    if (gamma_.defined()) {
      std::vector<std::int64_t> shape(static_cast<std::size_t>(y.dim()), 1);
      shape[static_cast<std::size_t>(channels)] = -1;
      y = y * gamma_.to(y.scalar_type()).view(shape);
    }
    if (!training || drop_ == 0) return x + y;
    std::vector<std::int64_t> shape(static_cast<std::size_t>(y.dim()), 1);
    shape[0] = y.size(0);
    return x + y * at::empty(shape, y.options().requires_grad(false)).bernoulli_(1 - drop_).div_(1 - drop_);
  }

 private:
  double drop_;
  at::Tensor gamma_;
};

class ConvBlock {
 public:
  ConvBlock(std::int64_t width, const VisionConfig& config, double drop, const Place& place)
      : conv1_(width, width, 1, /*bias=*/true, place.parameters / "conv1"),
        norm1_(width, kNormEps, place / "norm1"),
        conv2_(width, width, 1, /*bias=*/true, place.parameters / "conv2"),
        norm2_(width, kNormEps, place / "norm2"),
        branch_("gamma", width, config, drop, place.parameters) {}

  at::Tensor forward(const at::Tensor& x, bool training) const {
    const auto y = at::gelu(norm1_.forward(conv1_.forward(x), training), "tanh");
    return branch_.onto(x, norm2_.forward(conv2_.forward(y), training), /*channels=*/1, training);
  }

 private:
  Conv conv1_;
  BatchNorm norm1_;
  Conv conv2_;
  BatchNorm norm2_;
  Branch branch_;
};

class MixerBlock {
 public:
  MixerBlock(std::size_t level, std::int64_t block, const VisionConfig& config, double drop, const layers::Scope& scope)
      : MixerBlock(level, block, config, config.width(level), drop, scope) {}

  at::Tensor forward(const at::Tensor& x, const layers::Sequences& sequences, bool training) const {
    const auto mixed = mix_branch_.onto(x, mix(mix_norm_.forward(x), sequences), /*channels=*/2, training);
    const auto y = fc2_.forward(at::gelu(fc1_.forward(mlp_norm_.forward(mixed))));
    return mlp_branch_.onto(mixed, y, /*channels=*/2, training);
  }

 private:
  MixerBlock(std::size_t level, std::int64_t block, const VisionConfig& config, std::int64_t width, double drop,
             const layers::Scope& scope)
      : name_(scope.prefix() + "mixer"),
        mix_norm_(width, scope / "norm1"),
        mixer_(make_window_mixer(config, level, block, scope / "mixer")),
        mix_branch_("gamma_1", width, config, drop, scope),
        mlp_norm_(width, scope / "norm2"),
        fc1_(hidden(width, config), width, scope / "mlp" / "fc1"),
        fc2_(width, hidden(width, config), scope / "mlp" / "fc2"),
        mlp_branch_("gamma_2", width, config, drop, scope) {}

  static std::int64_t hidden(std::int64_t width, const VisionConfig& config) {
    return static_cast<std::int64_t>(static_cast<double>(width) * config.mlp_ratio);
  }

  at::Tensor mix(const at::Tensor& x, const layers::Sequences& sequences) const try {
    return mixer_->forward(x, sequences);
  } catch (const NotFiniteError& error) {
    throw LayerError(name_, error.what_without_backtrace(), /*was_not_finite=*/true);
  } catch (const c10::Error& error) {
    throw LayerError(name_, error.what_without_backtrace());
  }

  std::string name_;
  LayerNorm mix_norm_;
  std::unique_ptr<WindowMixer> mixer_;
  Branch mix_branch_;
  LayerNorm mlp_norm_;
  Affine fc1_, fc2_;
  Branch mlp_branch_;
};

std::int64_t windows_along(std::int64_t size, std::int64_t window) { return (size + window - 1) / window; }

}  // namespace

at::Tensor to_windows(const at::Tensor& map, std::int64_t window) {
  const auto height = map.size(2), width = map.size(3);
  const auto rows = windows_along(height, window), columns = windows_along(width, window);
  auto padded = map;
  if (rows * window != height || columns * window != width) {
    padded = at::constant_pad_nd(map, {0, columns * window - width, 0, rows * window - height});
  }
  return padded.unflatten(3, {columns, window})
      .unflatten(2, {rows, window})
      .permute({0, 2, 4, 3, 5, 1})  // [B, rows, columns, window, window, C]
      .flatten(3, 4)
      .flatten(0, 2);
}

at::Tensor from_windows(const at::Tensor& tokens, std::int64_t window, std::int64_t height, std::int64_t width) {
  const auto rows = windows_along(height, window), columns = windows_along(width, window);
  const auto map = tokens.unflatten(1, {window, window})
                       .unflatten(0, {-1, rows, columns})
                       .permute({0, 5, 1, 3, 2, 4})  // [B, C, rows, window, columns, window]
                       .flatten(4, 5)
                       .flatten(2, 3);
  return map.narrow(2, 0, height).narrow(3, 0, width);
}

class VisionModel::Level {
 public:
  /// `drops` has a rate for each block.
  Level(std::size_t level, const VisionConfig& config, const std::vector<double>& drops, const Place& place)
      : window_(config.window_sizes[level]) {
    const auto width = config.width(level);
    for (std::int64_t block = 0; block < config.depths[level]; ++block) {
      const auto here = place / "blocks" / std::to_string(block);
      const double drop = drops[static_cast<std::size_t>(block)];
      if (config.mixes(level)) {
        mixers_.emplace_back(level, block, config, drop, here.parameters);
      } else {
        convs_.emplace_back(width, config, drop, here);
      }
    }
    if (level + 1 < config.levels()) {
      downsample_.emplace(2 * width, width, 2, /*bias=*/false, place.parameters / "downsample" / "reduction" / "0");
    }
  }

  at::Tensor forward(at::Tensor x, bool training) const {
    for (const auto& block : convs_) x = block.forward(x, training);
    if (!mixers_.empty()) x = mix(x, training);
    return downsample_ ? downsample_->forward(x) : x;
  }

 private:
  at::Tensor mix(const at::Tensor& map, bool training) const {
    auto x = to_windows(map, window_);
    const auto sequences = layers::Sequences::rows(x.size(0), x.size(1), x.device());
    for (const auto& block : mixers_) x = block.forward(x, sequences, training);
    return from_windows(x, window_, map.size(2), map.size(3));
  }

  std::int64_t window_;
  std::vector<ConvBlock> convs_;
  std::vector<MixerBlock> mixers_;
  std::optional<Conv> downsample_;
};

struct VisionModel::Ends {
  Ends(const VisionConfig& c, const Place& stem)
      : conv0(c.in_dim, c.channels, c.stem_strides[0], /*bias=*/false, stem.parameters / "0"),
        norm0(c.in_dim, kStemEps, stem / "1"),
        conv1(c.dim, c.in_dim, c.stem_strides[1], /*bias=*/false, stem.parameters / "3"),
        norm1(c.dim, kStemEps, stem / "4") {}

  at::Tensor begin(const at::Tensor& pixels, bool training) const {
    const auto x = at::relu(norm0.forward(conv0.forward(pixels), training));
    return at::relu(norm1.forward(conv1.forward(x), training));
  }
  at::Tensor end(const at::Tensor& map, bool training) const {
    return head.forward(layers::accumulate(norm->forward(map, training)).mean({2, 3}));
  }

  Conv conv0;
  BatchNorm norm0;
  Conv conv1;
  BatchNorm norm1;
  std::optional<BatchNorm> norm;
  Affine head;
};

VisionModel::VisionModel(VisionConfig config, layers::ParameterOptions options)
    : config_(std::move(config)), parameters_(std::make_unique<layers::Parameters>(options)) {
  options.dtype = options.dtype == at::kDouble ? at::kDouble : at::kFloat;
  options.requires_grad = false;
  buffers_ = std::make_unique<layers::Parameters>(std::move(options));
  const Place root{*parameters_, *buffers_};
  ends_ = std::make_unique<Ends>(config_, root / "patch_embed" / "conv_down");

  const auto blocks = std::reduce(config_.depths.begin(), config_.depths.end());
  std::int64_t before = 0;
  for (std::size_t level = 0; level < config_.levels(); ++level) {
    std::vector<double> drops;
    for (std::int64_t i = 0; i < config_.depths[level]; ++i, ++before) {
      const auto last = static_cast<double>(std::max<std::int64_t>(1, blocks - 1));
      drops.push_back(config_.drop_path * static_cast<double>(before) / last);
    }
    levels_.emplace_back(level, config_, drops, root / "levels" / std::to_string(level));
  }
  const auto width = config_.width(config_.levels() - 1);
  ends_->norm.emplace(width, kNormEps, root / "norm");
  ends_->head = Affine(config_.classes, width, root.parameters / "head");
}

VisionModel::~VisionModel() = default;
VisionModel::VisionModel(VisionModel&&) noexcept = default;
VisionModel& VisionModel::operator=(VisionModel&&) noexcept = default;

at::Tensor VisionModel::pixels(const at::Tensor& images, at::ScalarType dtype) const {
  const std::array<std::int64_t, 3> wanted{config_.image_size[0], config_.image_size[1], config_.channels};
  if (images.dim() != 4 || images.sizes().slice(1) != at::IntArrayRef(wanted)) {
    throw std::invalid_argument("images must be [number, " + std::to_string(wanted[0]) + ", " +
                                std::to_string(wanted[1]) + ", " + std::to_string(wanted[2]) +
                                "]: height, width and channels of this model.");
  }
  const auto type = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const auto options = at::TensorOptions(type).device(device());
  const auto mean = at::tensor(config_.mean, at::TensorOptions(at::kDouble)).to(options);
  const auto deviation = at::tensor(config_.std, at::TensorOptions(at::kDouble)).to(options);
  const auto x = images.to(options).div(255).sub(mean).div(deviation);
  return x.permute({0, 3, 1, 2}).to(dtype);
}

at::Tensor VisionModel::forward(const at::Tensor& images, const VisionCall& call) const {
  auto x = ends_->begin(pixels(images, call.dtype.value_or(parameters_->options().dtype)), call.training);
  for (const auto& level : levels_) x = level.forward(x, call.training);
  return ends_->end(x, call.training);
}

std::int64_t count_parameters(const VisionConfig& config) {
  return VisionModel(config, {.device = at::kMeta}).parameters().count();
}

}  // namespace gka::models
