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

from demo import DEMO, Training, table


def run_all(todo: list[tuple[str, int]], jobs: int, steps: int, out: Path) -> None:
    """One thread each, `jobs` at a time."""
    running: list[Training] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            while todo or running:
                while todo and len(running) < jobs:
                    layer, seed = todo.pop(0)
                    running.append(Training(DEMO[layer], steps, seed, Path(folder) / str(seed)))
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
    line = {"layer": training.layer.name, "seed": training.seed, "steps": training.steps}
    line |= {"accuracy": round(training.curve[-1][1], 4), "seconds": round(training.seconds, 1)}
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{line['layer']:<10} seed {line['seed']}: {line['accuracy']:.3f} after {line['seconds']:.0f} s", flush=True)


def read(out: Path, steps: int) -> dict[tuple[str, int], float]:
    lines = map(json.loads, out.read_text().splitlines()) if out.exists() else []
    return {(line["layer"], line["seed"]): line["accuracy"] for line in lines if line["steps"] == steps}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", choices=list(DEMO), default=list(DEMO))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="trainings at a time, one thread each")
    parser.add_argument("--out", type=Path, default=Path("out/demo-seeds.jsonl"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = read(options.out, options.steps)
    todo = [(layer, seed) for layer in options.layers for seed in options.seeds if (layer, seed) not in done]
    try:
        run_all(todo, options.jobs, options.steps, options.out)
    except KeyboardInterrupt:
        print("\nStopped; the same command goes on.", file=sys.stderr)
        return 130
    except RuntimeError as error:
        print(f"seeds: {error}", file=sys.stderr)
        return 1
    found = read(options.out, options.steps)
    rows = [
        [DEMO[layer].title, *(f"{found[layer, seed]:.3f}" if (layer, seed) in found else "–" for seed in options.seeds)]
        for layer in options.layers
    ]
    print(table(["layer", *map(str, options.seeds)], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
