"""`torchrun -m gka.train`: the run of `gka train` on several ranks, whatever happens to one of them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import gka

# GKA_PROGRAM names another build of the command than the installed one.
PROGRAM = os.environ.get("GKA_PROGRAM") or Path(sys.executable).parent / "gka"
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}

RECALL = {
    "model": {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hybrid_override_pattern": "GKA-*-GDN",
    },
    "data": {"kind": "task", "task": "mqar", "vocab_size": 64, "sizes": [{"tokens": 16, "pairs": 2}]},
    "length": 16,
    "batch_tokens": 256,
    "accumulation": 2,
    "steps": 12,
    "learning_rate": 3e-3,
    "eval_every": 6,
    "eval_batches": 2,
    "checkpoint_every": 4,
    "dtype": "float64",
    "device": "cpu",
}


def gka_train(folder, *arguments, **environment):
    """`gka train`, in one process."""
    words = [PROGRAM, "train", *map(str, arguments)]
    return subprocess.run(words, cwd=folder, env=ONE_THREAD | environment, capture_output=True, text=True)


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def difference(one, other):
    """Of two runs: the largest of any measured number, and of any weight."""
    names = ("step", "tokens", "loss", "learning_rate", "gradient_norm", "eval_loss", "eval_accuracy")
    lines = [[[line.get(name, 0.0) for name in names] for line in metrics(run)] for run in (one, other)]
    measured = (torch.tensor(lines[0], dtype=torch.float64) - torch.tensor(lines[1], dtype=torch.float64)).abs().max()
    a, b = (gka.load(run).state_dict() for run in (one, other))
    assert a.keys() == b.keys()
    return max(measured.item(), *((a[name] - b[name]).abs().max().item() for name in a))


@pytest.fixture(scope="module")
def recall(tmp_path_factory):
    """A training file and its run in one process."""
    folder = tmp_path_factory.mktemp("recall")
    (folder / "recall.json").write_text(json.dumps(RECALL))
    done = gka_train(folder, "recall.json", "--set", "output=one")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_together_train_as_one_process_does(pool, recall, ranks):
    finished = pool.run("train_run", ranks, folder=recall, file="recall.json", assignments=[f"output=on{ranks}"])
    assert finished == [True] * ranks
    assert difference(recall / "one", recall / f"on{ranks}") < 1e-9
    assert json.loads((recall / f"on{ranks}/run.json").read_text())["state"] == "finished"


def test_packed_text_recomputed_activations_and_tied_embeddings_make_no_difference(pool, tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(f"the number {i} is followed by {i + 1}." for i in range(400)))
    subprocess.run([PROGRAM, "tokenize", "text.txt", "--tokenizer", "bytes", "--out", "text"], cwd=tmp_path, check=True)
    data = {"kind": "tokens", "files": ["text.tokens"], "packed": True, "eval_fraction": 0.1}
    model = RECALL["model"] | {"vocab_size": 257, "tie_word_embeddings": True}
    changes = {"data": data, "model": model, "steps": 4, "length": 32, "batch_tokens": 256}
    (tmp_path / "text.json").write_text(json.dumps(RECALL | changes))
    done = gka_train(tmp_path, "text.json", "--set", "output=one")
    assert done.returncode == 0, done.stderr
    assignments = ["output=two", "checkpoint_activations=true"]
    assert pool.run("train_run", 2, folder=tmp_path, file="text.json", assignments=assignments) == [True] * 2
    assert difference(tmp_path / "one", tmp_path / "two") < 1e-9
    cut = {"folder": tmp_path, "file": "text.json", "assignments": ["output=cut"], "context": 2}
    assert pool.run("train_run", 4, **cut) == [True] * 4  # documents begin anywhere in a rank's tokens
    assert difference(tmp_path / "one", tmp_path / "cut") < 1e-9
    files = [{path.name for path in (tmp_path / run / "latest").iterdir()} for run in ("one", "two")]
    assert files[0] - {"optimizer.safetensors"} == files[1] - {"distributed"}


def test_bfloat16_computes_on_float32_masters(pool, recall):
    for dtype in ("float32", "bfloat16"):
        assignments = [f"output={dtype}", f"dtype={dtype}"]
        assert pool.run("train_run", 2, folder=recall, file="recall.json", assignments=assignments) == [True] * 2
    assert {t.dtype for t in gka.load(recall / "bfloat16").state_dict().values()} == {torch.float32}
    losses = [torch.tensor([line["loss"] for line in metrics(recall / name)]) for name in ("float32", "bfloat16")]
    gap = (losses[0] - losses[1]).abs().max()
    assert 0 < gap < 0.02


def test_a_signal_to_one_rank_stops_all_and_any_number_of_ranks_goes_on(pool, recall):
    settings = {"folder": recall, "file": "recall.json", "assignments": ["output=stopped"]}
    assert pool.run("train_run", 2, stop_after=6, **settings) == [False] * 2
    assert (recall / "stopped/latest").resolve().name == "step-000000006"
    assert json.loads((recall / "stopped/run.json").read_text())["state"] == "stopped"
    refused = gka_train(recall, "stopped", "--resume")
    assert refused.returncode == 1 and "is of several processes" in refused.stderr
    assert pool.run("train_run", 4, resume=True, **settings) == [True] * 4
    assert difference(recall / "one", recall / "stopped") < 1e-9


def test_ranks_go_on_from_a_checkpoint_of_one_process(pool, recall):
    killed = gka_train(recall, "recall.json", "--set", "output=killed", GKA_TEST_FAULT="step@7")
    assert killed.returncode == -signal.SIGKILL
    settings = {"folder": recall, "file": "recall.json", "assignments": ["output=killed"]}
    assert pool.run("train_run", 2, resume=True, **settings) == [True] * 2
    assert difference(recall / "one", recall / "killed") < 1e-9


def test_what_ranks_have_trained_starts_a_run_of_one_process(pool, recall):
    arguments = ("--from", "on2", "--set", "output=second", "--set", "steps=1")
    done = gka_train(recall, "recall.json", *arguments)
    assert done.returncode == 0, done.stderr
    assert metrics(recall / "second")[0]["loss"] < metrics(recall / "one")[0]["loss"]


def test_what_ranks_have_trained_is_opened_by_the_command_and_by_transformers(recall):
    """After the tests above: the run of two ranks."""
    (recall / "ids.txt").write_text("3 1 4 1 5\n")
    words = [PROGRAM, "generate", "on2", "--ids", "ids.txt", "--max-tokens", "4", "--greedy", "--print-ids"]
    done = subprocess.run(words, cwd=recall, env=ONE_THREAD, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tokens = [int(word) for word in done.stdout.split()]
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    assert gka.load(recall / "on2").generate(ids, 4)[0].tolist() == tokens
    transformers = pytest.importorskip("transformers", reason="transformers is not installed; requirements.txt has it")
    ours = gka.hf.GkaForCausalLM  # from here on transformers knows it
    theirs = transformers.AutoModelForCausalLM.from_pretrained(recall / "on2/latest")
    assert isinstance(theirs, ours)
    assert (
        theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)[0, 5:].tolist()
        == tokens
    )


def test_ranks_start_from_no_model_of_another_tokenizer(pool, tmp_path):
    """As `gka train --from` does: token 65 of one is not token 65 of the other."""
    (tmp_path / "text.txt").write_text("\n\n".join(f"the number {i} is followed by {i + 1}." for i in range(200)))
    subprocess.run(
        [PROGRAM, "tokenizer", "train", "text.txt", "--vocab-size", "270", "--out", "bpe.json"],
        cwd=tmp_path,
        check=True,
    )
    for name, tokenizer in (("bytes", "bytes"), ("pieces", "bpe.json")):
        words = [PROGRAM, "tokenize", "text.txt", "--tokenizer", tokenizer, "--out", name]
        subprocess.run(words, cwd=tmp_path, check=True)
    model = RECALL["model"] | {"vocab_size": 300, "num_hidden_layers": 1, "hybrid_override_pattern": "GKA"}
    settings = RECALL | {"model": model, "steps": 1, "eval_every": 0, "length": 32, "batch_tokens": 256}
    (tmp_path / "text.json").write_text(json.dumps(settings | {"data": {"kind": "tokens", "files": ["bytes.tokens"]}}))
    assert gka_train(tmp_path, "text.json", "--set", "output=first").returncode == 0
    assignments = ["output=second", 'from="first"', "data.files=pieces.tokens"]
    for said in pool.run("train_run", 2, folder=tmp_path, file="text.json", assignments=assignments):
        assert "pieces.tokens is of another tokenizer than the one the model" in str(said)
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize(
    ("assignments", "options", "sentence"),
    [
        (["batch_tokens=96"], {}, "is 3 sequences, which 2 data-parallel ranks cannot share; it takes a multiple of 2"),
        (["output=one"], {}, "'one' already holds a run; `torchrun … -m gka.train one --resume` continues it"),
        (["output=one", "seed=3"], {"resume": True}, "the run in 'one' has another seed (0) than this one (3)"),
        (["output=none"], {"resume": True}, "there is no run in 'none' to resume"),
        (["model.vocab_size=32", "output=new/refused"], {}, "set model.vocab_size to at least 64"),
        ([], {"context": 3}, "2 processes cannot be cut into groups of context × tensor = 3 × 1"),
    ],
)
def test_a_run_that_cannot_be_is_refused_in_a_sentence_on_every_rank(pool, recall, assignments, options, sentence):
    before = sorted(path.name for path in recall.iterdir())
    settings = {"folder": recall, "file": "recall.json", "assignments": ["output=refused", *assignments]}
    for said in pool.run("train_run", 2, **settings, **options):
        assert sentence in said
    assert sorted(path.name for path in recall.iterdir()) == before
    assert json.loads((recall / "one/run.json").read_text()) == {"state": "finished", "steps": 12}


# -- started as users start it


def test_a_disk_that_fills_up_between_two_checkpoints_says_how_to_go_on(tmp_path):
    (tmp_path / "one.json").write_text(json.dumps(RECALL | {"checkpoint_every": 0}))
    words = ["bash", "-c", 'ulimit -f 2; exec "$@"', "bash", sys.executable, "-m", "gka.train", "one.json"]
    done = subprocess.run(words, cwd=tmp_path, env=ONE_THREAD, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "gka.train: cannot write runs/one/metrics.jsonl: File too large; make room there, then "
        "`torchrun … -m gka.train runs/one --resume` goes on from the beginning."
    )


class Torchrun:
    """Two ranks in processes of their own."""

    def __init__(self, folder, *arguments):
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "gka.train", *arguments]
        self.process = subprocess.Popen(words, cwd=folder, env=ONE_THREAD, stderr=subprocess.PIPE, text=True)

    def ranks(self):
        parent = self.process.pid
        return Path(f"/proc/{parent}/task/{parent}/children").read_text().split()

    def rank(self, number):
        """Its process."""
        for child in self.ranks():
            words = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            if f"RANK={number}".encode() in words:
                return int(child)
        raise AssertionError(f"there is no rank {number}")

    def wait_for_step(self, run, step):
        until = time.monotonic() + 90
        while time.monotonic() < until and self.process.poll() is None:
            path = run / "metrics.jsonl"
            if path.exists() and path.read_text().count("\n") >= step:
                return
            time.sleep(0.05)
        # Ranks are sessions of their own: left alive they would keep stderr open, and this would wait for its end.
        for child in self.ranks() if self.process.poll() is None else []:
            os.kill(int(child), signal.SIGKILL)
        self.process.kill()
        raise AssertionError(self.process.communicate()[1])


def test_a_run_that_lost_a_rank_goes_on_with_four(pool, recall):
    torchrun = Torchrun(recall, "recall.json", "--set", "output=lost", "--set", "steps=100000")
    torchrun.wait_for_step(recall / "lost", 9)
    os.kill(torchrun.rank(1), signal.SIGKILL)
    said = torchrun.process.communicate(timeout=60)[1]
    assert torchrun.process.returncode != 0
    assert "gka.train: rank 0: " in said
    settings = {"folder": recall, "file": "lost", "resume": True}
    step = int((recall / "lost/latest").resolve().name[5:])
    assert pool.run("train_run", 4, assignments=[f"steps={step + 2}"], **settings) == [True] * 4
    assert [line["step"] for line in metrics(recall / "lost")] == list(range(1, step + 3))


def test_a_rank_that_hangs_ends_the_run_with_its_number(recall):
    torchrun = Torchrun(recall, "recall.json", "--set", "output=hung", "--set", "steps=100000", "--timeout", "4")
    torchrun.wait_for_step(recall / "hung", 2)
    stopped = torchrun.rank(1)
    os.kill(stopped, signal.SIGSTOP)
    for line in torchrun.process.stderr:
        if line.startswith("gka.train: "):
            break
    assert line.startswith("gka.train: rank 1 has not given a sign of life for 4 s; the run ends here"), line
    os.kill(stopped, signal.SIGKILL)
    torchrun.process.communicate(timeout=60)
    assert torchrun.process.returncode != 0
