"""The demo's trainings over several seeds: whether what `make demo` shows holds for more than one.

Appends a line per run to --out as it ends and leaves out what is there already; prints the table of README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from demo import DEMO, RATES, STEPS, Training, table


def run_all(todo: list[tuple[str, int, float]], jobs: int, steps: int, out: Path) -> None:
    """One thread each, `jobs` at a time."""
    running: list[Training] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            while todo or running:
                while todo and len(running) < jobs:
                    layer, seed, rate = todo.pop(0)
                    running.append(Training(DEMO[layer], steps, seed, rate, Path(folder) / f"{seed}-{rate:g}"))
                    running[-1].start(1)
                time.sleep(0.5)
                ended = [training for training in running if not training.look()]
                running = [training for training in running if training not in ended]
                for training in ended:
                    add(training, out)
        finally:
            for training in running:
                training.process.terminate()


def add(training: Training, out: Path) -> None:
    line = {"layer": training.layer.name, "seed": training.seed, "rate": training.rate, "steps": training.steps}
    line |= {"accuracy": round(training.curve[-1][1], 4), "seconds": round(training.seconds, 1)}
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{line['layer']:<10} rate {line['rate']:g} seed {line['seed']}: {line['accuracy']:.3f}", flush=True)


def read(out: Path, steps: int) -> dict[tuple[str, int, float], float]:
    lines = map(json.loads, out.read_text().splitlines()) if out.exists() else []
    return {(line["layer"], line["seed"], line["rate"]): line["accuracy"] for line in lines if line["steps"] == steps}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", choices=list(DEMO), default=list(DEMO))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--rates", nargs="+", type=float, help="learning rates for all layers (default: the demo's)")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="trainings at a time, one thread each")
    parser.add_argument("--out", type=Path, default=Path("out/demo-seeds.jsonl"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [(layer, rate) for layer in options.layers for rate in options.rates or [RATES[layer]]]
    done = read(options.out, options.steps)
    todo = [(layer, seed, rate) for layer, rate in rows for seed in options.seeds if (layer, seed, rate) not in done]
    try:
        run_all(todo, options.jobs, options.steps, options.out)
    except KeyboardInterrupt:
        print("\nStopped; the same command goes on.", file=sys.stderr)
        return 130
    except RuntimeError as error:
        print(f"seeds: {error}", file=sys.stderr)
        return 1
    found = read(options.out, options.steps)
    cells = [[found.get((layer, seed, rate)) for seed in options.seeds] for layer, rate in rows]
    shown = [["–" if cell is None else f"{cell:.3f}" for cell in row] for row in cells]
    names = [[DEMO[layer].title, f"{rate:g}"] for layer, rate in rows]
    print(table(["layer", "rate", *map(str, options.seeds)], [a + b for a, b in zip(names, shown, strict=True)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
