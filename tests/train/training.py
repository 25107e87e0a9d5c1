"""The command line in a folder of its own, and a small run for it: two GKA layers that learn MQAR on the CPU."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

# GKA_PROGRAM names another build of the command than the installed one.
PROGRAM = os.environ.get("GKA_PROGRAM") or Path(sys.executable).parent / "gka"

SETTINGS = {
    "model": {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hybrid_override_pattern": "GKA-GKA",
    },
    "data": {"kind": "task", "task": "mqar", "vocab_size": 64, "sizes": [{"tokens": 16, "pairs": 2}]},
    "length": 16,
    "batch_tokens": 256,
    "accumulation": 2,
    "steps": 24,
    "learning_rate": 3e-3,
    "eval_every": 10,
    "eval_batches": 2,
    "checkpoint_every": 8,
    "device": "cpu",
}


class Gka:
    """The command in a folder of its own, on one thread."""

    def __init__(self, folder):
        self.folder = folder

    def start(self, *arguments, limit=None, **environment):
        words = [str(PROGRAM), *map(str, arguments)]
        if limit:
            words = ["bash", "-c", f'ulimit -f {limit}; exec "$@"', "bash", *words]
        return subprocess.Popen(
            words,
            cwd=self.folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, *arguments, **options):
        process = self.start(*arguments, **options)
        stdout, stderr = process.communicate(timeout=300)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    def train(self, *arguments, **options):
        """One that has to work."""
        done = self.call("train", *arguments, **options)
        assert done.returncode == 0, done.stderr
        return done

    def write(self, name="small.json", **changes):
        (self.folder / name).write_text(json.dumps(SETTINGS | changes))
        return name

    def metrics(self, run):
        return [json.loads(line) for line in (self.folder / run / "metrics.jsonl").read_text().splitlines()]

    def weights(self, run):
        return (self.folder / run / "latest/model.safetensors").read_bytes()

    def checkpoints(self, run):
        return sorted(path.name for path in (self.folder / run / "checkpoints").iterdir())


def only_sentence(done):
    """What a failed command says: one line, after those of the progress."""
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("gka: ")
    return last


KILLED = -signal.SIGKILL
