"""Draws the curves of training runs into one picture: the program that ``gka plot`` starts.

It imports nothing of gka, so that a plot does not wait for torch.
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path

# Name on the command line: (the key per step, the key per evaluation, the axis' label, logarithmic).
QUANTITIES = {
    "loss": ("loss", "eval_loss", "loss", False),
    "accuracy": ("accuracy", "eval_accuracy", "accuracy", False),
    "learning_rate": ("learning_rate", None, "learning rate", False),
    "gradient_norm": ("gradient_norm", None, "length of the gradient", True),
    "tokens_per_second": ("tokens_per_second", None, "tokens per second", False),
    "images_per_second": ("images_per_second", None, "images per second", False),
    "memory": ("memory_bytes", None, "memory", False),
}
UNITS = {"memory": "B"}  # with their thousands: GB, not 1e8
HORIZONTAL = {
    "step": ("step", "step"),
    "tokens": ("tokens", "tokens"),
    "images": ("images", "images"),
    "epoch": ("epoch", "epoch"),
    "time": ("seconds", "time (s)"),
}
# What stands behind a quantity's name, by what a run learned from (`learns`); nothing where runs differ.
DETAILS = {
    "loss": {"images": "nats per image", "task": "nats per token", "text": "nats per token"},
    "accuracy": {"images": "the likeliest class", "task": "exact match", "text": "next token"},
}

# Colours that stay apart for readers who do not see red and green (Okabe and Ito).
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
STYLE = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "axes.axisbelow": True,
    "axes.edgecolor": "#888888",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "figure.dpi": 150,
}


def fail(sentence):
    sys.exit(f"gka plot: {sentence}")


def read_run(folder):
    """The lines of a run's metrics; a kill may have left half a line at the end."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        fail(f"'{folder}' holds no run: it has no metrics.jsonl; `gka runs` lists the runs there are.")
    lines = []
    try:
        texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        fail(f"cannot read '{path}': {error.strerror}.")
    for text in texts:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            lines.append(line)
    if not lines:
        fail(f"the run '{folder}' has not finished a step yet; plot it later.")
    return lines


def short_names(folders):
    """The last part of each path, with as many parts before it as are needed to tell the paths apart."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return names


def as_label(name):
    """As it is shown: matplotlib sees formulas between dollars, and leaves names with a _ in front out of legends."""
    shown = name.encode("utf-8", "replace").decode().replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def is_number(value):
    """One that can be drawn: damaged metrics have other things in its place."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def series(lines, across, key):
    points = [(line.get(across), line.get(key)) for line in lines]
    points = [(x, y) for x, y in points if is_number(x) and is_number(y)]
    return [x for x, _ in points], [y for _, y in points]


