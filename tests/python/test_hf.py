"""gka.hf: our models in transformers have the logits and the tokens they have here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import small_models
import torch

import gka

transformers = pytest.importorskip("transformers", reason="transformers is not installed; requirements.txt has it")
import gka.hf  # noqa: E402  (it needs transformers)

CONFIG = small_models.CONFIG | {"mamba2_config": {"head_dim": 16, "state_size": 8}}
PATTERNS = ["*-GKA-SWA-GDN", "GKA-M2-RET", "MESA-*-LA-KDA"]


@pytest.fixture(scope="module", params=PATTERNS)
def pair(request, tmp_path_factory):
    """The same model as gka.load and as AutoModelForCausalLM open it."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = gka.models.Decoder(CONFIG | {"hybrid_override_pattern": request.param}, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    return gka.load(folder), theirs, folder


def ids_of(*shape, seed=1):
    return torch.randint(60, shape, generator=torch.Generator().manual_seed(seed))


def assert_same(got, want, tolerance=1e-9):
    assert got.shape == want.shape
    assert (got - want).norm() <= tolerance * want.norm()


def test_logits_and_packed_rows_are_the_same(pair):
    ours, theirs, _ = pair
    ids = ids_of(2, 20)
    with torch.no_grad():
        assert_same(theirs(ids).logits, ours(ids))
        bounds = torch.tensor([0, 4, 20])
        packed = ours(ids[:1], cu_seqlens=bounds)
        assert_same(theirs(ids[:1], cu_seq_lens_q=bounds).logits, packed)
        anew = torch.cat([torch.arange(4), torch.arange(16)]).unsqueeze(0)
        assert_same(theirs(ids[:1], position_ids=anew).logits, packed)


def test_generation_greedy_padded_sampled_and_by_beams(pair):
    ours, theirs, _ = pair
    ids = ids_of(2, 9)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    got = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)
    plain = dict(ours.config)
    ours.config["eos_token_id"] = []
    want = ours.generate(ids, 8)
    ours.config = plain
    assert torch.equal(got[:, 9:], want)
    static = {"cache_implementation": "static", "disable_compile": True}
    if theirs.model.has_attention():  # transformers makes none for memories alone
        assert torch.equal(theirs.generate(ids, attention_mask=torch.ones_like(ids), **options, **static), got)
    # The second row alone, and behind padding in a batch, says the same.
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids[1:, 5:]], 1)
    mask = torch.cat([torch.zeros(1, 5), torch.ones(1, 4)], 1).long()
    batch = torch.cat([ids[:1], padded]), torch.cat([torch.ones_like(ids[:1]), mask])
    together = theirs.generate(batch[0], attention_mask=batch[1], **options)
    alone = theirs.generate(ids[1:, 5:], attention_mask=torch.ones(1, 4).long(), **options)
    assert torch.equal(together[0], got[0])
    assert torch.equal(together[1, 9:], alone[0, 4:])
    beams = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options | {"num_beams": 3})
    with torch.no_grad():

        def likelihood(tokens):
            return theirs(tokens).logits.log_softmax(-1)[:, 8:-1].gather(-1, tokens[:, 9:, None]).sum((1, 2))

        assert (likelihood(beams) >= likelihood(got) - 1e-6).all()
    torch.manual_seed(0)
    drawn = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options | {"do_sample": True, "top_k": 5})
    assert drawn.shape == (2, 17)


def test_what_lies_between_the_blocks_is_told_where_it_is_asked_for(pair):
    _, theirs, _ = pair
    ids = ids_of(2, 6)
    with torch.no_grad():
        told = theirs(ids, output_hidden_states=True)
        assert len(told.hidden_states) == len(theirs.model.layers) + 1
        assert torch.equal(told.hidden_states[0], theirs.get_input_embeddings()(ids))
        assert torch.equal(theirs.lm_head(told.hidden_states[-1]), told.logits)
        assert theirs(ids).hidden_states is None
        assert torch.equal(theirs(ids, return_dict=False)[0], told.logits)


