"""The models of experiments/vision: one shape for each size, and what mixes tokens in it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "vision"


@dataclass(frozen=True)
class Mixer:
    """`config` for heads of the paper's 16 channels, half of the width in all."""

    title: str
    mixer: str
    config: dict[str, object] = field(default_factory=dict)


HEADS = {"head_dim": 32, "expand_k": 0.5, "expand_v": 0.5, "conv_size": 3}
GKA = HEADS | {"beta_weight": "paper"}
MIXERS = {
    "gka": Mixer("Gated KalmaNet", "gka", GKA),
    "attention": Mixer("attention alone", "attention"),
    "mamba2": Mixer("Mamba2", "mamba2", {"expand": 1.0, "head_dim": 16, "state_size": 16, "conv_size": 3}),
    "gdn": Mixer("Gated DeltaNet", "gdn", HEADS),
    "gka-no-beta": Mixer("Gated KalmaNet without β", "gka", HEADS | {"use_beta_gate": False}),
    "mamba": Mixer("MambaVision's own", "mamba", {"state_size": 8, "conv_size": 3}),
}


@dataclass(frozen=True)
class Size:
    """A shape (one of configs/vision, with changes), the images it is for, and the recipe. All mixers have the same."""

    data: str
    shape: str
    epochs: int
    batch: int
    rate: float
    changes: dict[str, object] = field(default_factory=dict)
    warmup: float = 0.1  # of the steps
    weight_decay: float = 0.05
    label_smoothing: float = 0.1
    augment: str = "flip,crop"
    looks: int = 1  # at the test images, in an epoch


SIZES = {
    # For two cores and half an hour.
    "small": Size("fashion", "fashion", 1, 128, 2e-3, {"dim": 16}, augment="flip", looks=4),
    "fashion": Size("fashion", "fashion", 30, 256, 1e-3),
    "cifar": Size("cifar10", "cifar", 60, 512, 1e-3),
    "t": Size("imagenet", "t", 300, 1024, 5e-4),  # the paper's; its images are those of --data
}


def config(size: str, mixer: str, data: Path) -> dict[str, object]:
    """config.json of a model for the images of a folder that experiments/data/images.py made."""
    shape = json.loads((CONFIGS / f"{SIZES[size].shape}.json").read_text())
    about = json.loads((data / "about.json").read_text())
    train = about["parts"]["train"]
    height, width, channels = train["shape"]
    return shape | {
        "image_size": [height, width],
        "channels": channels,
        "classes": len(about["class_names"]),
        "class_names": about["class_names"],
        "mean": train["mean"],
        "std": [max(number, 1e-4) for number in train["std"]],  # pictures of one grey deviate by nothing
        "mixer": MIXERS[mixer].mixer,
        "mixer_config": MIXERS[mixer].config,
        **SIZES[size].changes,
    }
