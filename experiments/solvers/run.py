"""Solvers: which iteration answers a ridge regression in low precision, and whose gradient can be trusted?

  residuals   ‖(H̃ + aI)ξ_i − q‖ after i = 0 … 60 steps, float32 and every operation rounded to bfloat16, a in --ridges
  layer       error of dq and dk of one layer against an exact solve in float64, implicit and through the iterations
  model       the same for all weights of a 5-layer model
  divisors    what one divides by to run Chebyshev's and conjugate gradient's recurrences backwards

Random keys and queries of unit length, no forgetting. --paper takes the paper's sizes (B8 T2048 H8 D128; 5 layers with
2 heads of 128, vocabulary 5,000, T2048) and wants a GPU; the default is small enough for a CPU. Every part is kept in
--out/results.json as it is finished; --draw draws what is there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from pathlib import Path

import torch
from methods import METHODS, Implicit, conjugate_gradient, exact, exactly, solve, states, to_bfloat16, weights
from model import Model

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

from console import Progress, run_program, table, write_json  # noqa: E402

ARITHMETIC = {"float32": exactly, "bfloat16": to_bfloat16}
COUNTS = (1, 2, 5, 10, 20, 30, 60)  # iterations whose gradients are looked at
SMALL = {"batch": 1, "tokens": 96, "heads": 2, "width": 32, "gradient_batch": 1, "vocabulary": 500}
PAPER = {"batch": 8, "tokens": 2048, "heads": 8, "width": 128, "gradient_batch": 2, "vocabulary": 5000}
MODEL_HEADS, LAYERS = 2, 5


def units(*shape: int, generator: torch.Generator, device: str) -> torch.Tensor:
    vectors = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return (vectors / vectors.norm(dim=-1, keepdim=True)).to(device)


def problems(sizes: dict, count: int, device: str):
    """k, q, v and the gradient of o, of all heads in float64; one sequence at a time, for its states are large."""
    for sequence in range(count):
        generator = torch.Generator().manual_seed(sequence)
        shape = (sizes["heads"], sizes["tokens"], sizes["width"])
        yield [units(*shape, generator=generator, device=device) for _ in range(4)]


def error(got: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    """‖got − wanted‖² and ‖wanted‖²."""
    return (got.double() - wanted).square().sum().item(), wanted.square().sum().item()


class Mean:
    """Relative errors over several sequences."""

    def __init__(self):
        self.sums: dict[tuple, list[float]] = {}

    def add(self, key: tuple, got: torch.Tensor, wanted: torch.Tensor) -> None:
        found = self.sums.setdefault(key, [0.0, 0.0])
        for i, part in enumerate(error(got, wanted)):
            found[i] += part

    def result(self) -> list[dict]:
        names = ("method", "gradient", "arithmetic", "iterations", "of")
        return [dict(zip(names, key, strict=True)) | {"error": (a / b) ** 0.5} for key, (a, b) in self.sums.items()]


# ---- Residuals


def residuals(options, sizes) -> list[dict]:
    cells = {
        (name, method, a): [0.0] * (options.iterations + 1)
        for name in ARITHMETIC
        for method in METHODS
        for a in options.ridges
    }
    worst = {key: [0.0] * (options.iterations + 1) for key in cells}
    count = sizes["batch"] * sizes["heads"] * sizes["tokens"]
    with Progress(len(cells) * sizes["batch"], "residuals") as progress, torch.no_grad():
        for k, q, _, _ in problems(sizes, sizes["batch"], options.device):
            h64 = states(k)[0]
            h32, q32 = h64.float(), q.float()
            for name, method, a in cells:
                rounded = ARITHMETIC[name]
                steps = METHODS[method](rounded(h32), rounded(q32), a, options.iterations, rounded)
                for i, x in enumerate(steps):
                    x64 = x.double()
                    left = (torch.matmul(h64, x64.unsqueeze(-1)).squeeze(-1) + a * x64 - q).norm(dim=-1)
                    cells[name, method, a][i] += left.sum().item() / count
                    worst[name, method, a][i] = max(worst[name, method, a][i], left.max().item())
                progress.step(f"{method}, {name}, a {a:g}")
    return [
        {
            "arithmetic": name,
            "method": method,
            "ridge": a,
            "mean": cells[name, method, a],
            "max": worst[name, method, a],
        }
        for name, method, a in cells
    ]


# ---- One layer


def gradients(k, q, v, do, answer) -> list[torch.Tensor]:
    """dq and dk of Σ do·o with o_t = U_tᵀ x_t; `answer` solves."""
    k, q = (tensor.detach().requires_grad_() for tensor in (k, q))
    h, norm = states(k)
    x = answer(h, q) / norm.unsqueeze(-1)
    u = torch.cumsum(k.unsqueeze(-1) * v.unsqueeze(-2), dim=-3)
    o = torch.matmul(x.unsqueeze(-2), u).squeeze(-2)
    return list(torch.autograd.grad((o * do).sum(), (q, k)))


def ways(a: float):
    """Every (method, gradient, arithmetic) and how it answers with r iterations."""
    for method in ("conjugate gradient", "conjugate gradient + 1e-6", "Chebyshev"):
        for name, rounded in ARITHMETIC.items():
            yield (
                (method, "implicit", name),
                lambda h, q, r, m=method, f=rounded: Implicit.apply(h, q, a, METHODS[m], r, f),
            )
        yield (method, "unrolled", "float32"), lambda h, q, r, m=method: solve(METHODS[m], h, q, a, r)


def layer(options, sizes) -> list[dict]:
    a, mean = options.ridge, Mean()
    with Progress(9 * len(COUNTS) * sizes["gradient_batch"], "one layer") as progress:
        for sequence in problems(sizes, sizes["gradient_batch"], options.device):
            wanted = gradients(*sequence, lambda h, q: exact(h, q, a))
            single = [tensor.float() for tensor in sequence]
            found = gradients(*single, lambda h, q: exact(h, q, a))
            for of, got, right in zip(("dq", "dk"), found, wanted, strict=True):
                mean.add(("exact", "implicit", "float32", 0, of), got, right)
            for way, answer in ways(a):
                for r in COUNTS:
                    found = gradients(*single, lambda h, q, answer=answer, r=r: answer(h, q, r))
                    for of, got, right in zip(("dq", "dk"), found, wanted, strict=True):
                        mean.add((*way, r, of), got, right)
                    progress.step(f"{way[0]}, {way[1]}")
    return mean.result()


# ---- A model of five layers


def model(options, sizes) -> list[dict]:
    a, mean = options.ridge, Mean()
    torch.manual_seed(0)
    made = Model(LAYERS, MODEL_HEADS, sizes["width"], sizes["vocabulary"]).double().to(options.device)
    tokens = torch.randint(sizes["vocabulary"], (sizes["tokens"] + 1,)).to(options.device)

    def weights_of(network, answer) -> torch.Tensor:
        loss = network(tokens, answer)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(network.parameters()))])

    wanted = weights_of(made, lambda h, q: exact(h, q, a))
    single = made.float()
    mean.add(("exact", "implicit", "float32", 0, "weights"), weights_of(single, lambda h, q: exact(h, q, a)), wanted)
    with Progress(9 * len(COUNTS), "five layers") as progress:
        for way, answer in ways(a):
            for r in COUNTS:
                found = weights_of(single, lambda h, q, answer=answer, r=r: answer(h, q, r))
                mean.add((*way, r, "weights"), found, wanted)
                progress.step(f"{way[0]}, {way[1]}")
    return mean.result()


# ---- Divisors


def divisors(options, sizes) -> list[dict]:
    """What a step is divided by to get ξ_{i−2} back: Chebyshev's ω_i − 1; of conjugate gradient, written with three
    terms too, length_i β_i / length_{i−1}, over all systems."""
    found = [
        {"method": "Chebyshev", "ridge": a, "divisors": [w - 1 for w in weights(a, options.iterations)[1:]]}
        for a in options.ridges
    ]
    k, q, _, _ = next(iter(problems(sizes, 1, options.device)))
    h = states(k)[0].float()
    for a in options.ridges:
        steps: list = []
        for _ in conjugate_gradient(h, q.float(), a, options.iterations, steps=steps):
            pass
        low, high = [], []
        for (before, _), (length, _), (_, ratio) in zip(steps, steps[1:], steps, strict=False):
            values = (length * ratio / before).abs()
            values = values[values.isfinite() & (values > 0)]
            low.append(values.min().item() if len(values) else None)
            high.append(values.max().item() if len(values) else None)
        found.append({"method": "conjugate gradient", "ridge": a, "low": low, "high": high})
    return found


PARTS = {"residuals": residuals, "layer": layer, "model": model, "divisors": divisors}


def brief(value):
    """With five digits."""
    if isinstance(value, dict):
        return {key: brief(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [brief(entry) for entry in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def summarise(results: dict) -> None:
    rows = []
    for part in ("layer", "model"):
        for line in results.get(part, []):
            if line["iterations"] in (0, 10, 30, 60):
                what = f"{line['method']}, {line['gradient']}, {line['arithmetic']}"
                rows.append([what, line["of"], str(line["iterations"] or "–"), f"{line['error']:.1e}"])
    if rows:
        print(table(["gradient", "of", "iterations", "error"], rows, left=2))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--paper", action="store_true", help="the paper's sizes")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--ridges", nargs="+", type=float, default=[0.01, 0.02, 0.05, 0.1])
    parser.add_argument("--ridge", type=float, default=0.02, help="of the gradients (0.02)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--draw", action="store_true", help="compute nothing: draw what is there")
    parser.add_argument("--out", default="out/solvers")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    out, sizes = Path(options.out), PAPER if options.paper else SMALL
    file = out / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    torch.backends.cuda.matmul.allow_tf32 = False
    if not options.draw:
        for part in options.parts:
            start = time.monotonic()
            results[part] = PARTS[part](options, sizes)
            machine = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
            about = {"sizes": sizes, "machine": machine, "date": datetime.date.today().isoformat()}
            results["about"] = about | {"ridge": options.ridge, "iterations": options.iterations}
            write_json(file, brief(results))
            print(f"solvers: {part} in {time.monotonic() - start:.1f} s", file=sys.stderr)
    summarise(results)
    from plot import draw_all  # here: a machine that only computes may have no matplotlib

    draw_all(results, out)
    print(f"{out} has the figures and results.json.")
    return 0


if __name__ == "__main__":
    run_program(main)
