"""The models of experiments/vision: one shape for each size, and what mixes tokens in it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path


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
    """A shape, the images it is for, and the recipe. All mixers have the same of each."""

    data: str
    shape: dict[str, object]
    epochs: int
    batch: int
    rate: float
    drop_path: float
    warmup: float = 0.1  # of the steps
    weight_decay: float = 0.05
    augment: str = "flip,crop"


FOUR = {"kinds": ["conv", "conv", "mixer", "mixer"]}
SIZES = {
    # 28×28 pictures: levels of 14×14 (convolutions), 7×7 and 4×4 (mixed: 49 and 16 tokens).
    "small": Size(
        "fashion",
        {"in_dim": 16, "dim": 16, "stem_strides": [1, 2], "depths": [1, 2, 2], "kinds": ["conv", "mixer", "mixer"],
         "heads": [1, 2, 4], "window_sizes": [1, 7, 4]},
        epochs=5, batch=128, rate=2e-3, drop_path=0.0, augment="flip",
    ),
    # For a card: 32×32 pictures, levels of 32×32 and 16×16 (convolutions), 8×8 and 4×4 (mixed: 64 and 16 tokens).
    "cifar": Size(
        "cifar10",
        {"in_dim": 32, "dim": 64, "stem_strides": [1, 1], "depths": [1, 2, 4, 2], **FOUR, "heads": [1, 2, 4, 8],
         "window_sizes": [1, 1, 8, 4]},
        epochs=60, batch=512, rate=1e-3, drop_path=0.1,
    ),
    "fashion": Size(
        "fashion",
        {"in_dim": 32, "dim": 64, "stem_strides": [1, 1], "depths": [1, 2, 4, 2], **FOUR, "heads": [1, 2, 4, 8],
         "window_sizes": [1, 1, 7, 4]},
        epochs=30, batch=512, rate=1e-3, drop_path=0.1,
    ),
    # The paper's GKAVision-T; its data is whatever --data has (images.py --folder makes it of ImageNet's pictures).
    "t": Size(
        "imagenet",
        {"in_dim": 32, "dim": 80, "stem_strides": [2, 2], "depths": [1, 3, 8, 4], **FOUR, "heads": [2, 4, 8, 16],
         "window_sizes": [8, 8, 14, 7]},
        epochs=300, batch=1024, rate=5e-4, drop_path=0.2,
    ),
}  # fmt: skip


def config(size: str, mixer: str, data: Path) -> dict[str, object]:
    """config.json of a model for the images of a folder that experiments/data/images.py made."""
    about = json.loads((data / "about.json").read_text())
    train = about["parts"]["train"]
    height, width, channels = train["shape"]
    return {
        "model_type": "gka_vision",
        "image_size": [height, width],
        "channels": channels,
        "classes": len(about["class_names"]),
        "class_names": about["class_names"],
        "mean": train["mean"],
        "std": [max(number, 1e-4) for number in train["std"]],  # pictures of one grey deviate by nothing
        **SIZES[size].shape,
        "drop_path": SIZES[size].drop_path,
        "mixer": MIXERS[mixer].mixer,
        "mixer_config": MIXERS[mixer].config,
    }