def test_a_choice_that_is_changed_is_the_models_and_the_files(pair, tmp_path):
    _, theirs, folder = pair
    ids = ids_of(1, 6)
    changed = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, rms_norm_eps=0.5)
    assert changed.model.norm.eps == 0.5
    changed.save_pretrained(tmp_path / "changed")
    with torch.no_grad():
        assert not torch.allclose(changed(ids).logits, theirs(ids).logits)
        assert_same(gka.load(tmp_path / "changed")(ids), changed(ids).logits)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.hybrid_override_pattern, config.num_hidden_layers, config.vocab_size = "GDN-*", 2, 70
    with torch.no_grad():
        made = transformers.AutoModelForCausalLM.from_config(config).double()
        assert [block.prefix for block in made.model.layers] == ["gdn", "self_attn"]
        made.save_pretrained(tmp_path / "made")
        assert made(ids).logits.shape[-1] == 70
        assert_same(gka.load(tmp_path / "made")(ids), made(ids).logits)


def test_prompts_may_come_in_pieces(pair):
    _, theirs, _ = pair
    ids = ids_of(2, 14)
    with torch.no_grad():
        whole = theirs(ids).logits
        first = theirs(ids[:, :6], use_cache=True)
        second = theirs(
            ids[:, 6:], past_key_values=first.past_key_values, position_ids=torch.arange(6, 14).unsqueeze(0)
        )
    assert_same(torch.cat([first.logits, second.logits], 1), whole)


def test_saved_by_transformers_it_opens_everywhere(pair, tmp_path):
    ours, theirs, _ = pair
    theirs.save_pretrained(tmp_path / "again")
    ids = ids_of(1, 7)
    with torch.no_grad():
        assert torch.equal(gka.load(tmp_path / "again")(ids), ours(ids))
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float64)
        assert torch.equal(again(ids).logits, theirs(ids).logits)


def test_a_loss_has_gradients_for_every_parameter(pair):
    _, theirs, _ = pair
    ids = ids_of(2, 12)
    theirs.train()(input_ids=ids, labels=ids).loss.backward()
    assert [name for name, parameter in theirs.named_parameters() if parameter.grad is None] == []
    theirs.zero_grad()
    theirs.eval()


GOLDENS = Path(__file__).resolve().parents[1] / "goldens"


@pytest.mark.parametrize("name", ["tiny-hqwen3-gka", "tiny-hqwen3-gdn"])
def test_a_published_checkpoint_opens(name):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(GOLDENS / name, dtype=torch.float32)
    ids = ids_of(1, 30)
    with torch.no_grad():
        assert_same(theirs(ids).logits, gka.load(GOLDENS / name, dtype=torch.float32)(ids), 1e-5)


def test_a_folder_that_was_changed_is_refused_by_transformers_too(tmp_path):
    model = gka.models.Decoder(CONFIG | {"hybrid_override_pattern": "GKA-*"})
    model.save(tmp_path / "model")
    torch.ops.gka.write_checksums(str(tmp_path / "model"))
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    weights = tmp_path / "model/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    for load in (gka.load, transformers.AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            load(tmp_path / "model")
    opened.save_pretrained(
        save_directory=tmp_path / "model"
    )  # another model from here on, with no checksums to keep to
    assert gka.load(tmp_path / "model").state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("by", ["gka", "transformers"])
def test_what_is_saved_opens_without_importing_gka_first(tmp_path, by):
    config = CONFIG | {"hybrid_override_pattern": "GKA-*"}
    if by == "gka":
        gka.models.Decoder(config).save(tmp_path / "model")
    else:
        gka.hf.GkaForCausalLM(gka.hf.GkaConfig(**config)).save_pretrained(tmp_path / "model")
    program = (
        "import sys, transformers\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "print(type(model).__name__)\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", program, tmp_path / "model"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout == "GkaForCausalLM\n", done.stderr[-1000:]
