"""Hybrids, and what a longer context is worth: models of one kind of layer beside one with a little attention.

short   15 blocks of GKA, of attention, of Gated DeltaNet, of Mamba2 (32), GKA without α, and GKA with attention at
        blocks 3, 7, 11 and 14, trained and measured as experiments/lm does it
long    each goes on at eight times the length (16K) with long documents, a tenth of them in the form of RULER's tasks
        (needles.py); then RULER itself from 1K to 32K (ruler.py), with and without S-NIAH-1

  list, run, merge, report   as in experiments/lm. A long run begins with the weights of its short one, so both are done
  on one machine: --only a few models at a time, and the same --out.

  run.py run --only gka hybrid --device cuda --budget 540 --data /root/lm/data --out /root/hybrids
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "experiments" / name) for name in ("", "lm")]

import measure  # noqa: E402
import needles  # noqa: E402
import ruler  # noqa: E402
import trials  # noqa: E402
from console import read_lines, run_program  # noqa: E402
from pack import tokenise  # noqa: E402
from sizes import SIZES, common  # noqa: E402
from sweep import PROGRAM, Results, Run  # noqa: E402

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.jsonl"
TIMES = 8  # as long, the second stage
LONG = ("rfc", "gcide", "prose", "code")  # sources with long documents
NEEDLES = 0.1  # of the second stage's tokens
LONG_TOKENS = 30_000_000
LONG_RATE = 0.3  # of the first stage's rate
LONG_THETA = 200_000.0  # of the rotary embedding in the second stage; 10,000 in the first


@dataclass(frozen=True)
class Model:
    title: str
    pattern: str
    choices: dict[str, object] = field(default_factory=dict)
    like: str = "gka"  # the layer whose speed is guessed
    rate: float = 4e-3  # what experiments/lm chose for its layer at 12M


MODELS = {
    "gka": Model("GKA", "15xGKA"),
    "hybrid": Model("GKA, attention at 3, 7, 11, 14", "3x(3xGKA-*)-2xGKA-*"),
    "attention": Model("attention", "15x*", like="attention", rate=2e-3),
    "gdn": Model("Gated DeltaNet", "15xGDN", {"gdn_config": {"expand_v": 2.0}}),
    "mamba2": Model("Mamba2", "32xM2", like="mamba2"),
    "gka-no-alpha": Model("GKA without α", "15xGKA", {"gka_config": {"use_alpha_connection": False}}),
}


def config(options: argparse.Namespace, name: str, length: int) -> dict[str, object]:
    model = MODELS[name]
    shape = common(options.size, trials.vocabulary_of(options)) | {"hybrid_override_pattern": model.pattern}
    if name == "gdn":  # values twice as wide, so a smaller MLP
        shape["intermediate_size"] = SIZES[options.size].fitted["gdn"]
    shape |= model.choices
    for layer in ("gka", "gdn"):
        if options.eps and layer.upper() in model.pattern:
            shape[f"{layer}_config"] = shape.get(f"{layer}_config", {}) | {"norm_eps": options.eps}
    return shape | {"max_position_embeddings": length}


def short(options: argparse.Namespace, name: str) -> Run:
    tokens, rate = options.tokens or SIZES[options.size].tokens, options.rate or MODELS[name].rate
    model = config(options, name, SIZES[options.size].length)
    begun = f"-eps{options.eps:g}" if options.eps else ""
    begun += f"-out{options.first_output:g}" if options.first_output != 1 else ""
    last = "out_proj.weight" if name == "mamba2" else "o_proj.weight"
    return Run(
        name=f"{options.size}-{name}{begun}-{tokens / 1e6:g}M-lr{rate:g}-short",
        tags={
            "size": options.size,
            "model": name,
            "corpus": options.corpus,
            "rate": rate,
            "stage": "short",
            "eps": options.eps,
            "first_output": options.first_output,
        },
        settings={"model": model} | trials.recipe(options, tokens, rate, seed=0),
        alike=f"{options.size}-{name}-short",
        speed=0.8 * trials.guessed_speed(options.size, MODELS[name].like),
        measured=True,
        scales={last: options.first_output} if options.first_output != 1 else {},
    )


def long_data(options: argparse.Namespace) -> dict[str, object]:
    """Long documents in proportion to what there is of them, and the share of needles."""
    tokens = Path(options.data) / "tokens"
    files: list[Path] = [path for source in LONG for path in sorted(tokens.glob(f"{source}.[0-9].tokens"))]
    sizes = [measure.read_header(path)["tokens"] for path in files]
    weighted = [
        {"path": str(path.resolve()), "weight": (1 - NEEDLES) * size / sum(sizes)}
        for path, size in zip(files, sizes, strict=True)
    ]
    weighted.append({"path": str((tokens / "needles.tokens").resolve()), "weight": NEEDLES})
    return {"kind": "tokens", "files": weighted, "eval_fraction": 0.02}


def long(options: argparse.Namespace, name: str) -> Run:
    first = short(options, name)
    size = SIZES[options.size]
    length = TIMES * size.length
    batch = max(length, size.batch_tokens)
    steps = max(1, options.long_tokens // batch)
    changed = {"data": long_data(options), "length": length, "batch_tokens": batch, "steps": steps, "eval_batches": 2,
               "learning_rate": LONG_RATE * first.tags["rate"], "eval_every": steps}  # fmt: skip
    return Run(
        name=first.name.removesuffix("short") + f"{options.long_tokens / 1e6:g}M-long",
        tags=first.tags | {"stage": "long"},
        settings=first.settings | {"model": config(options, name, length) | {"rope_theta": LONG_THETA}} | changed,
        alike=f"{options.size}-{name}-long",
        speed=first.speed / (2 if name == "attention" else 1),
        measured=True,
        start_from=first.name,
    )


def plan(options: argparse.Namespace) -> Iterator[Run]:
    """A model's second stage right after its first: the machine may be gone later."""
    for name in options.only:
        yield short(options, name)
        if options.long_tokens:
            yield long(options, name)


