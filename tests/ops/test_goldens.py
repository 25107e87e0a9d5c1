"""The goldens of tests/goldens: outputs within 1e-12, gradients within 1e-10."""

from pathlib import Path

import pytest
import torch
from cases import relative_error
from safetensors import safe_open

import gka

FOLDER = Path(__file__).resolve().parents[1] / "goldens" / "ops"
NAMES = ("small_plain", "gated_beta_state")
# How the call differentiates, and under which prefix the golden has those gradients.
KINDS = (("chebyshev", "unrolled", "chebyshev"), ("chebyshev", "implicit", "implicit"), ("exact", "implicit", "exact"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("solver", "gradient", "prefix"), KINDS, ids=[prefix for *_, prefix in KINDS])
def test_outputs_states_and_gradients_are_those_of_the_golden(name, solver, gradient, prefix):
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        golden = {key: file.get_tensor(key).double() for key in file.keys()}  # noqa: SIM118 (not a dict)
        metadata = file.metadata()
    leaves = {
        key: golden[key].requires_grad_()
        for key in ("q", "k", "v", "log_decay", "beta", "alpha", "h0", "u0")
        if key in golden
    }
    tensors = {key: leaf for key, leaf in leaves.items() if key not in ("h0", "u0")}
    o, (h, u) = gka.gated_kalmanet(
        **tensors,
        ridge=float(metadata["ridge"]),
        iterations=int(metadata["iterations"]),
        solver=solver,
        gradient=gradient,
        initial_state=(leaves["h0"], leaves["u0"]) if "h0" in leaves else None,
        output_final_state=True,
    )
    output_prefix = "exact" if solver == "exact" else "chebyshev"
    assert relative_error(o, golden[f"{output_prefix}.o"]) < 1e-12
    assert relative_error(h, golden["h"]) < 1e-12
    assert relative_error(u, golden["u"]) < 1e-12

    gradients = torch.autograd.grad((o, h, u), list(leaves.values()), [golden["do"], golden["dh"], golden["du"]])
    for key, got in zip(leaves, gradients, strict=True):
        want = golden[f"{prefix}.d{key}"]
        if key == "h0":
            want = (want + want.mT) / 2
        assert relative_error(got, want) < 1e-10, key


@pytest.mark.parametrize("name", NAMES)
def test_the_report_has_the_solutions_of_the_golden(name):
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        golden = {key: file.get_tensor(key).double() for key in file.keys()}  # noqa: SIM118 (not a dict)
        metadata = file.metadata()
    report = gka.gated_kalmanet_report(
        *(golden.get(key) for key in ("q", "k", "v", "log_decay", "beta", "alpha")),
        ridge=float(metadata["ridge"]),
        iterations=int(metadata["iterations"]),
        initial_state=(golden["h0"], golden["u0"]) if "h0" in golden else None,
    )
    assert relative_error(report["x"], golden["chebyshev.x"]) < 1e-12
