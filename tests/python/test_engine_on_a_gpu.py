"""gka.Engine on a GPU against the CPU: weights of every kind, few rows and many, steps begun before tokens are seen."""

from pathlib import Path

import pytest
import torch

import gka

BUILT = {backend.name: backend.available for backend in gka.backends()}["cuda"]
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and BUILT), reason="needs a GPU, a torch that sees it and a gka built with GKA_CUDA"
)

MODEL = Path(__file__).resolve().parents[1] / "goldens" / "tiny-hqwen3-gka"
PROMPTS = [[(7 * i + 13 * n) % 200 for i in range(5 + 9 * n)] for n in range(12)]


def answers(prompts, **options):
    with gka.Engine(MODEL, tokenizer="bytes", **options) as engine:
        greedy = engine.generate(prompts, max_tokens=24, temperature=0, ignore_eos=True)
        drawn = engine.generate(prompts, max_tokens=24, seed=3, ignore_eos=True)
        return [done.ids for done in [*greedy, *drawn]], engine.score(prompts[-1])


@pytest.mark.parametrize("weights", ["stored", "int8"])
def test_it_says_what_the_cpu_says_in_float32(weights):
    options = {"weights": weights, "dtype": "float32"}
    (expected, scored), (got, same) = (answers(PROMPTS, device=device, **options) for device in ("cpu", "cuda"))
    # A tie that rounding decides changes all that follows: nearly all must be the same.
    assert sum(a == b for a, b in zip(got, expected, strict=True)) >= len(expected) - 2
    for a, b in zip(same[1:], scored[1:], strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=2e-3)


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