def smooth(values, reach):
    """The mean of each value and up to `reach` on either side: centred, so a falling curve is not drawn late."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    ranges = [(max(0, i - reach), min(len(values), i + reach + 1)) for i in range(len(values))]
    return [(sums[high] - sums[low]) / (high - low) for low, high in ranges]


def draw(axes, lines, name, colour, across, quantity):
    """One run in one panel: its steps as a smoothed line over a faint one, its evaluations as dots."""
    per_step, per_evaluation, _, _ = QUANTITIES[quantity]
    x, y = series(lines, across, per_step)
    evaluated = series(lines, across, per_evaluation) if per_evaluation else ([], [])
    label = as_label(name)
    if y:
        noisy = quantity != "learning_rate" and len(y) > 50
        if noisy:
            axes.plot(x, y, color=colour, alpha=0.2, linewidth=0.8)
        axes.plot(x, smooth(y, len(y) // 100) if noisy else y, color=colour, linewidth=1.8, label=label)
        label = None
    if evaluated[1]:
        style = "--" if y else "-"
        axes.plot(*evaluated, style, marker="o", markersize=4, color=colour, linewidth=1.2, label=label)
    return bool(y), bool(evaluated[1])


def axis_in_powers(axis, unit=""):
    """25k and 100 MB; half of an epoch stays 0.5, where thousandths would be 500m."""
    from matplotlib.ticker import EngFormatter, FuncFormatter

    powers = EngFormatter(unit, sep=" " if unit else "")
    axis.set_major_formatter(FuncFormatter(lambda x, place: powers(x, place) if unit or abs(x) >= 1 else f"{x:g}"))


def learns(folder):
    """From images, from a task, whose accuracy counts whole answers, or from text; None where nothing says it."""
    try:
        settings = json.loads((folder / "train.json").read_text(encoding="utf-8"))
        if settings.get("model", {}).get("model_type") == "gka_vision":
            return "images"
        return "task" if "task" in (settings.get("eval_data") or settings["data"]) else "text"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def label_of(quantity, folders):
    label = QUANTITIES[quantity][2]
    details = {DETAILS.get(quantity, {}).get(learns(folder)) for folder in folders}
    detail = details.pop()
    return label if details or detail is None else f"{label} ({detail})"


def save(figure, output):
    """Beside its name first: a disk that is full keeps the picture that was there. Returns its name."""
    if output.is_dir():
        fail(f"'{output}' is a folder; --output takes the name of a picture, such as {output / 'curves.png'}.")
    path = output if output.suffix else output.with_name(output.name + ".png")
    beside = path.with_name(".writing-" + path.name)
    try:
        figure.savefig(beside)
        beside.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # where nothing could be written nothing can be removed either
            beside.unlink()
        if not isinstance(error, OSError | ValueError):
            raise
        fail(f"cannot write '{path}': {getattr(error, 'strerror', None) or error}")
    return path


def plot(folders, output, across, quantities):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = dict(zip(short_names(folders), map(read_run, folders), strict=True))
    if not quantities:
        measured = any("eval_accuracy" in line for lines in runs.values() for line in lines)
        quantities = ["loss", "accuracy"] if measured else ["loss"]
    key, label = HORIZONTAL[across]
    if not any(is_number(line.get(key)) for lines in runs.values() for line in lines):
        fail(f"none of the runs counts '{across}'; --x takes {', '.join(HORIZONTAL)}.")
    with plt.rc_context(STYLE):
        across_page = min(3, len(quantities))
        down = -(-len(quantities) // across_page)
        figure, panels = plt.subplots(
            down, across_page, figsize=(6.4 * across_page, 4.2 * down), squeeze=False, layout="constrained"
        )
        for axes in panels.flat[len(quantities) :]:
            axes.remove()
        for axes, quantity in zip(panels.flat, quantities, strict=False):
            drawn = [
                draw(axes, lines, name, COLOURS[i % len(COLOURS)], key, quantity)
                for i, (name, lines) in enumerate(runs.items())
            ]
            if not any(map(any, drawn)):
                fail(f"none of the runs has measured '{quantity}'; leave it out of --y.")
            if all(map(any, zip(*drawn, strict=True))):
                axes.plot([], [], color="#888888", linewidth=1.8, label="training")
                axes.plot([], [], "--", marker="o", markersize=4, color="#888888", linewidth=1.2, label="evaluation")
            axes.set(xlabel=label, ylabel=label_of(quantity, folders))
            axes.set_xlim(left=0)
            if quantity == "accuracy":
                axes.set_ylim(-0.02, 1.02)
            if QUANTITIES[quantity][3]:
                axes.set_yscale("log")
            axis_in_powers(axes.xaxis)
            if quantity in UNITS:
                axis_in_powers(axes.yaxis, UNITS[quantity])
        handles, names = panels[0][0].get_legend_handles_labels()
        if len(runs) <= 6:
            panels[0][0].legend(handles, names)
        else:
            figure.legend(handles, names, loc="outside right center")
        path = save(figure, output)
    steps = [line["step"] for lines in runs.values() for line in lines if is_number(line.get("step"))]
    what = ", ".join(quantities).replace("_", " ")
    print(f"{path}: {what} of {len(runs)} run{'s' if len(runs) > 1 else ''}, up to step {max(steps, default=0)}")


def comma_separated(text):
    words = text.split(",")
    for word in words:
        if word not in QUANTITIES:
            raise argparse.ArgumentTypeError(f"there is no '{word}'; it takes {', '.join(QUANTITIES)}")
    return words


def main():
    parser = argparse.ArgumentParser(prog="gka plot")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--x", choices=HORIZONTAL, default="step")
    parser.add_argument("--y", type=comma_separated)
    arguments = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # of paths that have other letters than the terminal
    try:
        plot(arguments.runs, arguments.output, arguments.x, arguments.y)
    except KeyboardInterrupt:
        print("gka plot: interrupted.", file=sys.stderr)
        sys.exit(130)
    except ModuleNotFoundError as error:
        fail(f"plots need {error.name}, which {sys.executable} does not have: `pip install {error.name}`.")


if __name__ == "__main__":
    main()
