"""Watch four layers learn to recall: Gated KalmaNet, Gated DeltaNet, Mamba2 and attention, on the CPU, in minutes.

Two-layer models of width 32 learn MQAR with up to 32 key-value pairs, as many as a memory of that width has dimensions,
all on the same tokens. Attention keeps every token; the others must make do with a memory of fixed size. Writes
mqar.png and mqar.json to --out and prints a table; `run.py` beside this is the whole experiment.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from layers import LAYERS, Layer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

from console import PROGRAM, paint, table, write_atomically  # noqa: E402

WIDTH, VOCABULARY, TOKENS, PAIRS, SEQUENCES, STEPS = 32, 256, 128, 32, 32, 2500
SIZES = [{"tokens": t, "pairs": n} for t, n in ((16, 2), (32, 4), (32, 8), (64, 16), (TOKENS, PAIRS))]

#: Mamba2 is published with a state of 128 per channel, four times these models' width; here it gets the width, twice
#: over (expand 2), which is as much as Gated KalmaNet's two memories hold.
DEMO = {
    "gka-plain": LAYERS["gka-plain"],
    "gdn": LAYERS["gdn"],
    "mamba2": Layer(
        "mamba2", f"Mamba2, state {WIDTH}", "M2", {"mamba2_config": {"state_size": WIDTH, "head_dim": WIDTH}}
    ),
    "attention": LAYERS["attention"],
}

#: The best of those tried (README.md).
RATES = {"gka-plain": 5e-3, "gdn": 5e-3, "mamba2": 1e-2, "attention": 5e-3}


def settings(layer: Layer, steps: int, seed: int, rate: float, output: Path) -> dict[str, object]:
    task = {"kind": "task", "task": "mqar", "vocab_size": VOCABULARY, "filler": "random"}
    return {
        "model": {**layer.model(WIDTH, VOCABULARY), "initializer_range": 0.1},
        "data": {**task, "seed": seed, "sizes": SIZES},
        "eval_data": {**task, "seed": 1_000_003, "sizes": [SIZES[-1]]},
        "length": TOKENS,
        "batch_tokens": SEQUENCES * TOKENS,
        "steps": steps,
        "learning_rate": rate,
        "final_learning_rate": 0.1,
        "warmup": 0.1,
        "weight_decay": 0.1,
        "seed": seed,
        "device": "cpu",
        "eval_every": max(1, steps // 40),
        "eval_batches": 4,
        "checkpoint_every": 0,
        "output": str(output),
    }


class Training:
    """One layer's run: a process, and what its metrics say so far."""

    def __init__(self, layer: Layer, steps: int, seed: int, rate: float, folder: Path):
        self.layer, self.steps, self.seed, self.rate = layer, steps, seed, rate
        folder.mkdir(parents=True, exist_ok=True)
        self.output = folder / layer.name
        shutil.rmtree(self.output, ignore_errors=True)
        file = folder / f"{layer.name}.json"
        file.write_text(json.dumps(settings(layer, steps, seed, rate, self.output), indent=1))
        self.command = [PROGRAM, "train", str(file)]
        self.process: subprocess.Popen | None = None
        self.curve: list[tuple[int, float]] = []  # (tokens, accuracy)
        self.step, self.began, self.seconds, self._read = 0, 0.0, 0.0, 0

    def start(self, threads: int) -> None:
        self.began = time.monotonic()
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        )

    def look(self) -> bool:
        """Reads what is new; whether the process goes on."""
        running = self.process.poll() is None
        metrics = self.output / "metrics.jsonl"
        if metrics.exists():
            with metrics.open() as file:
                file.seek(self._read)
                for line in file:
                    if not line.endswith("\n"):
                        break
                    self._read += len(line.encode())
                    entry = json.loads(line)
                    self.step = entry["step"]
                    if "eval_accuracy" in entry:
                        self.curve.append((entry["tokens"], entry["eval_accuracy"]))
        if running:
            self.seconds = time.monotonic() - self.began
        elif self.process.returncode != 0:
            said = self.process.stderr.read().strip().splitlines()
            raise RuntimeError(f"{self.layer.title}: {said[-1] if said else 'gka train failed'}")
        return running

    def line(self) -> str:
        accuracy = self.curve[-1][1] if self.curve else 0.0
        bar = "█" * round(30 * accuracy)
        ours = self.layer.name.startswith("gka")
        shown = paint(f"{bar:<30}", "31" if ours else "34", sys.stderr)
        progress = f"step {self.step:5d}/{self.steps}  {self.seconds:4.0f} s"
        return f"  {self.layer.title:<20} {shown} {accuracy:6.1%}   {progress}"


