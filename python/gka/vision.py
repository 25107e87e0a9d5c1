"""Models for images: MambaVision's shape with Gated KalmaNet, or one of its rivals, in place of its own mixer.

    model = gka.vision.load("run/")          # what `gka vision train` wrote, or VisionModel.save
    logits = model(images)                   # uint8 [N, H, W, C], or numbers from 0 to 1: [N, classes]
    model.classify("shoe.png")               # [("Sneaker", 0.93), …]
    model = gka.vision.VisionModel(config)   # a dict as in config.json (docs/vision.md), with new weights

Convolutions come first. Then the feature map is cut into square windows, each read pixel by pixel in raster order: by
the memory in the first half of a level's blocks, by attention in both directions in the second. This code is
independent of the C++ model, so that comparing the two is a test.
"""

import dataclasses
import inspect
import json
import math
import os
import types
import typing
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import _parts as parts
from . import nn as layers
from ._library import load_floors
from ._pictures import fitted
from .models import checkpoint_of

__all__ = ["Config", "VisionModel", "load"]

MODEL_TYPE = "gka_vision"
COUNTED = "num_batches_tracked"  # of torch's batch norms; no file needs it


@dataclasses.dataclass(frozen=True)
class Config:
    """config.json of a model for images, without its "model_type"."""

    image_size: tuple[int, ...]  #: height, width
    classes: int
    depths: tuple[int, ...]  #: blocks of each level
    kinds: tuple[str, ...]  #: of each level: conv, mixer
    heads: tuple[int, ...]  #: of attention, in each level
    window_sizes: tuple[int, ...]  #: side of the squares that are read by themselves, in each level
    channels: int = 3
    class_names: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()  #: of pixels / 255, per channel. Left out: 0
    std: tuple[float, ...] = ()  #: Left out: 1
    in_dim: int = 32  #: channels inside the stem
    dim: int = 80  #: of the first level; each further one has twice as many
    stem_strides: tuple[int, ...] = (2, 2)
    mlp_ratio: float = 4.0
    layer_scale: float | None = None  #: what the factors of residual branches begin with; None: there are none
    drop_path: float = 0.0  #: of the last block; the first has 0
    mixer: str = "gka"
    mixer_config: dict = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, given: object, where: str = "the configuration") -> "Config":
        """Raises ValueError, one sentence that begins with ``where``."""
        if not isinstance(given, dict):
            raise ValueError(f"{where} is no JSON object.")
        given = dict(given)
        kind = given.pop("model_type", MODEL_TYPE)
        if kind != MODEL_TYPE:
            raise ValueError(f"{where} is of a model of type {kind!r}, and this opens {MODEL_TYPE!r}.")
        fields = {field.name: field for field in dataclasses.fields(cls)}
        if unknown := sorted(set(given) - set(fields)):
            raise ValueError(f"{where} has a key {unknown[0]!r} that nobody knows; it takes {', '.join(fields)}.")
        for name, field in fields.items():
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if required and name not in given:
                raise ValueError(f"{where} has no {name!r}.")
        hints = typing.get_type_hints(cls)
        try:
            config = cls(**{name: _typed(name, value, hints[name]) for name, value in given.items()})
            config.check()
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        return config

    def check(self) -> None:
        positive = {name: getattr(self, name) for name in ("classes", "channels", "in_dim", "dim")}
        lists = ("image_size", "stem_strides", "depths", "heads", "window_sizes")
        positive |= {f"{name}[{i}]": value for name in lists for i, value in enumerate(getattr(self, name))}
        parts.whole_numbers(1, **positive)
        lengths = {"image_size": 2, "stem_strides": 2, "mean": self.channels, "std": self.channels}
        lengths |= dict.fromkeys(("kinds", "heads", "window_sizes"), len(self.depths)) | {"class_names": self.classes}
        for name, length in lengths.items():
            found = len(getattr(self, name))
            if found != length and not (found == 0 and name in ("mean", "std", "class_names")):
                raise ValueError(f"{name} has {found} entries; it takes {length}.")
        if not self.depths:
            raise ValueError("depths has no entry; it takes one for each level.")
        for kind in self.kinds:
            parts.one_of("kinds", kind, ("conv", "mixer"))
        for name, value in (("mlp_ratio", self.mlp_ratio), *(("std", value) for value in self.std)):
            if not value > 0:
                raise ValueError(f"{name} is {value}; it takes numbers above 0.")
        if not 0 <= self.drop_path < 1:
            raise ValueError(f"drop_path is {self.drop_path}; it takes a number of at least 0 and below 1.")
        parts.one_of("mixer", self.mixer, tuple(MIXERS))
        for level, kind in enumerate(self.kinds):
            if kind == "mixer" and self.width(level) % self.heads[level]:
                raise ValueError(
                    f"heads[{level}] is {self.heads[level]}, which does not divide the {self.width(level)} channels of "
                    "that level."
                )

    def width(self, level: int) -> int:
        return self.dim << level

    def attends(self, level: int, block: int) -> bool:
        """Whether a block has attention: the last half of a level's blocks do; of an odd number, the smaller half."""
        return block >= self.depths[level] - self.depths[level] // 2

    def name_of(self, label: int) -> str:
        return self.class_names[label] if self.class_names else str(label)

    def to_json(self) -> dict:
        return {"model_type": MODEL_TYPE, **dataclasses.asdict(self)}


