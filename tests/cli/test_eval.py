"""gka eval: against the definitions, written out here on the logits of gka score, and what is said of a wrong file."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

PROGRAM = os.environ.get("GKA_PROGRAM") or Path(sys.executable).parent / "gka"
VOCABULARY, FIRST = 257, 256  # bytes; the end token begins a text


def call(*arguments):
    return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A byte model of one attention layer with large random weights, so that its answers differ from item to item."""
    folder = tmp_path_factory.mktemp("model")
    config = {
        "model_type": "hybrid_qwen3",
        "hybrid_override_pattern": "*",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0."
    shapes = {"model.embed_tokens.weight": [VOCABULARY, 16], "model.norm.weight": [16]}
    shapes |= {layer + f"{name}_layernorm.weight": [16] for name in ("input", "post_attention")}
    shapes |= {layer + f"self_attn.{name}_proj.weight": [16, 16] for name in "qkvo"}
    shapes |= {layer + f"self_attn.{name}_norm.weight": [8] for name in "qk"}
    shapes |= {layer + f"mlp.{name}_proj.weight": [32, 16] for name in ("gate", "up")}
    shapes |= {layer + "mlp.down_proj.weight": [16, 32]}
    random = torch.Generator().manual_seed(3)
    weights = {name: torch.randn(shape, generator=random) * 0.6 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def log_probabilities(model, folder, sequences):
    """float64 log softmax of the logits after each token, by gka score."""
    (folder / "ids").write_text("".join(" ".join(map(str, tokens)) + "\n" for tokens in sequences))
    done = call("score", model, "--ids", folder / "ids", "--logits", folder / "logits.safetensors")
    assert done.returncode == 0, done.stderr
    logits = load_file(folder / "logits.safetensors")
    return [logits[f"logits.{i}"].double().log_softmax(-1) for i in range(len(sequences))]


def likelihoods(model, folder, pairs):
    """(log likelihood, greedy) of each ending after its context."""
    sequences = [list((context + ending).encode()) for context, ending in pairs]
    found = []
    for (_, ending), tokens, scores in zip(pairs, sequences, log_probabilities(model, folder, sequences), strict=True):
        places = range(len(tokens) - len(ending.encode()), len(tokens))
        total = math.fsum(scores[i - 1, tokens[i]].item() for i in places)
        found.append((total, all(scores[i - 1].argmax().item() == tokens[i] for i in places)))
    return found


def write_task(path, about, items):
    path.write_text("".join(json.dumps(line) + "\n" for line in [about, *items]))
    return path


def evaluate(model, *arguments):
    done = call("eval", model, "--tokenizer", "bytes", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return {name: task["metrics"] for name, task in json.loads(done.stdout)["tasks"].items()}


def mean_and_error(values):
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


def test_multiple_choice_is_accuracy_by_likelihood_by_character_and_by_byte(model, tmp_path):
    endings = ["no", "ÄÖÜ äöü", "a long ending, that one", "yes!"]
    items = [
        {"context": f"Question {i}: which?\nAnswer:", "choices": endings[i % 2 :], "answer": i % 3} for i in range(24)
    ]
    items.append({"contexts": ["One was", "Two was"], "choices": ["here.", "here."], "answer": 1})
    path = write_task(tmp_path / "choice.jsonl", {"task": "which", "kind": "choice"}, items)
    right = {"acc": [], "acc_norm": [], "acc_bytes": []}
    contexts = [item.get("contexts") or [item["context"]] * len(item["choices"]) for item in items]
    pairs = [
        [(context, " " + choice) for context, choice in zip(before, item["choices"], strict=True)]
        for before, item in zip(contexts, items, strict=True)
    ]
    found = iter(likelihoods(model, tmp_path, [pair for group in pairs for pair in group]))
    for item in items:
        totals = [next(found)[0] for _ in item["choices"]]
        lengths = {"acc": lambda c: 1, "acc_norm": len, "acc_bytes": lambda c: len(c.encode())}
        for name, length in lengths.items():
            scores = [total / length(choice) for total, choice in zip(totals, item["choices"], strict=True)]
            right[name].append(float(scores.index(max(scores)) == item["answer"]))
    metrics = evaluate(model, "--tasks", path)["which"]
    for name, values in right.items():
        mean, error = mean_and_error(values)
        assert metrics[name] == {"value": pytest.approx(mean, abs=1e-12), "stderr": pytest.approx(error, abs=1e-12)}
    assert len({tuple(values) for values in right.values()}) == 3, "the three ways of counting should differ here"


def test_last_words_are_greedy_or_not_and_have_a_perplexity(model, tmp_path):
    contexts = [f"The {word} is " for word in ("cat", "dog", "sun", "end")]  # the space belongs to the ending
    greedy = [
        chr(scores[-1].argmax().item())
        for scores in log_probabilities(model, tmp_path, [list(f"{c.rstrip()}".encode()) for c in contexts])
    ]
    items = [{"context": c, "target": t} for c, t in zip(contexts, ["x", "yes", "ok", "z"], strict=True)]
    about = {"task": "words", "kind": "last_word", "delimiter": ""}
    metrics = evaluate(model, "--tasks", write_task(tmp_path / "words.jsonl", about, items))["words"]
    pairs = [(item["context"].rstrip(), " " + item["target"]) for item in items]
    found = likelihoods(model, tmp_path, pairs)
    mean, error = mean_and_error([total for total, _ in found])
    assert metrics["perplexity"]["value"] == pytest.approx(math.exp(-mean), rel=1e-5)
    assert metrics["perplexity"]["stderr"] == pytest.approx(math.exp(-mean) * error, rel=1e-5)
    assert metrics["acc"]["value"] == sum(g for _, g in found) / len(found)
    spoken = [{"context": c.rstrip(), "target": g} for c, g in zip(contexts, greedy, strict=True) if g.isascii()]
    if spoken:
        path = write_task(tmp_path / "said.jsonl", about | {"task": "said"}, spoken)
        assert evaluate(model, "--tasks", path)["said"]["acc"]["value"] == 1


def windows(tokens, most):
    """Every token once; each window reads at most `most` tokens, the last one from as far back as it can."""
    tokens, scored = [FIRST, *tokens], 1
    while scored < len(tokens):
        end = min(len(tokens), scored + most)
        yield tokens[max(0, end - most - 1) : end], end - scored
        scored = end


def test_texts_have_bits_per_byte_in_windows_of_the_models_length(model, tmp_path):
    texts = ["A short one. ", "Größer als das Fenster: " + "a word and more " * 9, "x" * 64, "y" * 65]
    path = write_task(tmp_path / "text.jsonl", {"task": "text", "kind": "text"}, [{"text": t} for t in texts])
    for arguments, most in ([], 64), (["--max-length", 17], 17):
        totals = []
        for text in texts:
            parts = list(windows(text.encode(), most))
            scores = log_probabilities(model, tmp_path, [tokens for tokens, _ in parts])
            totals.append(
                math.fsum(
                    table[i - 1, tokens[i]].item()
                    for (tokens, count), table in zip(parts, scores, strict=True)
                    for i in range(len(tokens) - count, len(tokens))
                )
            )
        metrics = evaluate(model, "--tasks", path, *arguments)["text"]
        size = sum(len(text.encode()) for text in texts)
        bits = -sum(totals) / size / math.log(2)
        assert metrics["bits_per_byte"]["value"] == pytest.approx(bits, rel=1e-6)
        assert metrics["byte_perplexity"]["value"] == pytest.approx(2**bits, rel=1e-6)
        words = 4 + 41 + 1 + 1
        assert metrics["word_perplexity"]["value"] == pytest.approx(math.exp(-sum(totals) / words), rel=1e-4)


def test_generated_answers_are_compared_as_a_whole_or_looked_into(model, tmp_path):
    context = "Say it: "
    done = call("generate", model, "--tokenizer", "bytes", "--prompt", context, "--max-tokens", 12, "--greedy")
    said = done.stdout.removesuffix("\n")
    assert done.returncode == 0 and len(said) >= 4, done
    items = [{"context": context, "answers": answers} for answers in (["never"], ["never", said.lstrip()])]
    about = {"task": "whole", "kind": "exact", "max_tokens": 12}
    whole = write_task(tmp_path / "whole.jsonl", about, items)
    within = [{"context": context, "answers": answers} for answers in (["never"], [said[1:3].swapcase()])]
    looked = write_task(tmp_path / "within.jsonl", about | {"task": "within", "kind": "contains"}, within)
    stop = [{"context": context, "answers": [said[:2].lstrip()]}]
    stopped = write_task(tmp_path / "stop.jsonl", about | {"task": "stop", "stop": [said[2:4]]}, stop)
    metrics = evaluate(model, "--tasks", whole, looked, stopped, "--samples", tmp_path / "samples.jsonl")
    assert metrics["whole"]["exact_match"]["value"] == 0.5
    assert metrics["within"]["contains"]["value"] == 0.5
    assert metrics["stop"]["exact_match"]["value"] == 1
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(sample["task"], sample["right"]) for sample in samples] == [
        ("whole", False),
        ("whole", True),
        ("within", False),
        ("within", True),
        ("stop", True),
    ]


def test_the_table_has_a_line_for_every_metric_and_limit_takes_the_first_items(model, tmp_path):
    items = [{"context": "a", "choices": ["b", "c"], "answer": 0}] * 5
    path = write_task(tmp_path / "t.jsonl", {"task": "t", "kind": "choice"}, items)
    done = call("eval", model, "--tokenizer", "bytes", "--tasks", path, "--limit", 3)
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0] == ["task", "items", "metric", "value", "stderr"]
    assert [row[:3] for row in rows[1:]] == [["t", "3", name] for name in ("acc", "acc_norm", "acc_bytes")]
    done = call("eval", model, "--tokenizer", "bytes", "--tasks", path, "--limit", 1)
    assert [line.split()[-1] for line in done.stdout.splitlines()[1:]] == ["–"] * 3, "one item has no deviation"
    done = call("eval", model, "--tokenizer", "bytes", "--tasks", path, "--limit", 1, "--json")
    assert json.loads(done.stdout)["tasks"]["t"]["metrics"]["acc"]["stderr"] is None


CHOICE = {"task": "t", "kind": "choice"}
FINE = {"context": "a", "choices": ["b", "c"], "answer": 0}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "has no items"),
        ([CHOICE], "has no items"),
        ([{"kind": "choice"}, FINE], "line 1 of"),
        ([{"task": "t", "kind": "guess"}, FINE], "takes one of choice, last_word, text, contains, exact"),
        ([CHOICE, FINE, {"context": "a", "choices": ["b"], "answer": 0}], "line 3 of"),
        ([CHOICE, {"context": "a", "choices": ["b", "c"], "answer": 2}], "the number of the right choice"),
        ([CHOICE, FINE | {"contexts": ["a", "b", "c"], "context": ""}], "as many as choices"),
        ([CHOICE, FINE | {"contexts": ["a", "b"]}], "not both"),
        ([CHOICE, FINE | {"label": 1}], "the key 'label'"),
        ([{"task": "t", "kind": "text"}, {"text": ""}], "a text that is not empty"),
        ([{"task": "t", "kind": "contains"}, {"context": "a", "answers": ["b", ""]}], "answers that are not empty"),
        ([{"task": "t", "kind": "exact", "stop": [""]}, {"context": "a", "answers": ["b"]}], "'stop'"),
    ],
)
def test_a_file_that_is_wrong_is_one_sentence_that_says_where(model, tmp_path, lines, said):
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = call("eval", model, "--tokenizer", "bytes", "--tasks", path)
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and said in done.stderr and "bad.jsonl" in done.stderr


