"""experiments/data/images.py: pictures and labels come out of packages and folders as they went in."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from safetensors import safe_open

numpy = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")
PROGRAM = Path(__file__).resolve().parents[2] / "experiments" / "data" / "images.py"
sys.path.insert(0, str(PROGRAM.parent))

import images  # noqa: E402
from packages import FetchError  # noqa: E402


def random_set(count: int, shape: tuple[int, ...], seed: int):
    draw = numpy.random.default_rng(seed)
    return draw.integers(0, 256, (count, *shape), numpy.uint8), draw.integers(0, 10, count)


def idx(array: numpy.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(numpy.uint8).tobytes()


def idx_files(sets: dict) -> dict[str, bytes]:
    files = {}
    for part, prefix in (("train", "train"), ("test", "t10k")):
        files[f"{prefix}-images-idx3-ubyte"] = idx(sets[part][0].squeeze(-1))
        files[f"{prefix}-labels-idx1-ubyte"] = idx(sets[part][1])
    return files


def npm_package(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            about = tarfile.TarInfo(f"package/{name}")
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))
    return path


def debian_package(path: Path, files: dict[str, bytes]) -> Path:
    root = path.parent / "deb"
    (root / "DEBIAN").mkdir(parents=True)
    about = "Package: p\nVersion: 1\nArchitecture: all\nMaintainer: nobody <a@b>\nDescription: d\n"
    (root / "DEBIAN" / "control").write_text(about)
    place = root / "usr" / "share" / "datasets"
    place.mkdir(parents=True)
    for name, data in files.items():
        (place / f"{name}.gz").write_bytes(gzip.compress(data))
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", root, path], check=True, capture_output=True)
    return path


def check_file(path: Path, pixels: numpy.ndarray, labels: numpy.ndarray, names: list[str]) -> None:
    """As any reader of safetensors sees it."""
    with safe_open(path, "numpy") as file:
        assert sorted(file.keys()) == ["images", "labels"]
        assert json.loads(file.metadata()["class_names"]) == names
        got, of = file.get_tensor("images"), file.get_tensor("labels")
    assert (got.dtype, of.dtype) == (numpy.uint8, numpy.int64)
    assert numpy.array_equal(got, pixels) and numpy.array_equal(of, labels)
    head = int.from_bytes(path.read_bytes()[:8], "little")
    assert head % 8 == 0, "what is eight bytes wide lies on a multiple of eight"


def small_mnist(out: Path) -> dict:
    sets = {"train": random_set(7, (5, 3, 1), 0), "test": random_set(3, (5, 3, 1), 1)}
    files = {f"data/{name}": data for name, data in idx_files(sets).items()}
    npm_package(out / "packages" / images.PACKAGES["mnist"].file, files)
    return sets


def test_mnist_comes_out_of_its_package_once_and_again_when_it_is_damaged(tmp_path, capsys):
    sets = small_mnist(tmp_path)
    about = images.make_packaged("mnist", tmp_path)
    for part, (pixels, labels) in sets.items():
        check_file(tmp_path / "mnist" / f"{part}.safetensors", pixels, labels, list("0123456789"))
        told = about["parts"][part]
        assert told["of_each_class"] == numpy.bincount(labels, minlength=10).tolist()
        assert told["mean"] == pytest.approx([pixels.mean() / 255], abs=1e-4)
        assert told["std"] == pytest.approx([pixels.std() / 255], abs=1e-4)
    assert (tmp_path / "mnist" / "sheet.png").stat().st_size > 100
    assert "mnist/train: 100%" in capsys.readouterr().err
    assert images.make_packaged("mnist", tmp_path) == json.loads(json.dumps(about))
    assert not capsys.readouterr().err, "what is there is kept"
    damaged = tmp_path / "mnist" / "test.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    images.make_packaged("mnist", tmp_path)
    check_file(damaged, *sets["test"], list("0123456789"))


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="no dpkg-deb")
def test_fashion_mnist_comes_out_of_its_package(tmp_path):
    sets = {"train": random_set(4, (6, 6, 1), 2), "test": random_set(2, (6, 6, 1), 3)}
    found = images.fashion(debian_package(tmp_path / "fashion.deb", idx_files(sets)))
    for part, (pixels, labels) in sets.items():
        assert numpy.array_equal(next(iter(found[part].images)), pixels)
        assert numpy.array_equal(found[part].labels, labels)


def test_a_row_of_cifars_pictures_is_a_picture_line_by_line(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "CIFAR_BATCH", 2)
    files, expected = {}, {}
    for part, names in (("train", [f"data_batch_{i}" for i in range(1, 6)]), ("test", ["test_batch"])):
        pixels, labels = random_set(2 * len(names), (32, 32, 3), 4)
        for i, name in enumerate(names):
            buffer = io.BytesIO()
            Image.fromarray(pixels[2 * i : 2 * i + 2].reshape(2, 1024, 3)).save(buffer, "png")
            files[f"{name}.png"] = buffer.getvalue()
        files[f"{part}_lables.json"] = json.dumps(labels.tolist()).encode()
        expected[part] = pixels, labels
    found = images.cifar10(npm_package(tmp_path / "cifar.tgz", files))
    for part, (pixels, labels) in expected.items():
        images.write_part(tmp_path / f"{part}.safetensors", found[part], images.SETS["cifar10"].class_names)
        check_file(tmp_path / f"{part}.safetensors", pixels, labels, list(images.SETS["cifar10"].class_names))


def test_arrays_that_are_cut_off_or_labelled_wrongly_are_refused(tmp_path):
    with pytest.raises(FetchError, match="labels holds no array of bytes"):
        images.idx(idx(numpy.zeros(4))[:-1], "labels")
    part = images.Part([numpy.zeros((2, 1, 1, 1), numpy.uint8)], numpy.array([0, 3]), (1, 1, 1))
    with pytest.raises(FetchError, match="labels are from 0 to 3, and there are 2 classes"):
        images.write_part(tmp_path / "part.safetensors", part, ("a", "b"))
    part = images.Part([numpy.zeros((1, 1, 1, 1), numpy.uint8)], numpy.array([0, 1]), (1, 1, 1))
    with pytest.raises(FetchError, match="there are 1 pictures and 2 labels"):
        images.write_part(tmp_path / "part.safetensors", part, ("a", "b"))
    assert list(tmp_path.iterdir()) == [], "nothing half-written"


def picture_folder(folder: Path) -> Path:
    for part in ("train", "val"):
        for i, name in enumerate(("apfel", "bäume")):
            (folder / part / name).mkdir(parents=True)
            picture = Image.new("RGB", (30, 20), (200, 10, 10) if i == 0 else (10, 200, 10))
            picture.paste((0, 0, 255), (0, 0, 2, 20))  # at the left margin, which a square in the middle does not have
            picture.save(folder / part / name / "1.PNG")
    return folder


def run(*words):
    return subprocess.run([sys.executable, PROGRAM, *map(str, words)], capture_output=True, text=True)


def test_a_folder_of_pictures_becomes_files_with_the_middle_of_each(tmp_path):
    folder = picture_folder(tmp_path / "fruit")
    done = run("--folder", folder, "--size", "10", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    pixels = numpy.stack([numpy.full((10, 10, 3), colour, numpy.uint8) for colour in ((200, 10, 10), (10, 200, 10))])
    for part in ("train", "test"):
        check_file(tmp_path / "out/fruit" / f"{part}.safetensors", pixels, [0, 1], ["apfel", "bäume"])
    done = run("--folder", folder, "--size", "6x9", "--grey", "--name", "grey", "--out", tmp_path / "out")
    assert done.returncode == 0 and "6×9×1" in done.stdout


def test_pictures_that_came_or_changed_are_read_and_what_is_none_is_told(tmp_path):
    folder, made = picture_folder(tmp_path / "fruit"), tmp_path / "out/fruit/train.safetensors"
    (folder / "train/apfel/.hidden").mkdir()
    Image.new("RGB", (9, 9)).save(folder / "train/apfel/.hidden/2.png")
    (folder / "train/.cache").mkdir()
    (folder / "train/apfel/about.txt").write_text("apples")

    def labels():
        done = run("--folder", folder, "--size", "4", "--out", tmp_path / "out")
        assert done.returncode == 0, done.stderr
        assert "about.txt left out: no pictures by their names" in done.stderr
        return safe_open(made, "numpy").get_tensor("labels").tolist()

    assert labels() == [0, 1], "what is hidden is no class and no picture"
    before = made.stat().st_mtime_ns
    assert labels() == [0, 1] and made.stat().st_mtime_ns == before, "nothing changed"
    Image.new("RGB", (9, 9)).save(folder / "train/apfel/2.webp")
    assert labels() == [0, 0, 1]
    Image.new("RGB", (9, 9), (0, 0, 200)).save(folder / "train/apfel/2.webp")
    assert labels() == [0, 0, 1]
    assert safe_open(made, "numpy").get_tensor("images")[1, 0, 0, 2] > 190


def test_pictures_in_16_bits_keep_their_greys(tmp_path):
    greys = numpy.linspace(0, 65535, 64).astype(numpy.uint16).reshape(8, 8)
    Image.fromarray(greys).save(tmp_path / "scan.png")
    for grey in (True, False):
        pixels = images.picture(tmp_path / "scan.png", (8, 8), grey)
        assert numpy.abs(pixels[..., 0].astype(int) - numpy.rint(greys / 257)).max() <= 1
    Image.fromarray(numpy.zeros((4, 4), numpy.float32)).save(tmp_path / "depth.tiff")
    with pytest.raises(FetchError, match=r"depth\.tiff is no picture that can be read .* 32 bits"):
        images.picture(tmp_path / "depth.tiff", (4, 4), True)


def test_pictures_that_cannot_be_used_are_one_sentence(tmp_path):
    folder = picture_folder(tmp_path / "fruit")
    (folder / "val" / "kirschen").mkdir()
    cases = [(folder, "kirschen is a class that"), (tmp_path, "has no folder train"), (tmp_path / "no", "is no folder")]
    for place, said in cases:
        done = run("--folder", place, "--out", tmp_path / "out")
        assert done.returncode == 1 and said in done.stderr and done.stderr.count("\n") == 1
    (folder / "val" / "kirschen").rmdir()
    (folder / "val" / "äpfel\n").mkdir()
    done = run("--folder", folder, "--out", tmp_path / "out")
    assert done.returncode == 1 and "characters that cannot be shown" in done.stderr and done.stderr.count("\n") == 1
    (folder / "val" / "äpfel\n").rmdir()
    (folder / "val" / "leer").mkdir()
    (folder / "train" / "leer").mkdir()
    done = run("--folder", folder, "--out", tmp_path / "out")
    assert done.returncode == 1 and "train/leer has no pictures" in done.stderr and done.stderr.count("\n") == 1
    (folder / "val" / "leer").rmdir()
    (folder / "train" / "leer").rmdir()
    (folder / "train" / "bäume" / "2.jpg").write_bytes(b"no picture")
    done = run("--folder", folder, "--out", tmp_path / "out")
    assert done.returncode == 1 and "2.jpg is no picture that can be read" in done.stderr.splitlines()[-1]
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    assert "there is no set 'imagenet'" in run("imagenet").stderr
