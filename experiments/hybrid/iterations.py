"""What the solver's steps are worth at inference alone, and whether certainty says when an answer is right.

One trained model (recall-8m, which was trained with 30 steps), asked with 0 to 30 of them and with `auto`:

  recall      ten facts told, one asked for by its name: the share in which every token of the right answer is the
              likeliest, which is what answering greedily comes to
  answer      the loss of the right answer's tokens
  text        bits per byte of the beginnings of held-out articles of Wikipedia
  certainty   how much of its queries the past explains, the mean over the tokens of what it answers
              (docs/inference.md), for the first of those questions

and, with the steps it was trained with, every answer's certainty beside whether it is right, and beside the probability
that the model gives to its own answer. Results go to iterations.jsonl line by line, so that the command can be stopped
and started again, figures to iterations.png and certainty.png beside it; --draw draws what is there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from dialogues import END, UNKNOWN, Chats, as_text, test_items
from run import PROGRAM, ROOT, TASKS

sys.path.insert(0, str(ROOT / "experiments"))

from console import Progress, read_lines, run_program, table, write_atomically
from palette import GKA, GREY, OTHERS

HERE = Path(__file__).resolve().parent
FILE = "iterations.jsonl"
COUNTS = (0, 1, 2, 3, 5, 8, 10, 15, 20, 25, 30)  # 25 is what `auto` comes to here
ARTICLES, CHARACTERS = 40, 2000  # of held-out Wikipedia: the beginnings of so many articles
BINS = 10  # of certainty, each with as many answers
STRANGER = "nobody told"
KINDS = {"name to fact": "recall-", "fact to name": "who-"}
MEASURES = {"certainty": "certainty of the answer", "probability": "probability that the model gave it"}
Items = list[dict]


# ---- What is asked


def articles(data: Path) -> list[str]:
    file = data / "text" / "wikipedia.test.jsonl"
    if not file.exists():
        fetch = [sys.executable, str(ROOT / "experiments" / "data" / "run.py"), "--no-enwik8", "--no-tokens"]
        subprocess.run([*fetch, "--tasks", "--sources", "wikipedia", "--out", str(data)], check=True)
    with file.open() as lines:
        return [json.loads(line)["text"][:CHARACTERS] for line, _ in zip(lines, range(ARTICLES), strict=False)]


def strangers(count: int) -> Items:
    """Ten facts, and a question about somebody nobody mentioned."""
    chats = Chats(5, test=True)
    items: Items = []
    while len(items) < count:
        known = chats.facts(10)
        name = chats.name()
        if len(known) < 10 or any(fact.name == name for fact in known):
            continue
        asked = chats.draw.choice(chats.draw.choice(known).relation.asked).format(n=name)
        turns = [("user", chats.tell(known)), ("assistant", chats.acknowledge()), ("user", asked)]
        items.append({"context": as_text(turns) + "<|im_start|>assistant\n", "answers": [UNKNOWN]})
    return items


def write_task(path: Path, about: dict, items: Items) -> Path:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in [about, *items]))
    return path


def scored_tasks(folder: Path, items: Items, data: Path) -> list[Path]:
    right = [{"context": item["context"], "target": item["answers"][0] + END} for item in items]
    text = [{"text": text} for text in articles(data)]
    return [
        write_task(folder / "answer.jsonl", {"task": "answer", "kind": "last_word", "delimiter": ""}, right),
        write_task(folder / "wikipedia.jsonl", {"task": "wikipedia", "kind": "text"}, text),
    ]


# ---- Asking


def with_steps(model: Path, count: int, folder: Path) -> Path:
    """The same weights in a model of so many solver steps."""
    changed = folder / f"steps-{count}"
    changed.mkdir()
    for file in model.iterdir():
        if file.name not in ("config.json", "CHECKSUMS.xxh64"):
            (changed / file.name).symlink_to(file.resolve())
    config = json.loads((model / "config.json").read_text())
    config["gka_config"]["num_iter"] = count
    (changed / "config.json").write_text(json.dumps(config))
    return changed


def scores(model: Path, tasks: list[Path]) -> dict[str, dict]:
    command = [PROGRAM, "eval", str(model), "--json", "--device", "cpu", "--tasks", *map(str, tasks)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"iterations: gka eval: {done.stderr.strip()[-500:]}")
    found = {name: task["metrics"] for name, task in json.loads(done.stdout)["tasks"].items()}
    perplexity = found["answer"]["perplexity"]
    return {
        "recall": found["answer"]["acc"],
        "answer_loss": {"value": math.log(perplexity["value"]), "stderr": perplexity["stderr"] / perplexity["value"]},
        "wikipedia": found["wikipedia"]["bits_per_byte"],
    }


def answers(engine, items: Items, steps: int | str) -> list[dict]:
    """Of each item whether it is right, how certain and how likely the answer was."""
    prompts = [item["context"] for item in items]
    made = engine.generate(prompts, max_tokens=32, temperature=0, iterations=steps, certainty=True)
    found = []
    for item, completion in zip(items, made, strict=True):
        tokens = completion.tokens
        text = completion.text.split(END)[0].split("\n")[0].strip()
        found.append(
            {
                "right": float(text == item["answers"][0]),
                "certainty": sum(token.certainty for token in tokens) / len(tokens),
                "probability": math.exp(sum(token.logprob for token in tokens)),
            }
        )
    return found


def share(values: list[float]) -> dict[str, float]:
    """Their mean, and its standard error."""
    mean = sum(values) / len(values)
    spread = sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    return {"value": mean, "stderr": math.sqrt(spread / len(values))}


def measure(options: argparse.Namespace) -> None:
    """Appends a line for each number of steps and for each group of questions; what is there already is left out."""
    import gka

    file, model = options.out / FILE, Path(options.model)
    file.parent.mkdir(parents=True, exist_ok=True)
    about = {"items": options.items, "answers": options.answers, "date": datetime.date.today().isoformat()}
    done = {
        line.get("steps", line.get("group")) for line in (map(json.loads, read_lines(file)) if file.exists() else ())
    }

    def keep(line: dict) -> None:
        with file.open("a") as lines:
            lines.write(json.dumps(line | about) + "\n")

    engine = gka.Engine(model, device="cpu", snapshot_bytes=-1)
    trained = json.loads((model / "config.json").read_text())["gka_config"]["num_iter"]
    ten = test_items(10, 10, options.items, False)
    settings = [*options.steps, "auto"]
    with tempfile.TemporaryDirectory() as name, Progress(len(settings) + len(TASKS) + 1, "iterations") as progress:
        tasks = scored_tasks(Path(name), ten, Path(options.data))
        for steps in settings:
            if steps not in done:
                asked = answers(engine, ten[: options.answers], steps)
                row = {"steps": steps, **{key: share([one[key] for one in asked]) for key in ("right", "certainty")}}
                keep(row | (scores(with_steps(model, steps, Path(name)), tasks) if steps != "auto" else {}))
            progress.step(f"{steps} steps")
        for group, (facts, back) in (TASKS | {STRANGER: (10, False)}).items():
            if group not in done:
                count = options.answers
                items = strangers(count) if group == STRANGER else test_items(facts, facts, count, back)
                asked = [
                    [round(one[key], 4) for key in ("right", *MEASURES)] for one in answers(engine, items, trained)
                ]
                keep({"group": group, "asked": asked})
            progress.step(group)
    engine.close()


# ---- What follows from it


def ranks(values: list[float], right: list[float]) -> float:
    """How often an answer that is right has the higher value of the two than one that is wrong (0.5: says nothing)."""
    order = sorted(zip(values, right, strict=True))
    wrong_before = pairs = 0.0
    i = 0
    while i < len(order):  # equal values count half
        j = i
        while j < len(order) and order[j][0] == order[i][0]:
            j += 1
        here = [one for _, one in order[i:j]]
        rights = sum(here)
        pairs += rights * (wrong_before + (len(here) - rights) / 2)
        wrong_before += len(here) - rights
        i = j
    rights = sum(right)
    return pairs / (rights * (len(right) - rights)) if 0 < rights < len(right) else math.nan


def binned(values: list[float], right: list[float]) -> list[dict]:
    """Mean value and share that is right, of as many answers each."""
    order = sorted(zip(values, right, strict=True))
    bins = min(BINS, len(order))
    edges = [round(i * len(order) / bins) for i in range(bins + 1)]
    found = []
    for first, end in pairwise(edges):
        part = order[first:end]
        found.append({"mean": sum(value for value, _ in part) / len(part), **share([one for _, one in part])})
    return found


def read(file: Path) -> dict:
    lines = list(map(json.loads, read_lines(file)))
    found = {line["group"]: [dict(zip(("right", *MEASURES), one, strict=True)) for one in line["asked"]]
             for line in lines if "group" in line}  # fmt: skip
    rows = sorted((line for line in lines if "steps" in line), key=lambda row: (row["steps"] == "auto", row["steps"]))
    return {"steps": rows} | calibration(found)


def calibration(found: dict[str, list[dict]]) -> dict[str, dict]:
    """Of each group of questions, and of each direction whatever the number of facts: how certainty goes with right."""
    joined = {kind: [one for group, many in found.items() if group.startswith(prefix) for one in many]
              for kind, prefix in KINDS.items()}  # fmt: skip
    groups, curves = {}, {}
    for group, many in (found | {kind: many for kind, many in joined.items() if many}).items():
        right = [one["right"] for one in many]
        groups[group] = {
            "answers": len(many),
            "right": share(right),
            "certainty": share([o["certainty"] for o in many]),
        }
        for key in MEASURES:
            groups[group][f"ranks_by_{key}"] = ranks([one[key] for one in many], right)
            if group in KINDS:
                curves.setdefault(group, {})[key] = binned([one[key] for one in many], right)
    return {"groups": groups, "curves": curves}


def show(results: dict) -> None:
    def cell(row: dict, key: str) -> str:
        return f"{row[key]['value']:.3f} ± {row[key]['stderr']:.3f}" if key in row else ""

    keys = ("recall", "answer_loss", "wikipedia", "right", "certainty")
    rows = [[str(row["steps"]), *(cell(row, key) for key in keys)] for row in results["steps"]]
    header = ["steps", "recall", "loss of the answer", "Wikipedia, bits/byte", "right of those answered", "certainty"]
    print(table(header, rows))
    rows = [
        [group, str(numbers["answers"]), cell(numbers, "right"), cell(numbers, "certainty"),
         *(f"{numbers[f'ranks_by_{key}']:.3f}" for key in MEASURES)]
        for group, numbers in results["groups"].items()
    ]  # fmt: skip
    print(table(["questions", "answers", "right", "certainty", "ranks by certainty", "by probability"], rows))


def draw(results: dict, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in results["steps"] if row["steps"] != "auto"]
    places = range(len(rows))  # by their order: most happens within the first steps
    panels = {"recall": "recall of ten facts", "answer_loss": "loss of the right answer",
              "wikipedia": "Wikipedia, bits per byte", "certainty": "certainty of its answers"}  # fmt: skip
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 3.2))
    for axis, (key, title) in zip(axes, panels.items(), strict=True):
        values, errors = ([row[key][what] for row in rows] for what in ("value", "stderr"))
        axis.errorbar(places, values, yerr=errors, color=GKA.colour, marker="o", markersize=4, linewidth=2, capsize=3)
        axis.set_xticks(places, [str(row["steps"]) for row in rows])
        axis.set(title=title, xlabel="solver steps at inference")
        axis.title.set_fontsize(10)
        axis.grid(alpha=0.25)
    axes[0].set_ylim(0, 1)
    figure.tight_layout()
    write_atomically(out / "iterations.png", lambda path: figure.savefig(path, dpi=130))

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True)
    for axis, (key, title) in zip(axes, MEASURES.items(), strict=True):
        for (kind, curves), look in zip(results["curves"].items(), (GKA, OTHERS[0]), strict=True):
            mean, value, error = ([point[what] for point in curves[key]] for what in ("mean", "value", "stderr"))
            label = f"{kind}: {results['groups'][kind][f'ranks_by_{key}']:.2f}"
            axis.errorbar(mean, value, yerr=error, **look.style, markersize=4, capsize=3, label=label)
        axis.set(xlabel=title)
        axis.legend(frameon=False, fontsize=9, title="a right one ranks above a wrong one", title_fontsize=8)
        axis.grid(alpha=0.25)
    axes[1].plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":")
    axes[0].set(ylabel="share that is right", ylim=(-0.03, 1.03))
    figure.tight_layout()
    write_atomically(out / "certainty.png", lambda path: figure.savefig(path, dpi=130))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str((HERE / "recall-8m").relative_to(ROOT)))
    parser.add_argument("--steps", type=int, nargs="+", default=list(COUNTS), help="of the solver (0 to 30)")
    parser.add_argument("--items", type=int, default=200, help="questions whose right answer is scored (200)")
    parser.add_argument("--answers", type=int, default=100, help="questions of a kind that are answered (100)")
    parser.add_argument("--data", default="out/data", help="where experiments/data put its text")
    parser.add_argument("--out", type=Path, default=HERE, help="where iterations.jsonl and the figures go (here)")
    parser.add_argument("--draw", action="store_true", help="draw what is in iterations.jsonl")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if not options.draw:
        measure(options)
    results = read(options.out / FILE)
    show(results)
    draw(results, options.out)
    return 0


if __name__ == "__main__":
    run_program(main)
