"""Gated KalmaNet with one choice changed: what experiments/ablations trains on text, experiments/mqar on recall."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Changed:
    title: str
    choices: dict[str, object]  # keys of gka_config


CHANGED = {
    "no-decay": Changed("no decay", {"use_forgetting_gate": False, "use_forgetting_gate_kk": False}),
    "no-alpha": Changed("no α connection", {"use_alpha_connection": False}),
    "no-beta": Changed("β = 1 (the paper's)", {"use_beta_gate": False}),
    "beta": Changed("β in place of β²", {"beta_weight": "paper"}),
    "a-0.01": Changed("a = 0.01", {"ridge_strength": 0.01}),
    "a-0.05": Changed("a = 0.05", {"ridge_strength": 0.05}),
    "a-0.1": Changed("a = 0.1", {"ridge_strength": 0.1}),
    "a-0.3": Changed("a = 0.3", {"ridge_strength": 0.3}),
    "a-1": Changed("a = 1", {"ridge_strength": 1.0}),
    "constant": Changed("constant λ = 0.25", {"ridge_mode": "constant", "ridge_strength": 0.25}),
    "no-solve": Changed("no solve: the query itself reads the values", {"num_iter": 0}),
    "iterations-5": Changed("5 iterations", {"num_iter": 5}),
    "iterations-10": Changed("10 iterations", {"num_iter": 10}),
    "iterations-15": Changed("15 iterations", {"num_iter": 15}),
    "no-gate": Changed("no gate on the output", {"use_gate": False}),
}
