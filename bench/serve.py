"""Tokens per second of the engine behind `gka serve`: `gka bench serve`, as a section of docs/benchmarks.md with the
targets beside it.

    python bench/serve.py                              runs it here: 440M, on the GPU where there is one
    python bench/serve.py --from 440m.json 8b.json     takes what `gka bench serve … --json` wrote elsewhere
"""

from __future__ import annotations

import argparse

from common import ROOT, gka_json, markdown, write_section

ARGUMENTS = [str(ROOT / "configs/440m/gka.json"), "--batches", "1,4,16", "--prefill", "1k", "--http", "16"]

# Tokens/s at least, on a GPU: by model, sequences and context; None: any number of sequences, the best counts.
TOKENS = {
    ("440m/gka", 1, 64): 2200,
    ("440m/gka", 128, 64): 35000,
    ("8b/hybrid", None, 16384): 1.3 * 2205,
    ("8b/hybrid", None, 32768): 1.3 * 1247,
    ("8b/hybrid", None, 65536): 1.3 * 599,
    ("8b/hybrid", None, 131072): 1.3 * 306,
}
OF_COPY = 0.6  # of one sequence on the CPU
OF_PRODUCT = 0.5
OF_ENGINE = 0.95


def mark(text: str, value: float, least: float | None, target: str) -> str:
    return text if least is None else f"{text} {'✓' if value >= least else '✗'} (≥ {target})"


def name_of(told: dict) -> str:
    return "/".join(told["model"].removesuffix(".json").split("/")[-2:])


def wanted(told: dict, row: dict) -> float | None:
    if told["device"] == "cpu" or row["what"] != "decode":
        return None
    name = name_of(told)
    exact = TOKENS.get((name, row["sequences"], row["context"]))
    if exact is not None:
        return exact
    best = max(
        r.get("tokens_per_second", 0) for r in told["rows"] if r["what"] == "decode" and r["context"] == row["context"]
    )
    return TOKENS.get((name, None, row["context"])) if row.get("tokens_per_second") == best else None


def row_of(told: dict, row: dict) -> list[str]:
    begin = [name_of(told), told["weights"], row["what"], f"{row['sequences']:,}", f"{row['context']:,}"]
    if "error" in row:
        return [*begin, row["error"], "", "", ""]
    least = wanted(told, row)
    speed = mark(f"{row['tokens_per_second']:,.0f}", row["tokens_per_second"], least, f"{least or 0:,.0f}")
    cpu = told["device"] == "cpu"
    share = ""
    if "of_copy" in row:
        target = OF_COPY if cpu and row["sequences"] == 1 else None
        share = mark(f"{row['of_copy']:.0%} of a copy's bytes", row["of_copy"], target, f"{OF_COPY:.0%}")
    if "of_product" in row:
        share = mark(
            f"{row['of_product']:.0%} of the product's rate", row["of_product"], OF_PRODUCT, f"{OF_PRODUCT:.0%}"
        )
    if "of_engine" in row:
        target = OF_ENGINE if row["sequences"] == 128 else None
        share = mark(f"{row['of_engine']:.1%} of the engine's", row["of_engine"], target, f"{OF_ENGINE:.0%}")
    time = f"{row['milliseconds']:.2f}" if "milliseconds" in row else ""
    return [*begin, speed, time, f"{row['bytes'] / 1e9:.2f}" if "bytes" in row else "", share]


def section(all_told: list[dict]) -> str:
    first = all_told[0]
    header = ["model", "weights", "", "sequences", "context", "tokens/s", "ms", "GB a step", ""]
    machines = "; ".join(
        f"{name_of(told)} {told['weights']}: a copy moves {told['copy_bytes_per_second'] / 1e9:.3g} GB/s, a matrix "
        f"product runs at {told['matrix_product_flops'] / 1e12:.3g} TFLOP/s"
        for told in all_told
    )
    return "\n".join(
        [
            f"## Serving, {first['device'].split(':')[0].upper()}",
            "",
            f"`python bench/serve.py` on {first['date']}: {first['machine']}; {first['dtype']} activations, random "
            f"weights. {machines}.",
            "",
            "Decoding counts scheduler, step and sampling; `engine` and `http` the same streams given to the engine "
            "and over HTTP in one process. `gka bench serve --help` says what the columns mean.",
            "",
            markdown(header, [row_of(told, row) for told in all_told for row in told["rows"]]),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="sources", nargs="+", metavar="FILE", help="JSON of earlier runs")
    parser.add_argument("--write", action="store_true", help="put the section into docs/benchmarks.md")
    options = parser.parse_args()
    if options.sources:
        told = [gka_json([], source) for source in options.sources]
    else:
        told = [gka_json(["bench", "serve", *ARGUMENTS, "--json"])]
        if told[0]["device"] == "cpu":
            told.append(gka_json(["bench", "serve", *ARGUMENTS, "--weights", "int8", "--json"]))
    text = section(told)
    print(text)
    if options.write:
        write_section(ROOT / "docs" / "benchmarks.md", f"serve {told[0]['device'].split(':')[0]}", text)


if __name__ == "__main__":
    main()
