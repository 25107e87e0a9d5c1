"""Prepares pictures for models for images. Making data sets (experiments/data/images.py) and asking a model about one
picture (gka.vision) share this code, so both treat a picture alike."""

import os
from typing import Any

_MODES = {1: "L", 3: "RGB"}


def fitted(image: Any, size: tuple[int, int], channels: int) -> Any:
    """A picture of Pillow's, or the path of one, cut in its middle to the shape of ``size`` (height, width) and scaled
    to it: a picture of Pillow's with 8 bits and so many channels (transparency is dropped, 16 bits become 8).

    Raises:
        ValueError: one sentence that names the picture.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ImportError("pictures are read by Pillow; install it (pip install pillow)") from None
    if channels not in _MODES:
        raise ValueError(f"the model takes images of {channels} channels, and pictures have 1 or 3.")
    try:
        picture = Image.open(image) if isinstance(image, str | os.PathLike) else image
        upright = _in_8_bits(ImageOps.exif_transpose(picture)).convert(_MODES[channels])
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # what Pillow raises of files
        raise ValueError(f"{image} is no picture that can be read ({error}).") from None
    return ImageOps.fit(upright, size[::-1], Image.Resampling.BICUBIC)


def _in_8_bits(picture: Any) -> Any:
    """Pillow cuts wider numbers off at 255, so a scan or an X-ray in 16 bits would become white."""
    if picture.mode.startswith("I;16"):
        return picture.convert("I").point(lambda number: number * (1 / 257) + 0.5).convert("L")
    if picture.mode in ("I", "F"):
        raise ValueError(f"its pixels are of Pillow's kind {picture.mode}, 32 bits; pictures have 8 or 16")
    return picture
