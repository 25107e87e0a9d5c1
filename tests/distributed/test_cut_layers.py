"""Heads and sequences cut over ranks: the same numbers as one process, forward and backward."""

import json

import pytest
from test_training_on_ranks import RECALL, difference, gka_train

GKA = {"hidden_size": 24, "head_dim": 8, "num_q_heads": 4, "num_k_heads": 2, "num_v_heads": 2}
ATTENTION = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
HEADED = {"hidden_size": 24, "head_dim": 8, "num_heads": 3}

LAYERS = {
    "as published": ("GatedKalmaNet", GKA),
    "values wider than keys": ("GatedKalmaNet", GKA | {"expand_v": 2.0, "beta_weight": "paper"}),
    "keys that do not fade": ("GatedKalmaNet", GKA | {"use_forgetting_gate_kk": False}),
    "nothing fades": ("GatedKalmaNet", GKA | {"use_forgetting_gate": False, "use_beta_gate": False}),
    "a sketch": ("GatedKalmaNet", GKA | {"sketch_dim": 4}),
    "no solve": ("GatedKalmaNet", GKA | {"num_iter": 0}),
    "no convolution of values": ("GatedKalmaNet", GKA | {"use_v_conv": False, "conv_size": 3}),
    "no convolution, low-rank keys": ("GatedKalmaNet", GKA | {"conv_size": 0, "kv_proj_rank": 3}),
    "attention": ("Attention", ATTENTION),
    "attention with convolutions": ("Attention", ATTENTION | {"conv_size": 4, "attention_bias": True}),
    "a window within the neighbour": ("Attention", ATTENTION | {"sliding_window": 5}),
    "a window over several ranks": ("Attention", ATTENTION | {"sliding_window": 9}),
    "a window of one token": ("Attention", ATTENTION | {"sliding_window": 1}),
    "Gated DeltaNet": ("GatedDeltaNet", GKA | {"expand_v": 2.0, "allow_neg_eigval": True}),
    "DeltaNet without convolutions": ("DeltaNet", HEADED | {"conv_size": 0}),
    "Kimi Delta Attention": ("KimiDeltaAttention", HEADED),
    "MesaNet": ("MesaNet", HEADED | {"use_gate": True}),
    "gated linear attention": ("GatedLinearAttention", {"hidden_size": 24, "num_heads": 3, "conv_size": 3}),
    "RetNet": ("RetNet", {"hidden_size": 24, "num_heads": 3}),
    "linear attention": ("LinearAttention", {"hidden_size": 24, "num_heads": 3}),
    "Mamba2": ("Mamba2", {"hidden_size": 24, "head_dim": 8, "state_size": 5, "n_groups": 2}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_on_four_pieces_of_a_sequence_is_the_layer_on_the_whole(pool, name):
    for gap, _, _ in pool.run("layer_in_context", 4, make=LAYERS[name]):
        assert gap < 1e-12


@pytest.mark.parametrize(
    ("name", "ranks", "with_ring", "rings"),
    [
        ("attention", 2, True, True),
        ("attention", 4, True, True),
        ("attention", 4, False, False),  # a torch without it
        ("a window over several ranks", 4, True, False),
    ],
)
def test_plain_attention_is_torchs_ring_and_other_attention_is_not(pool, name, ranks, with_ring, rings):
    for gap, rang in pool.run("attention_in_context", ranks, make=LAYERS[name], with_ring=with_ring):
        assert gap < 1e-12
        assert rang == rings


LOW_RANK = {"kv_proj_rank": 3}
CUT_HEADS = {
    "low-rank keys and values": ("GKA-GDN", {"gka_config": LOW_RANK, "gdn_config": LOW_RANK}),
    "a learned mixture of heads": ("GKA", {"gka_config": LOW_RANK | {"kv_learnable_residual": True}}),
    "Mamba2, one group on all ranks": ("M2", {"mamba2_config": {"n_groups": 1}}),
    "Mamba2, a group on a rank or two": ("M2", {"mamba2_config": {"n_groups": 2, "conv_bias": False}}),
    "Mamba2, groups for every rank": ("M2", {"mamba2_config": {"n_groups": 4}}),
    "Mamba2, a matrix that is not shared out": ("M2", {"mamba2_config": {"n_groups": 1, "state_size": 1}}),
}


@pytest.mark.parametrize("name", CUT_HEADS)
def test_a_model_whose_heads_are_cut_is_the_model(pool, name):
    pattern, changes = CUT_HEADS[name]
    model = RECALL["model"] | {"hybrid_override_pattern": pattern, "num_hidden_layers": pattern.count("-") + 1}
    model |= changes | {"num_attention_heads": 8, "num_key_value_heads": 4}
    model["mamba2_config"] = {"head_dim": 8, "state_size": 6} | changes.get("mamba2_config", {})
    for ranks in (2, 4):
        for gap in pool.run("model_with_cut_heads", ranks, config=model):
            assert gap < 1e-10


def test_a_memory_sends_one_state_and_as_much_back_whatever_the_length(pool):
    """docs/distributed.md states it: batch × heads × (D² + DV), and one number per head for the decay."""
    state, decays = 2 * 4 * (8 * 8 + 8 * 8), 2 * 4
    for tokens in (24, 96):
        for _, forward, backward in pool.run("layer_in_context", 2, make=LAYERS["as published"], tokens=tokens):
            assert (forward, backward) == (state + decays, state)
    left, written = (
        2 * 4 * 8 * 8,
        2 * 4 * 8 * 16,
    )  # of a delta rule: the matrix an older state goes through, and its own
    for _, forward, backward in pool.run("layer_in_context", 2, make=LAYERS["Gated DeltaNet"]):
        assert (forward, backward) == (left + written, written)


# Of 24 tokens on four ranks: one begins just before a cut, one at it, one just after; one lies on three ranks.
DOCUMENTS = ([0, 5, 12, 13, 24], [0, 3, 22, 24])


@pytest.mark.parametrize(
    "name",
    [
        "as published",
        "a sketch",
        "attention with convolutions",
        "a window within the neighbour",
        "a window over several ranks",
        "Gated DeltaNet",
        "Kimi Delta Attention",
        "MesaNet",
        "RetNet",
        "Mamba2",
    ],
)
def test_packed_documents_may_begin_on_any_rank(pool, name):
    for bounds in DOCUMENTS:
        for gap, _, _ in pool.run("layer_in_context", 4, make=LAYERS[name], batch=1, bounds=bounds):
            assert gap < 1e-12


CUTS = {
    "heads of every kind of layer": (2, {"tensor": 2}, "GKA-*-SWA-GDN-KDA-MESA-GLA-RET-LA-DN-M2"),
    "sequences of every kind of layer": (2, {"context": 2}, "GKA-*-SWA-GDN-KDA-MESA-GLA-RET-LA-DN-M2"),
    "rows and heads": (4, {"tensor": 2}, "GKA-*"),
    "rows and sequences": (4, {"context": 2}, "GKA-SWA-*"),
    "sequences and heads": (4, {"context": 2, "tensor": 2}, "GKA-*-GDN-M2"),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_run_that_is_cut_trains_as_one_process_does(pool, tmp_path, name):
    ranks, cut, pattern = CUTS[name]
    model = RECALL["model"] | {"hybrid_override_pattern": pattern, "num_hidden_layers": pattern.count("-") + 1}
    model |= {"sliding_window": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "mamba2_config": {"head_dim": 8}}
    settings = RECALL | {"model": model, "steps": 2, "eval_every": 2, "clip": 0.5}
    (tmp_path / "cut.json").write_text(json.dumps(settings))
    done = gka_train(tmp_path, "cut.json", "--set", "output=one")
    assert done.returncode == 0, done.stderr
    assignments = ["output=many", "checkpoint_activations=true"]
    settings = {"folder": tmp_path, "file": "cut.json", "assignments": assignments}
    assert pool.run("train_run", ranks, **settings, **cut) == [True] * ranks
    assert difference(tmp_path / "one", tmp_path / "many") < 1e-9


def test_a_cut_run_goes_on_uncut(pool, tmp_path):
    model = RECALL["model"] | {"hybrid_override_pattern": "GKA-*-GKA"}
    (tmp_path / "cut.json").write_text(json.dumps(RECALL | {"model": model, "steps": 8, "eval_every": 0}))
    assert gka_train(tmp_path, "cut.json", "--set", "output=one").returncode == 0
    settings = {"folder": tmp_path, "file": "cut.json", "assignments": ["output=many"]}
    assert pool.run("train_run", 4, stop_after=3, context=2, tensor=2, **settings) == [False] * 4
    assert pool.run("train_run", 2, stop_after=5, resume=True, **settings) == [False] * 2
    assert pool.run("train_run", 4, resume=True, tensor=2, **settings) == [True] * 4
    assert difference(tmp_path / "one", tmp_path / "many") < 1e-9


@pytest.mark.parametrize(
    ("changes", "cut", "sentence"),
    [
        ({}, {"tensor": 4}, "layer 0 has 2 k heads, which 4 tensor-parallel ranks cannot share"),
        (
            {"hybrid_override_pattern": "M2-*-*", "hidden_size": 24, "mamba2_config": {"head_dim": 4, "n_groups": 3}},
            {"tensor": 2},
            "layer 0 has n_groups 3, which 2 tensor-parallel ranks cannot share",
        ),
        (
            {"hybrid_override_pattern": "M2-*-*", "mamba2_config": {"head_dim": 32}},
            {"tensor": 2},
            "layer 0 has 1 heads, which 2 tensor-parallel ranks cannot share",
        ),
        ({"intermediate_size": 23}, {"tensor": 2}, "intermediate_size is 23, which 2 tensor-parallel ranks"),
    ],
)
def test_heads_that_cannot_be_cut_are_named(pool, tmp_path, changes, cut, sentence):
    (tmp_path / "cut.json").write_text(json.dumps(RECALL | {"model": RECALL["model"] | changes}))
    for said in pool.run("train_run", 4, folder=tmp_path, file="cut.json", **cut):
        assert sentence in str(said)


@pytest.mark.parametrize("dim", [0, 2], ids=["sequences", "heads"])
def test_the_operator_takes_distributed_tensors(pool, dim):
    options = {"iterations": 8, "output_final_state": True}
    for gap in pool.run("operator_on_dtensors", 2, dim=dim, **options):
        assert gap < 1e-12
