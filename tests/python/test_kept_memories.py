"""Memories of which attention keeps the last tokens only, against the definition: one pass in float64 over all tokens,
in which those behind the memory's last grid point do not see the keys that were dropped."""

import pytest
import torch
from small_models import CONFIG

import gka

GRID = 64
OTHERS = [*gka.models.MIXERS]


@pytest.fixture(scope="module", params=OTHERS)
def model(request, tmp_path_factory):
    torch.manual_seed(0)
    made = gka.models.Decoder(CONFIG | {"hybrid_override_pattern": f"*-{request.param}-*"}, dtype=torch.float64)
    folder = tmp_path_factory.mktemp("model")
    made.save(folder)
    return made, folder


def ids_of(count, seed):
    return torch.randint(60, [count], generator=torch.Generator().manual_seed(seed)).tolist()


def as_bytes(x):
    """What a page of bytes has of each token's and head's numbers."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / 127
    return ((wide * scale.reciprocal()).round() * scale).to(x.dtype)


def by_definition(model, tokens, cuts, rounded=False):
    """log p of every token given those before it. `cuts`: (at, first key that tokens from there on see)."""
    ids = torch.tensor([tokens])
    place = torch.arange(len(tokens))
    seen = place.unsqueeze(1) >= place
    for at, first in cuts:
        seen &= (place.unsqueeze(1) < at) | (place >= first)

    def attend(self, q, k, v, mask):
        if rounded and self.window is None:
            k, v = as_bytes(k), as_bytes(v)
        return plain(self, q, k, v, seen if self.window is None else mask)

    plain = gka.nn.Attention.attend
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(gka.nn.Attention, "attend", attend)
        scores = model(ids)[0].log_softmax(-1)
    return [scores[i, token].item() for i, token in enumerate(tokens[1:])]


def cut_of(tokens, keep):
    return tokens // GRID * GRID, (tokens - keep) // GRID * GRID


def answer_behind(engine, memory, prompt):
    done = engine.generate(prompt, memory=memory.id, max_tokens=70, temperature=0, ignore_eos=True)
    return done, [token.logprob for token in done.tokens]


def assert_close(got, want, tolerance):
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) <= tolerance


@pytest.mark.parametrize("cache", ["auto", "int8"])
def test_an_answer_sees_what_was_kept_and_what_follows(model, cache):
    decoder, folder = model
    # Scores are float32; of bytes one may be the next where a number lies halfway between two.
    tolerance = 1e-5 if cache == "auto" else 1e-3
    with gka.Engine(folder, device="cpu", dtype="float64", kv_cache_dtype=cache) as engine:
        for count, keep in [(128, 64), (193, 1), (255, 100), (256, 0)]:
            story, prompt = ids_of(count, count), ids_of(30, 7)
            memory = engine.create_memory(story, keep_tokens=keep)
            done, scores = answer_behind(engine, memory, prompt)
            cut = cut_of(count, keep)
            assert memory.kept_tokens == done.kept_tokens == count - cut[1]
            tokens = story + prompt + done.ids
            want = by_definition(decoder, tokens, [cut], cache == "int8")[-len(done.ids) :]
            assert_close(scores, want, tolerance)
            whole = by_definition(decoder, tokens, [], cache == "int8")[-len(done.ids) :]
            assert max(abs(a - b) for a, b in zip(scores, whole, strict=True)) > 10 * tolerance


def test_a_fork_goes_on_from_what_was_kept(model):
    decoder, folder = model
    with gka.Engine(folder, device="cpu", dtype="float64") as engine:
        story, more, prompt = ids_of(200, 1), ids_of(100, 2), ids_of(30, 7)
        told = engine.create_memory(story, keep_tokens=100)
        for keep, cuts in [(None, [cut_of(200, 100)]), (64, [cut_of(200, 100), cut_of(300, 64)])]:
            fork = engine.create_memory(more, after=told.id, keep_tokens=keep)
            assert fork.kept_tokens == 300 - cuts[-1][1]
            done, scores = answer_behind(engine, fork, prompt)
            want = by_definition(decoder, story + more + prompt + done.ids, cuts)[-len(done.ids) :]
            assert_close(scores, want, 1e-5)


def test_what_is_no_number_of_tokens_is_said_in_a_sentence(model):
    with gka.Engine(model[1], device="cpu") as engine, pytest.raises(ValueError, match="keep_tokens must be 0 or more"):
        engine.create_memory([1, 2, 3], keep_tokens=-1)