def with_weights(options: argparse.Namespace, results: Results) -> Results:
    """Without first stages whose weights a second one still waits for, and which are on another machine."""
    lost = {
        run.start_from
        for run in plan(options)
        if run.start_from and run.name not in results and not (Path(options.out) / "runs" / run.start_from).exists()
    }
    return {name: result for name, result in results.items() if name not in lost}


# ---- RULER


def ruler_scores(options: argparse.Namespace, folder: Path, where: list[str]) -> dict[str, dict[str, object]]:
    """By task and length, RULER's own metric in percent, and each item's depth and score."""
    files = sorted((Path(options.data) / "ruler").glob("*.jsonl"))
    if not files:
        return {}
    longest = max(int(file.stem.rsplit("-", 1)[1]) for file in files)
    with tempfile.TemporaryDirectory() as place:
        samples = Path(place) / "samples.jsonl"
        command = [PROGRAM, "eval", str(folder), "--tasks", *map(str, files), "--limit", str(options.samples)]
        command += ["--max-length", str(longest + 256), "--samples", str(samples), "--batch", "16", "--json", *where]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"hybrids: gka eval: {done.stderr.strip()[-500:]}")
        answers = list(map(json.loads, read_lines(samples)))
    items = {file.stem: list(map(json.loads, read_lines(file)[1:])) for file in files}
    found: dict[str, dict[str, object]] = {}
    for answer in answers:
        item = items[answer["task"]][answer["item"]]
        score = ruler.counted(answer["task"], answer["text"], item["answers"])
        found.setdefault(answer["task"], {"items": []})["items"].append([round(ruler.depth(item), 3), round(score, 3)])
    for one in found.values():
        one["score"] = 100 * sum(score for _, score in one["items"]) / len(one["items"])
    return found


class Measure(trials.Measure):
    def __call__(self, run: Run, folder: Path) -> dict[str, object]:
        if run.tags["stage"] == "short":
            return super().__call__(run, folder)
        return {"ruler": ruler_scores(self.options, folder, self.where())}


def make_needles(options: argparse.Namespace) -> None:
    """Training documents in RULER's form, once a machine."""
    data = Path(options.data)
    if (data / "tokens" / "needles.tokens").exists() or not options.long_tokens:
        return
    if not any((data / "ruler").glob("*.jsonl")):
        raise SystemExit(f"hybrids: {data / 'ruler'} has no tasks; ruler.tar has them (README.md)")
    folder = data / "needles"
    folder.mkdir(exist_ok=True)
    length = TIMES * SIZES[options.size].length
    wanted = argparse.Namespace(data=data, out=folder, tokens=int(1.2 * NEEDLES * options.long_tokens), length=length)
    needles.make(wanted)
    shards = sorted(folder.glob("*.jsonl"))
    whole = data / "needles" / "all.jsonl"
    whole.write_text("".join(shard.read_text() for shard in shards if shard != whole))
    tokenise(whole, data / "tokens" / "needles", str(data / "gpt2" / "tokenizer.json"))


# ---- The command


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    for name in ("list", "run"):
        one = commands.add_parser(name)
        trials.add_options(one, "out/hybrids")
        one.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="MODEL",
                         help=f"any of {', '.join(MODELS)} (all)")  # fmt: skip
        one.add_argument("--rate", type=float, help="of the first stage (what experiments/lm chose)")
        one.add_argument("--eps", type=float, help="of the norm on what GKA and GDN give out (as published)")
        one.add_argument("--first-output", type=float, default=1, metavar="SCALE",
                         help="of the layers' output projections at first (1; see experiments/lm)")  # fmt: skip
        one.add_argument("--long-tokens", type=int, default=LONG_TOKENS, help="of the second stage (30M; 0: none)")
        one.add_argument("--samples", type=int, default=10, help="of RULER's tasks at each length (10)")
    merging = commands.add_parser("merge")
    merging.add_argument("files", nargs="+", type=Path)
    commands.add_parser("report")
    return parser.parse_args()


def report(results: Results) -> None:
    from tables import write_report  # here: it draws, and a machine that only trains may have no matplotlib

    write_report(results, {name: model.title for name, model in MODELS.items()}, HERE)


def main() -> int:
    options = arguments()
    if trials.collected(options, RESULTS, report):
        return 0
    results = with_weights(options, trials.known_results(options, RESULTS))
    if options.command == "list":
        return trials.list_runs(options, results, plan(options))
    make_needles(options)
    options.keep_weights = True
    return trials.run_plan(options, results, lambda _: plan(options), Measure(options))


if __name__ == "__main__":
    run_program(main)