def test_a_model_that_is_not_there_and_a_limit_that_is_none_are_named(tmp_path):
    path = write_task(tmp_path / "t.jsonl", CHOICE, [FINE])
    done = call("eval", tmp_path / "nowhere", "--tasks", path)
    assert (done.returncode, done.stdout) == (1, "") and "nowhere" in done.stderr and "tokenizer" not in done.stderr
    done = call("eval", tmp_path, "--tasks", path, "--limit", 0)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "--limit: takes a number above 0, and got 0"


def test_a_place_for_samples_that_cannot_be_written_is_named_before_any_work(tmp_path):
    path = tmp_path / "fine.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (CHOICE, FINE)))
    done = call("eval", "no-model", "--tasks", path, "--samples", tmp_path / "none" / "samples.jsonl")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("gka: cannot write")
    done = call("eval", "no-model", "--tasks", path, "--samples", tmp_path / "samples.jsonl")
    assert "no-model" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["fine.jsonl"]


def test_packed_scores_are_the_engines(model, tmp_path):
    sequences = ["5 6 7 8 9 10 11 12 13 14 15 16", "70", "7 8", " ".join(str(i % 200) for i in range(90))]
    (tmp_path / "some").write_text("\n".join(sequences) + "\n")
    command = ["score", model, "--ids", tmp_path / "some", "--per-token"]
    for more in [], ["--window", 20, "--overlap", 7]:
        found = []
        for packed in [], ["--packed", 30]:
            done = call(*command, *more, *packed)
            assert done.returncode == 0, done.stderr
            found.append([one["log_probabilities"] for one in json.loads(done.stdout)["sequences"]])
        assert [len(values) for values in found[1]] == [len(values) for values in found[0]]
        for values, wanted in zip(*found, strict=True):
            assert values == pytest.approx(wanted, rel=1e-5)


def test_tasks_are_not_written_over(model, tmp_path):
    items = [{"context": "one", "choices": ["a", "b"], "answer": 0}]
    path = write_task(tmp_path / "task.jsonl", {"task": "which", "kind": "choice"}, items)
    before = path.read_text()
    done = call("eval", model, "--tokenizer", "bytes", "--tasks", path, "--samples", path)
    assert done.returncode == 1
    assert f"--samples is {path}, which is read and would be written over" in done.stderr
    assert path.read_text() == before