def watch(trainings: list[Training], jobs: int) -> None:
    """Two at a time, with a bar of accuracy for each; on a terminal the bars grow."""
    live, waiting, running = sys.stderr.isatty(), list(trainings), []
    drawn, shown = 0, 0
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(waiting.pop(0))
                running[-1].start(max(1, (os.cpu_count() or 1) // jobs))
            time.sleep(0.5)
            running = [training for training in running if training.look()]
            if live:
                lines = [training.line() for training in trainings]
                print(
                    f"\x1b[{drawn}A" if drawn else "",
                    "\n".join(f"\x1b[2K{line}" for line in lines),
                    sep="",
                    file=sys.stderr,
                )
                drawn = len(lines)
            elif (tenth := sum(10 * t.step // t.steps for t in trainings)) > shown:
                shown = tenth
                print("\n".join(t.line() for t in trainings if t.process), end="\n\n", file=sys.stderr, flush=True)
    finally:
        for training in running:
            training.process.terminate()


def draw(trainings: list[Training], path: Path) -> None:
    # Here, because seeds.py takes the trainings to machines that have no matplotlib.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from palette import LOOKS

    figure, panel = plt.subplots(figsize=(7.2, 4.2))
    for training in trainings:
        tokens, accuracy = zip(*training.curve, strict=True)
        ours, look = training.layer.name.startswith("gka"), LOOKS[training.layer.name.replace("gka-plain", "gka")]
        panel.plot(
            [t / 1e6 for t in tokens],
            accuracy,
            label=f"{training.layer.title}  {accuracy[-1]:.1%}",
            color=look.colour,
            marker=look.marker,
            markersize=5,
            markevery=3,
            linewidth=2.6 if ours else 1.6,
            linestyle="-" if training.layer.constant_memory else "--",
        )
    panel.set(xlabel="million training tokens", ylabel="recall accuracy", ylim=(-0.02, 1.02))
    panel.set_title(f"{PAIRS} key-value pairs in memories of width {WIDTH}")
    panel.grid(alpha=0.25)
    panel.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 0.06))
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="trainings at a time")
    parser.add_argument("--out", default="out")
    options = parser.parse_args()
    folder = Path(options.out) / "mqar-runs"
    trainings = [Training(layer, options.steps, options.seed, RATES[layer.name], folder) for layer in DEMO.values()]
    try:
        watch(trainings, options.jobs)
    except KeyboardInterrupt:
        print("\nStopped; `make demo` starts again.", file=sys.stderr)
        return 130
    except RuntimeError as error:
        print(f"mqar: {error}", file=sys.stderr)
        return 1
    rows = [[t.layer.title, f"{t.curve[-1][1]:.1%}", f"{t.seconds:.0f} s"] for t in trainings]
    print(table(["layer", "recall", "time"], rows))
    out = Path(options.out)
    data = {t.layer.name: {"seconds": t.seconds, "curve": t.curve} for t in trainings}
    write_atomically(out / "mqar.json", lambda path: path.write_text(json.dumps(data, indent=1)))
    write_atomically(out / "mqar.png", lambda path: draw(trainings, path))
    print(f"{out / 'mqar.png'} shows how they learned.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