def _typed(name: str, value: object, hint: object) -> object:
    """The value of a JSON file as its field has it: whole numbers, numbers, texts, lists of one of them."""
    if typing.get_origin(hint) is types.UnionType:
        return None if value is None else _typed(name, value, typing.get_args(hint)[0])
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} is {value!r}; it takes a list.")
        return tuple(_typed(f"{name}[{i}]", entry, typing.get_args(hint)[0]) for i, entry in enumerate(value))
    said = {int: "a whole number", float: "a number", str: "a text", dict: "a JSON object"}
    fits = isinstance(value, (int, float) if hint is float else hint) and not isinstance(value, bool)
    if not fits or (hint is float and not math.isfinite(value)):
        raise ValueError(f"{name} is {value!r}; it takes {said[hint]}.")
    return hint(value)


# ---- Mixers


class Attention(nn.Module):
    """Every token of a window sees every other. MambaVision's names."""

    def __init__(self, width: int, heads: int, **factory: object) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, **factory)
        self.proj = nn.Linear(width, width, **factory)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        o = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(o.transpose(1, 2).flatten(-2))


class MambaVisionMixer(nn.Module):
    """MambaVision's own mixer: a selective scan over half of the channels; the other half is only convolved.

    h ← e^{ΔA}h + ΔBx per channel, y = Ch + Dx. As published, the bias of Δ is added twice.
    """

    def __init__(self, width: int, *, state_size: int = 8, conv_size: int = 3, **factory: object) -> None:
        super().__init__()
        inner = parts.divided(width, 2, "its channels / 2")
        if conv_size % 2 == 0:
            raise ValueError(f"conv_size is {conv_size}; it takes an odd number, to see as far to either side.")
        self.state_size, self.rank = state_size, math.ceil(width / 16)
        self.in_proj = nn.Linear(width, width, bias=False, **factory)
        self.x_proj = nn.Linear(inner, self.rank + 2 * state_size, bias=False, **factory)
        self.dt_proj = nn.Linear(self.rank, inner, **factory)
        self.A_log, self.D = parts.fresh((inner, state_size), **factory), parts.fresh((inner,), **factory)
        for name in ("conv1d_x", "conv1d_z"):
            conv = nn.Conv1d(inner, inner, conv_size, padding="same", groups=inner, bias=False, **factory)
            self.add_module(name, conv)
        self.out_proj = nn.Linear(width, width, bias=False, **factory)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.A_log.copy_(torch.arange(1, self.state_size + 1, dtype=torch.float64).log().expand_as(self.A_log))
        self.D.fill_(1)
        nn.init.uniform_(self.dt_proj.weight, -(self.rank**-0.5), self.rank**-0.5)
        parts.reset_decay(torch.empty_like(self.D), self.dt_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        dtype = parts.wide(x)
        y, z = self.in_proj(x).transpose(1, 2).chunk(2, 1)
        y, z = (functional.silu(conv(half)).transpose(1, 2) for conv, half in ((self.conv1d_x, y), (self.conv1d_z, z)))
        step, b, c = self.x_proj(y).split([self.rank, self.state_size, self.state_size], -1)
        delta = functional.softplus((self.dt_proj(step) + self.dt_proj.bias).to(dtype))
        decay = torch.exp(delta.unsqueeze(-1) * -self.A_log.to(dtype).exp())  # [B, T, channels, state]
        written = (delta * y.to(dtype)).unsqueeze(-1) * b.to(dtype).unsqueeze(-2)
        state, answers = torch.zeros_like(written[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + written[:, t]
            answers.append((state * c[:, t, None].to(dtype)).sum(-1))
        o = torch.stack(answers, 1) + y.to(dtype) * self.D.to(dtype)
        return self.out_proj(torch.cat([o.to(x.dtype), z], -1))


class _Maker(typing.NamedTuple):
    """How a layer of gka.nn is asked for its heads: by their number and size, by their number alone, or not."""

    layer: type[nn.Module]
    counts: tuple[str, ...] = ()
    sized: bool = False

    def make(self, width: int, heads: int, options: dict, **factory: object) -> nn.Module:
        own = [name for name in inspect.signature(self.layer).parameters if name not in _GIVEN]
        if unknown := sorted(set(options) - set(own)):
            raise ValueError(f"mixer_config has a key {unknown[0]!r} that the mixer does not; it has {', '.join(own)}.")
        options = {name: value or None if name == "kv_proj_rank" else value for name, value in options.items()}
        sizes = []
        if self.sized:
            size = options.pop("head_dim", 0) or parts.divided(width, heads, "heads")
            heads = parts.divided(width, size, "head_dim")
            sizes = [size]
        counts = [options.pop(name, 0) or heads for name in self.counts]
        try:
            return self.layer(width, *sizes, *counts, **options, **factory)
        except TypeError as error:
            raise ValueError(f"mixer_config: {error}") from None


_GIVEN = ("hidden_size", "width", "device", "dtype", "unknown", "factory")
_GROUPED = ("num_q_heads", "num_k_heads", "num_v_heads")

#: What may stand in the first half of a level's blocks, by the name in ``mixer``.
MIXERS: dict[str, _Maker] = {
    "gka": _Maker(layers.GatedKalmaNet, _GROUPED, True),
    "gdn": _Maker(layers.GatedDeltaNet, _GROUPED, True),
    "mamba2": _Maker(layers.Mamba2),
    "deltanet": _Maker(layers.DeltaNet, ("num_heads",), True),
    "kda": _Maker(layers.KimiDeltaAttention, ("num_heads",), True),
    "mesa": _Maker(layers.MesaNet, ("num_heads",), True),
    "gla": _Maker(layers.GatedLinearAttention),
    "retnet": _Maker(layers.RetNet, ("num_heads",)),
    "linear_attn": _Maker(layers.LinearAttention, ("num_heads",)),
    "attention": _Maker(Attention, ("heads",)),
    "mamba": _Maker(MambaVisionMixer),
}


# ---- The model


def _dropped(x: Tensor, rate: float, training: bool) -> Tensor:
    """Drops the branch of some rows in training and scales up that of the others by as much."""
    if not training or rate == 0:
        return x
    kept = torch.rand(x.shape[0], *[1] * (x.dim() - 1), device=x.device) >= rate
    return x * kept.to(x.dtype) / (1 - rate)


def _scale(width: int, start: float | None, **factory: object) -> nn.Parameter | None:
    return None if start is None else nn.Parameter(torch.empty(width, **factory))


class ConvBlock(nn.Module):
    def __init__(self, width: int, drop_path: float, layer_scale: float | None, **factory: object) -> None:
        super().__init__()
        self.drop_path = drop_path
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, **factory)
        self.norm1 = nn.BatchNorm2d(width, eps=1e-5, **factory)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, **factory)
        self.norm2 = nn.BatchNorm2d(width, eps=1e-5, **factory)
        self.register_parameter("gamma", _scale(width, layer_scale, **factory))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.gelu(self.norm1(self.conv1(x)), approximate="tanh")
        y = self.norm2(self.conv2(y))
        y = y if self.gamma is None else y * self.gamma.view(-1, 1, 1)
        return x + _dropped(y, self.drop_path, self.training)


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, **factory: object) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden, **factory), nn.Linear(hidden, width, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(functional.gelu(self.fc1(x)))


class MixerBlock(nn.Module):
    """x += mixer(norm(x)); x += mlp(norm(x)); x [windows, tokens, width]."""

    def __init__(self, config: Config, level: int, block: int, drop_path: float, **factory: object) -> None:
        super().__init__()
        width, heads = config.width(level), config.heads[level]
        self.drop_path = drop_path
        self.norm1 = nn.LayerNorm(width, eps=1e-5, **factory)
        if config.attends(level, block):
            self.mixer = Attention(width, heads, **factory)
        else:
            self.mixer = MIXERS[config.mixer].make(width, heads, config.mixer_config, **factory)
        self.norm2 = nn.LayerNorm(width, eps=1e-5, **factory)
        self.mlp = Mlp(width, int(width * config.mlp_ratio), **factory)
        for name in ("gamma_1", "gamma_2"):
            self.register_parameter(name, _scale(width, config.layer_scale, **factory))

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mixer(self.norm1(x))
        mixed = mixed[0] if isinstance(mixed, tuple) else mixed  # the memories' states are of no further use
        x = x + _dropped(mixed if self.gamma_1 is None else mixed * self.gamma_1, self.drop_path, self.training)
        y = self.mlp(self.norm2(x))
        return x + _dropped(y if self.gamma_2 is None else y * self.gamma_2, self.drop_path, self.training)


def to_windows(x: Tensor, side: int) -> tuple[Tensor, tuple[int, int]]:
    """[N, C, H, W] -> [N · windows, side², C], zeros where the picture ends inside a window, and the size with them."""
    x = functional.pad(x, (0, -x.shape[-1] % side, 0, -x.shape[-2] % side))
    n, c, h, w = x.shape
    squares = x.view(n, c, h // side, side, w // side, side).permute(0, 2, 4, 3, 5, 1)
    return squares.reshape(-1, side * side, c), (h, w)


def from_windows(x: Tensor, side: int, size: tuple[int, int]) -> Tensor:
    """Back to [N, C, H, W]."""
    h, w = size
    squares = x.view(-1, h // side, w // side, side, side, x.shape[-1]).permute(0, 5, 1, 3, 2, 4)
    return squares.reshape(squares.shape[0], squares.shape[1], h, w)


class Level(nn.Module):
    def __init__(self, config: Config, level: int, drop_paths: list[float], **factory: object) -> None:
        super().__init__()
        width = config.width(level)
        self.window = config.window_sizes[level] if config.kinds[level] == "mixer" else 0
        self.blocks = nn.ModuleList(
            MixerBlock(config, level, block, rate, **factory)
            if self.window
            else ConvBlock(width, rate, config.layer_scale, **factory)
            for block, rate in enumerate(drop_paths)
        )
        self.downsample = None
        if level + 1 < len(config.depths):
            half = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False, **factory)
            self.downsample = nn.Module()
            self.downsample.reduction = nn.Sequential(half)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        if self.window:
            x, size = to_windows(x, self.window)
        for block in self.blocks:
            x = block(x)
        if self.window:
            x = from_windows(x, self.window, size)[..., :height, :width]
        return x if self.downsample is None else self.downsample.reduction(x)


class VisionModel(nn.Module):
    """Stem, levels, a batch norm, the mean over the picture, a linear head. Parameters have MambaVision's names.

    Args:
        config: as in config.json, a dict, or a :class:`Config`.
        device, dtype: of the parameters.
    """

    def __init__(
        self, config: dict | Config, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = c = config if isinstance(config, Config) else Config.read(config)
        factory = {"device": device, "dtype": dtype}
        self.patch_embed = nn.Module()
        self.patch_embed.conv_down = nn.Sequential(
            nn.Conv2d(c.channels, c.in_dim, 3, c.stem_strides[0], 1, bias=False, **factory),
            nn.BatchNorm2d(c.in_dim, eps=1e-4, **factory),
            nn.ReLU(),
            nn.Conv2d(c.in_dim, c.dim, 3, c.stem_strides[1], 1, bias=False, **factory),
            nn.BatchNorm2d(c.dim, eps=1e-4, **factory),
            nn.ReLU(),
        )
        rates = [c.drop_path * i / max(1, sum(c.depths) - 1) for i in range(sum(c.depths))]
        of_levels = [[rates.pop(0) for _ in range(depth)] for depth in c.depths]
        self.levels = nn.ModuleList(Level(c, i, of_level, **factory) for i, of_level in enumerate(of_levels))
        width = c.width(len(c.depths) - 1)
        self.norm = nn.BatchNorm2d(width, eps=1e-5, **factory)
        self.head = nn.Linear(width, c.classes, **factory)
        for name in ("mean", "std"):
            self.register_buffer(f"pixel_{name}", torch.empty(c.channels, **factory), persistent=False)
        self._begin()

    def reset_parameters(self) -> None:
        """Draws new weights: matrices normal(0.02) cut at two, convolutions as torch's, memories as in their layers."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Conv1d | nn.BatchNorm2d | nn.LayerNorm):
                module.reset_parameters()
        self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        """All that torch's own modules did not draw when they were made."""
        given = ((self.pixel_mean, self.config.mean, 0.0), (self.pixel_std, self.config.std, 1.0))
        for numbers, values, otherwise in given:
            for channel in range(self.config.channels):
                numbers[channel] = values[channel] if values else otherwise
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, layers.Mixer | MambaVisionMixer):
                module.reset_parameters()
        for name, parameter in self.named_parameters():
            if name.split(".")[-1] in ("gamma", "gamma_1", "gamma_2"):
                parameter.fill_(self.config.layer_scale)
            if parameter.dim() <= 1:
                parameter._no_weight_decay = True

    def forward(self, images: Tensor) -> Tensor:
        """Pixels uint8 [N, H, W, C], or the same as numbers from 0 to 1 -> logits [N, classes]."""
        x = self.patch_embed.conv_down(self._normalised(images))
        for level in self.levels:
            x = level(x)
        return self.head(self.norm(x).mean((-2, -1)))

    def _normalised(self, images: Tensor) -> Tensor:
        if not isinstance(images, Tensor):
            raise TypeError(f"images takes a tensor [N, H, W, C], got {type(images).__name__}.")
        shape = (*self.config.image_size, self.config.channels)
        whole = images.dtype == torch.uint8
        if images.dim() != 4 or images.shape[1:] != shape or not (whole or images.is_floating_point()):
            raise ValueError(
                f"images takes [N, {', '.join(map(str, shape))}] in uint8, or floats from 0 to 1, "
                f"got {images.dtype} of shape {list(images.shape)}."
            )
        x = images.to(self.pixel_mean.dtype)
        x = ((x / 255 if whole else x) - self.pixel_mean) / self.pixel_std
        return x.permute(0, 3, 1, 2).contiguous()

    @torch.no_grad()
    def classify(self, image: object, top: int = 5) -> list[tuple[str, float]]:
        """The likeliest classes of one image with their probabilities, likeliest first.

        Args:
            image: pixels [H, W, C] (or [H, W] of one channel) in uint8, or floats from 0 to 1, a tensor or an array;
                or a picture of Pillow's, or the path of one, which is cut in the middle and scaled to the model's size.
        """
        pixels = self._pixels(image).to(self.pixel_mean.device)
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            probabilities = self(pixels.unsqueeze(0))[0].float().softmax(-1)
        finally:
            for module, mode in modes:
                module.training = mode
        likeliest = probabilities.topk(min(top, self.config.classes))
        names = (self.config.name_of(label) for label in likeliest.indices.tolist())
        return list(zip(names, likeliest.values.tolist(), strict=True))

    def _pixels(self, image: object) -> Tensor:
        if isinstance(image, str | os.PathLike) or hasattr(image, "convert"):
            return _picture(image, self.config)
        pixels = torch.as_tensor(image)
        if pixels.is_floating_point() and not ((pixels >= 0) & (pixels <= 1)).all():
            raise ValueError(
                f"image has numbers from {pixels.min():g} to {pixels.max():g}; floats are from 0 to 1, and whole "
                "numbers from 0 to 255 take uint8."
            )
        return pixels.unsqueeze(-1) if pixels.dim() == 2 else pixels

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes a folder that :func:`load` and `gka vision` open."""
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        weights = {name: tensor for name, tensor in weights.items() if not name.endswith(COUNTED)}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config.to_json(), indent=2) + "\n")
        load_floors()
        torch.ops.gka.write_checksums(os.fspath(folder))


def _picture(image: object, config: Config) -> Tensor:
    picture = fitted(image, config.image_size, config.channels)
    return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(*config.image_size, config.channels)


# ---- Files


def _read_config(folder: Path) -> Config:
    path = folder / "config.json"
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} has no config.json, so it holds no model.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}).") from None
    if isinstance(given, dict) and given.get("model_type") != MODEL_TYPE:
        raise ValueError(f"{path} is of a model of type {given.get('model_type')!r}, and this opens {MODEL_TYPE!r}.")
    return Config.read(given, str(path))


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError("weights are read by safetensors; install it (pip install safetensors)") from None
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it has no iterator)
    except FileNotFoundError:
        raise ValueError(f"{path.parent} has no model.safetensors.") from None
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is damaged, or no safetensors file ({error}).") from None


def _check(path: Path, expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Requires every tensor of the model, with its shape and finite, and no other tensor."""
    if missing := sorted(set(expected) - set(found)):
        raise ValueError(f"{path} has no tensor {missing[0]!r}, which the model of its config.json needs.")
    if left := sorted(set(found) - set(expected)):
        raise ValueError(f"{path} has a tensor {left[0]!r} that the model of its config.json has no place for.")
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape:
            shapes = f"{list(tensor.shape)}, and the model's is {list(expected[name].shape)}"
            raise ValueError(f"{path}: the shape of {name!r} is {shapes}.")
        if not tensor.is_floating_point():
            raise ValueError(f"{path}: {name!r} holds {tensor.dtype}; weights are floats.")
        if not tensor.isfinite().all():
            raise ValueError(f"{path}: {name!r} has numbers that are not finite.")


def load(
    folder: str | os.PathLike[str], *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> VisionModel:
    """The model of a folder or of a training run, ready to classify (``model.train()`` to train it further).

    Without ``dtype`` it has the file's own type.

    Raises:
        ValueError: one sentence, if the folder holds no complete model for images.
    """
    folder = checkpoint_of(folder)
    load_floors()
    try:
        torch.ops.gka.verify_model(os.fspath(folder))
    except RuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from None
    config = _read_config(folder)
    path = folder / "model.safetensors"
    weights = {name: tensor for name, tensor in _read_weights(path).items() if not name.endswith(COUNTED)}
    try:
        model = VisionModel(config, device=device)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None
    _check(path, {k: v for k, v in model.state_dict().items() if not k.endswith(COUNTED)}, weights)
    model.to(dtype=dtype or weights["head.weight"].dtype)
    model.load_state_dict(weights, strict=False)  # what is missing are the counts
    return model.eval()
