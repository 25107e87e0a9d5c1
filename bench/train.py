"""Tokens per second of training the 440M models at equal tokens per step: `gka bench train`, as a section of
docs/benchmarks.md with the targets beside it.

    python bench/train.py                       runs it here, on the GPU where there is one
    python bench/train.py --from speed.json     takes what `gka bench train … --json` wrote elsewhere
"""

from __future__ import annotations

import argparse

from common import ROOT, gka_json, markdown, write_section

CONFIGS = ["configs/440m/gka.json"]
RATIOS = {4096: 0.8, 16384: 1.35, 65536: 3.0}  # of the tokens/s of attention, at least
LEVEL = 0.05  # how far tokens/s may differ between lengths


def check(value: float, least: float | None) -> str:
    return f"{value:.2f}" + ("" if least is None else f" {'✓' if value >= least else '✗'} (≥ {least})")


def row_of(row: dict) -> list[str]:
    name = [row["config"], f"{row['length']:,}"]
    if "error" in row:
        return [*name, row["error"], "", "", "", "", ""]
    target = RATIOS.get(row["length"]) if row["config"].endswith("/gka") else None
    return [
        *name,
        f"{row['tokens_per_second']:,.0f}",
        f"{1e3 * row['seconds_per_step']:.0f}",
        check(row["ratio"], target) if "ratio" in row else "",
        f"{row['utilisation']:.1%}",
        f"{row['memory_bytes'] / 1e9:.1f}",
        row.get("attention_kernel", ""),
    ]


def levels(rows: list[dict]) -> str:
    """How level the speed of each model is over the lengths."""
    sentences = []
    for name in dict.fromkeys(row["config"] for row in rows):
        speeds = [row["tokens_per_second"] for row in rows if row["config"] == name and "error" not in row]
        if len(speeds) < 2:
            continue
        apart = 1 - min(speeds) / max(speeds)
        mark = f" {'✓' if apart <= LEVEL else '✗'} (at most {LEVEL:.0%})" if name.endswith("/gka") else ""
        sentences.append(f"{name} {apart:.1%}{mark}")
    return "Tokens/s over the lengths lie apart by at most: " + ", ".join(sentences) + "." if sentences else ""


def section(told: dict) -> str:
    header = ["model", "T", "tokens/s", "ms/step", "× attention", "MFU", "memory, GB", "attention by"]
    return "\n".join(
        [
            f"## Training, {told['device'].split(':')[0].upper()}",
            "",
            f"`python bench/train.py` on {told['date']}: {told['machine']}; {told['dtype']}, float32 weights, "
            f"{told['batch_tokens']:,} tokens per step at every length; a matrix product runs at "
            f"{told['matrix_product_flops'] / 1e12:.3g} TFLOP/s.",
            "",
            "Whole steps of `gka train`, optimiser included; models take turns; medians. `gka bench train --help` says "
            "what the columns mean and how FLOP are counted.",
            "",
            markdown(header, [row_of(row) for row in told["rows"]]),
            "",
            levels(told["rows"]),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", metavar="FILE", help="JSON of an earlier run; default: run it now")
    parser.add_argument("--write", action="store_true", help="put the section into docs/benchmarks.md")
    options = parser.parse_args()
    told = gka_json(["bench", "train", *(str(ROOT / config) for config in CONFIGS), "--json"], options.source)
    text = section(told)
    print(text)
    if options.write:
        write_section(ROOT / "docs" / "benchmarks.md", f"train {told['device'].split(':')[0]}", text)


if __name__ == "__main__":
    main()
