"""Forward and backward of one layer against the length, as the paper draws it: `gka bench layer` as a picture and a
section of docs/benchmarks.md.

    python bench/layer.py                       runs it here, on the GPU where there is one
    python bench/layer.py --rows layer.jsonl --lengths 1k,4k,16k,64k
                                                keeps each row as soon as it is measured: all seven layers at all
                                                lengths are 35 s on an H200
    python bench/layer.py --from layer.jsonl    takes what was kept so, or `gka bench layer … --json` wrote elsewhere
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from common import ROOT, gka_rows, markdown, write_section

sys.path.insert(0, str(ROOT / "python" / "gka"))
import _plot
from palette import GREY, LOOKS, TITLES, Look

GLA = "gated linear attention"
LAYERS = "*,DN,GDN,M2,KDA,GLA,GKA"  # all that have kernels on a GPU
ON_A_CPU = ["--batch", "1", "--heads", "2", "--head-dim", "64", "--repetitions", "5"]
CPU_LENGTHS = "256,512,1k,2k,4k"


def curves(told: dict) -> dict[str, dict[int, float]]:
    """Milliseconds by name and length, of what was measured."""
    result: dict[str, dict[int, float]] = {}
    for row in told["rows"]:
        points = result.setdefault(row["name"], {})
        if "milliseconds" in row:
            points[row["length"]] = row["milliseconds"]
    return result


def draw(told: dict, output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    lengths = sorted({row["length"] for row in told["rows"]})
    with plt.rc_context(_plot.STYLE):
        figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
        for name, points in curves(told).items():
            look = LOOKS[TITLES[name]] if name in TITLES else Look(GREY, "o")
            width = 2.6 if name == "Gated KalmaNet" else 1.8
            axes.plot(points.keys(), points.values(), **look.style, markersize=5.5, linewidth=width, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        shape = f"batch {told['batch']}, {told['heads']} heads of {told['head_dim']}"
        axes.set(xlabel="tokens per sequence", ylabel="forward + backward (ms)", title=f"One layer, {shape}")
        axes.title.set_size(11)
        axes.legend()
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output)
        plt.close(figure)


def section(told: dict, picture: str) -> str:
    names = list(curves(told))
    cells = {(row["name"], row["length"]): row for row in told["rows"]}
    rows = []
    for length in sorted({row["length"] for row in told["rows"]}):
        row = [cells[name, length] for name in names]
        shown = [f"{cell['milliseconds']:.2f}" if "milliseconds" in cell else cell["error"] for cell in row]
        rows.append([f"{length:,}", *shown])
    kernels = sorted({row["attention_kernel"] for row in told["rows"] if "attention_kernel" in row})
    date = told.get("date", time.strftime("%Y-%m-%d"))
    attention = f" Attention by torch's fastest kernel at each length ({', '.join(kernels)})." if kernels else ""
    return "\n".join(
        [
            f"## One layer, {told['device'].split(':')[0].upper()}",
            "",
            f"`python bench/layer.py` on {date}: {told['machine']}; {told['dtype']}, batch "
            f"{told['batch']}, {told['heads']} heads of {told['head_dim']}. Forward + backward of a whole layer, "
            f"projections included, in ms; layers take turns; medians.{attention} Gated DeltaNet has values twice as "
            "wide as keys, so its memory is as large as GKA's two. Mamba2 is twice as wide, in heads of 64 whose "
            "common keys are repeated in memory."
            + (" Gated linear attention has half as many heads, with values twice as wide." if GLA in names else ""),
            "",
            markdown(["T", *names], rows),
            "",
            f"![Time of one layer against the length]({picture})",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", metavar="FILE", help="JSON of an earlier run; default: run it now")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, smaller")
    parser.add_argument("--layers", default=LAYERS, help=f"on a GPU, as `gka bench layer` takes them ({LAYERS})")
    parser.add_argument("--lengths", help="as `gka bench layer` takes them")
    parser.add_argument("--rows", metavar="FILE", type=Path, help="a line of JSON for each row, as it is measured")
    parser.add_argument("-o", "--output", type=Path, help="the picture; default: docs/images/layer-DEVICE.png")
    parser.add_argument("--write", action="store_true", help="put the section into docs/benchmarks.md")
    options = parser.parse_args()
    where = ["--device", "cpu", *ON_A_CPU] if options.cpu else ["--layers", options.layers]
    lengths = options.lengths or (CPU_LENGTHS if options.cpu else None)
    where += ["--lengths", lengths] if lengths else []
    told = gka_rows(["bench", "layer", *where], options.source, options.rows)
    device = told["device"].split(":")[0]
    picture = options.output or ROOT / "docs" / "images" / f"layer-{device}.png"
    draw(told, picture)
    text = section(told, f"images/{picture.name}")
    print(text)
    if options.write:
        write_section(ROOT / "docs" / "benchmarks.md", f"layer {device}", text)


if __name__ == "__main__":
    main()
