"""gka.Engine on a GPU against the CPU: weights of every kind, few rows and many, steps begun before tokens are seen."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gka
import gka.models

BUILT = {backend.name: backend.available for backend in gka.backends()}["cuda"]
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and BUILT), reason="needs a GPU, a torch that sees it and a gka built with GKA_CUDA"
)

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests/goldens/tiny-hqwen3-gka"
PROGRAM = os.environ.get("GKA") or os.environ.get("GKA_PROGRAM") or str(Path(sys.executable).parent / "gka")
PROMPTS = [[(7 * i + 13 * n) % 200 for i in range(5 + 9 * n)] for n in range(12)]


def answers(prompts, model=MODEL, **options):
    with gka.Engine(model, tokenizer="bytes", **options) as engine:
        greedy = engine.generate(prompts, max_tokens=24, temperature=0, ignore_eos=True)
        drawn = engine.generate(prompts, max_tokens=24, seed=3, ignore_eos=True)
        return [done.ids for done in [*greedy, *drawn]], engine.score(prompts[-1])


@pytest.mark.parametrize("stored", ["float32", "int8"])
def test_it_says_what_the_cpu_says_in_float32(stored, tmp_path):
    options = {"dtype": "float32"}
    if stored == "int8":
        options["model"] = tmp_path / "model"
        subprocess.run([PROGRAM, "export", MODEL, "--out", options["model"], "--weights", "int8"], check=True)
    (expected, scored), (got, same) = (answers(PROMPTS, device=device, **options) for device in ("cpu", "cuda"))
    # A tie that rounding decides changes all that follows: nearly all must be the same.
    assert sum(a == b for a, b in zip(got, expected, strict=True)) >= len(expected) - 2
    for a, b in zip(same[1:], scored[1:], strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=2e-3)


def test_weights_that_it_has_no_products_for_are_refused_in_one_sentence():
    sentence = r"weights are 'int8', and on cuda(:\d+)? they have the activations' type, float32; leave them as stored"
    with pytest.raises(ValueError, match=sentence) as refused:
        gka.Engine(MODEL, tokenizer="bytes", weights="int8", device="cuda", dtype="float32")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("sequences", [1, 12])
def test_heads_that_share_a_key_are_off_by_rounding(sequences, tmp_path):
    config = json.loads((ROOT / "configs/tiny/gka.json").read_text()) | {"hidden_size": 128, "initializer_range": 0.1}
    torch.manual_seed(0)
    model = gka.models.Decoder(config | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64})
    model.save(tmp_path)
    prompts = PROMPTS[:sequences]
    with gka.Engine(tmp_path, device="cuda", dtype="bfloat16") as engine:
        drawn = engine.generate(prompts, max_tokens=16, temperature=0, ignore_eos=True)
    with gka.Engine(tmp_path, device="cpu", dtype="float32") as exact:
        for prompt, done in zip(prompts, drawn, strict=True):
            scored = exact.score([*prompt, *done.ids])[len(prompt) :]
            for got, want in zip(done.tokens, scored, strict=True):
                assert got.logprob == pytest.approx(want.logprob, abs=0.15)


@pytest.mark.parametrize("weights", ["stored", "int8"])
@pytest.mark.parametrize("sequences", [1, 8, 12])
def test_in_bfloat16_it_is_off_by_rounding(weights, sequences):
    prompts = PROMPTS[:sequences]
    with gka.Engine(MODEL, tokenizer="bytes", weights=weights, device="cpu", dtype="float32") as exact:
        scores = [exact.score(prompt) for prompt in prompts]
    with gka.Engine(MODEL, tokenizer="bytes", weights=weights, device="cuda", dtype="bfloat16") as engine:
        for prompt, expected in zip(prompts, scores, strict=True):
            for got, want in zip(engine.score(prompt)[1:], expected[1:], strict=True):
                assert got.logprob == pytest.approx(want.logprob, abs=0.15)
        together = engine.generate(prompts, max_tokens=8, temperature=0, ignore_eos=True)
    with gka.Engine(MODEL, tokenizer="bytes", weights=weights, device="cpu", dtype="float32") as exact:
        for prompt, done in zip(prompts, together, strict=True):
            # What it chose is about as likely in float32 as what is likeliest there.
            scored = exact.score([*prompt, *done.ids], top_logprobs=1)[len(prompt) :]
            assert all(token.logprob > token.top[0][1] - 0.15 for token in scored)
