"""Tokens per second of training the 440M models at equal tokens per step: `gka bench train`, as a section of
docs/benchmarks.md with the targets beside it.

    python bench/train.py                       runs it here, on the GPU where there is one
    python bench/train.py --text FOLDER         on the token files of a folder (experiments/lm/pack.py unpack), after
                                                100 steps of learning from them: a section of its own. 440M on an H200
                                                learns for 100 s and is timed for 70; with --steps 6 --attention cuDNN
                                                for 45
    python bench/train.py --rows speed.jsonl    keeps each row as soon as it is measured
    python bench/train.py --from speed.jsonl    takes what was kept so, or `gka bench train … --json` wrote elsewhere
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common import ROOT, gka_rows, markdown, write_section

CONFIGS = ["configs/440m/gka.json"]
RATIOS = {4096: 0.8, 16384: 1.35, 65536: 3.0}  # of the tokens/s of attention, at least
TEXT_RATIOS = {4096: 0.9, 16384: 1.45, 65536: 3.6}  # the same on text after AFTER steps
AFTER = 100
TEXT_BYTES = 80e9  # at most
LEVEL = 0.05  # how far tokens/s may differ between lengths


def check(value: float, least: float | None) -> str:
    return f"{value:.2f}" + ("" if least is None else f" {'✓' if value >= least else '✗'} (≥ {least})")


def memory_of(row: dict, on_text: bool) -> str:
    text = f"{row['memory_bytes'] / 1e9:.1f}"
    if not on_text or not row["config"].endswith("/gka"):
        return text
    return text + (" ✓" if row["memory_bytes"] <= TEXT_BYTES else " ✗") + f" (≤ {TEXT_BYTES / 1e9:.0f})"


def row_of(row: dict, on_text: bool) -> list[str]:
    name = [row["config"], f"{row['length']:,}"]
    if "error" in row:
        return [*name, row["error"], *[""] * (6 if on_text else 5)]
    ratios = TEXT_RATIOS if on_text else RATIOS
    target = ratios.get(row["length"]) if row["config"].endswith("/gka") else None
    return [
        *name,
        f"{row['tokens_per_second']:,.0f}",
        f"{1e3 * row['seconds_per_step']:.0f}",
        check(row["ratio"], target) if "ratio" in row else "",
        f"{row['utilisation']:.1%}",
        memory_of(row, on_text),
        *([f"{row['loss']:.2f}"] if on_text else []),
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
    on_text = bool(told.get("text"))
    header = ["model", "T", "tokens/s", "ms/step", "× attention", "MFU", "memory, GB"]
    header += ["loss", "attention by"] if on_text else ["attention by"]
    learned = (
        f" Tokens of {', '.join(told['text'])}; every model has learned from {told['after']} steps of them before, and "
        "learns on."
        if on_text
        else ""
    )
    return "\n".join(
        [
            f"## Training{' on text' if on_text else ''}, {told['device'].split(':')[0].upper()}",
            "",
            f"`python bench/train.py{' --text FOLDER' if on_text else ''}` on {told['date']}: {told['machine']}; "
            f"{told['dtype']}, float32 weights, "
            f"{told['batch_tokens']:,} tokens per step at every length; a matrix product runs at "
            f"{told['matrix_product_flops'] / 1e12:.3g} TFLOP/s.",
            "",
            "Whole steps of `gka train`, optimiser included; models take turns; medians. `gka bench train --help` says "
            f"what the columns mean and how FLOP are counted.{learned}",
            "",
            markdown(header, [row_of(row, on_text) for row in told["rows"]]),
            "",
            levels(told["rows"]),
        ]
    )


def token_files(folder: Path) -> list[str]:
    """Those to learn from, wherever they lie in the folder."""
    files = sorted(str(path) for path in folder.rglob("*.tokens") if not path.name.endswith(".test.tokens"))
    if not files:
        raise SystemExit(f"{folder} has no token files (*.tokens); `gka tokenize` makes them")
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", metavar="FILE", help="JSON of an earlier run; default: run it now")
    parser.add_argument("--text", metavar="FOLDER", type=Path, help="token files to learn from; default: random tokens")
    parser.add_argument("--after", metavar="N", type=int, default=AFTER, help="steps of learning (default: 100)")
    parser.add_argument("--steps", help="that count, of each model and length, as `gka bench train` takes them")
    parser.add_argument("--attention", help="torch's kernel, as `gka bench train` takes it")
    parser.add_argument("--lengths", help="as `gka bench train` takes them")
    parser.add_argument("--rows", metavar="FILE", type=Path, help="a line of JSON for each row, as it is measured")
    parser.add_argument("--write", action="store_true", help="put the section into docs/benchmarks.md")
    options = parser.parse_args()
    arguments = ["bench", "train", *(str(ROOT / config) for config in CONFIGS)]
    for name in ("steps", "attention", "lengths"):
        if value := getattr(options, name):
            arguments += [f"--{name}", value]
    if options.text is not None:
        arguments += ["--after", str(options.after), "--text", *token_files(options.text)]
    told = gka_rows(arguments, options.source, options.rows)
    text = section(told)
    print(text)
    if options.write:
        kind = "train text" if told.get("text") else "train"
        write_section(ROOT / "docs" / "benchmarks.md", f"{kind} {told['device'].split(':')[0]}", text)


if __name__ == "__main__":
    main()
