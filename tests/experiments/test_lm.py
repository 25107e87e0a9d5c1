"""experiments/lm, ablations, hybrids: what is measured is what it says; a slice works from end to end at toy size."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "lm"
sys.path.insert(0, str(FOLDER))

import measure  # noqa: E402
import pack  # noqa: E402
import report  # noqa: E402
import sweep  # noqa: E402
from sizes import LAYERS, SIZES, model  # noqa: E402

PROGRAM = os.environ.get("GKA_PROGRAM") or str(Path(sys.executable).parent / "gka")


def test_a_pair_seen_before_is_found_with_its_distance():
    windows = np.array([[5, 6, 7, 5, 6, 9, 5, 6]])
    frequent = np.array([6 * 100 + 9])
    assert measure.distances(windows[0], 100).tolist() == [0, 0, 0, 3, 0, 0, 3]
    found = measure.kinds(windows, frequent, 100)
    assert found["seen"].tolist() == [[False, False, False, True, False, False, True]]
    assert not (found["seen"] & found["rest"]).any() and (found["seen"] | found["rest"]).all()
    assert not measure.kinds(windows, np.array([5 * 100 + 6]), 100)["seen"].any(), "a frequent pair needs no memory"


def test_what_an_rfc_says_of_itself_is_asked_for_and_stands_in_the_context():
    text = "Network Working Group                                          R. Kermode\nRequest for Comments: 3269\n"
    text += " " * 50 + "April 2002\n\nA Title\n\n" + "words " * 2000
    items = pack.header_items(text)
    assert [item["answers"][0] for item in items] == ["3269", "April 2002", "R. Kermode"]
    assert all(item["answers"][0] in item["context"] and len(item["context"]) < 4200 for item in items)


def test_a_run_that_does_not_fit_into_the_budget_is_not_begun():
    run = sweep.Run("a", {}, {"steps": 100, "batch_tokens": 1000}, alike="x", speed=1000)
    assert sweep.expected({}, run, "cpu", 0) > 100
    results = {"b": {"alike": "x", "device": "cpu", "tokens_per_second": 100_000}}
    assert sweep.expected(results, run, "cpu", 0) < 10, "runs like it were faster"
    assert sweep.expected(results, run, "another", 0) > 100
    assert sweep.expected(results, run, "cpu", 0, jobs=4) > 2 * sweep.expected(results, run, "cpu", 0) - sweep.START


def test_first_weights_are_changed_by_name_and_others_stay(tmp_path):
    numbers = np.arange(6, dtype="<f4")
    tensor = {"dtype": "F32", "shape": [3]}
    header = json.dumps({
        "__metadata__": {"format": "pt"},
        "layers.0.alpha_proj.bias": tensor | {"data_offsets": [0, 12]},
        "layers.0.b_proj.bias": tensor | {"data_offsets": [12, 24]},
    }).encode()  # fmt: skip
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + numbers.tobytes())
    sweep.change_weights(file, {"alpha_proj.bias": -2.0}, {})
    assert np.frombuffer(file.read_bytes()[8 + len(header) :], "<f4").tolist() == [-2, -1, 0, 3, 4, 5]
    sweep.change_weights(file, {"b_proj.bias": 1.0}, {"b_proj.bias": 0.5})
    assert np.frombuffer(file.read_bytes()[8 + len(header) :], "<f4").tolist() == [-2, -1, 0, 2.5, 3, 3.5]
    with pytest.raises(SystemExit, match="gate"):
        sweep.change_weights(file, {"gate": 1.0}, {})


def test_sizes_stand_beside_each_other_where_a_layer_was_trained_at_both():
    def runs(*losses):
        return [{"rate": 1, "measures": {"held_out": {"all": {"loss": loss}}}} for loss in losses]

    small, large = (("12m", "text", "parameters", 47), ("50m", "text", "parameters", 47))
    written = report.slope({small: {"gka": runs(3.5, 3.7), "kda": runs(4.0)}, large: {"gka": runs(3.25)}})
    assert "| 3.600 (3.500 to 3.700) | 3.250 |" in written and "KDA" not in written


def test_a_larger_eps_makes_a_layer_write_less_at_first():
    pytest.importorskip("gka")
    import first

    published, larger = (first.look("toy", layer, 64, seed=0) for layer in ("gka", "gka-eps-1e-3"))
    assert larger["layer"] < published["layer"] and larger["kept"] > published["kept"]
    assert larger["embedding"] == published["embedding"] == pytest.approx(SIZES["toy"].deviation, rel=0.1)


@pytest.mark.parametrize("size", ["12m", "50m"])
def test_matched_layers_have_as_many_parameters_as_gka(size):
    gka = pytest.importorskip("gka")

    def count(layer: str) -> int:
        small = model(size, layer, vocabulary=64)
        return sum(p.numel() for p in gka.models.Decoder(small, device="meta").parameters()) - 64 * small["hidden_size"]

    wanted = count("gka")
    assert wanted == pytest.approx(1e6 * int(SIZES[size].title.removesuffix("M")), rel=0.03)
    for layer in LAYERS:
        assert count(layer) == pytest.approx(wanted, rel=0.015), layer


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """What experiments/data leaves, of two sources of made-up prose and a tokenizer learned from it."""
    folder = tmp_path_factory.mktemp("data")
    draw = random.Random(0)
    words = ["".join(draw.choice("abcdefgh") for _ in range(draw.randrange(2, 6))) for _ in range(60)]

    def line(count: int) -> str:
        return json.dumps({"text": " ".join(draw.choice(words) for _ in range(count))}) + "\n"

    for part in ("text", "tasks", "gpt2"):
        (folder / part).mkdir()
    for source in ("prose", "rfc"):
        for name, documents in (("train", 30), ("test", 2)):
            (folder / "text" / f"{source}.{name}.jsonl").write_text("".join(line(1500) for _ in range(documents)))
    with (folder / "text" / "rfc.test.jsonl").open("a") as file:
        file.write(json.dumps({"text": "Request for Comments: 7\n\n" + "abc " * 300}) + "\n")
    items = [{"context": "abc\u2028de", "choices": ["fg", "hh"], "answer": i % 2} for i in range(6)]
    about = {"task": "piqa", "kind": "choice"}
    lines = [json.dumps(item, ensure_ascii=False) + "\n" for item in [about, *items]]
    (folder / "tasks" / "piqa.jsonl").write_text("".join(lines))
    command = [PROGRAM, "tokenizer", "train", folder / "text" / "prose.train.jsonl", "--vocab-size", "300"]
    subprocess.run([*command, "--special", "<|endoftext|>", "--out", folder / "gpt2" / "tokenizer.json"], check=True)
    return folder


def call(*command):
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def module_of(program):
    about = importlib.util.spec_from_file_location(program.parent.name, program)
    module = importlib.util.module_from_spec(about)
    sys.modules[about.name] = module  # where its dataclasses look for their types
    about.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def unpacked(data, tmp_path_factory):
    """The same after its travel."""
    folder = tmp_path_factory.mktemp("unpacked")
    call(FOLDER / "pack.py", "pack", "--data", data, "--out", folder / "packs", "--sources", "prose", "rfc")
    packs = sorted((folder / "packs").iterdir())
    assert [path.name for path in packs] == ["lm-1.tar", "lm-2.tar"]
    call(FOLDER / "pack.py", "unpack", *packs, "--out", folder / "data")
    return folder / "data"


def test_a_pack_in_pieces_that_fit_makes_the_same_files(unpacked, tmp_path):
    packs = tmp_path / "packs"
    packs.mkdir()
    whole = packs / "lm-1.tar"
    whole.write_bytes((unpacked.parent / "packs" / "lm-1.tar").read_bytes())
    room = [whole.stat().st_size * part / 2**20 for part in (0.6, 0.8)]
    call(FOLDER / "pack.py", "cut", whole, "--no-tasks", "--first", room[0], "--most", room[1])
    pieces = sorted(packs.glob("lm-1.?.tar"))
    assert len(pieces) > 1
    assert all(
        piece.stat().st_size <= most * 2**20 for piece, most in zip(pieces, [room[0]] + [room[1]] * 9, strict=False)
    )
    for piece in pieces:  # the first has what the others need
        call(FOLDER / "pack.py", "unpack", piece, "--out", tmp_path / "data")
    tokens = sorted((tmp_path / "data" / "tokens").glob("*.tokens"))
    assert [file.name for file in tokens] == ["prose.1.tokens", "prose.test.tokens", "rfc.1.tokens", "rfc.test.tokens"]
    assert all(file.read_bytes() == (unpacked / "tokens" / file.name).read_bytes() for file in tokens)
    assert not (tmp_path / "data" / "tasks").exists()


def test_a_slice_trains_and_measures_and_the_next_one_knows_what_is_done(unpacked, tmp_path):
    plan = ["--size", "toy", "--only", "gka", "--data", unpacked, "--out", tmp_path / "out", "--items", "4"]
    plan += ["--windows", "4", "--jobs", "2"]
    call(FOLDER / "run.py", "run", *plan, "--tokens", "2560")
    results = sweep.read_results(tmp_path / "out" / "results.jsonl")
    rates = {r["rate"]: r["valid_loss"] for r in results.values() if r["stage"] == "rate"}
    (final,) = (r for r in results.values() if r["stage"] == "final")
    assert len(rates) == 2 and final["rate"] == min(rates, key=rates.get)
    held_out = final["measures"]["held_out"]
    by_source = held_out["source"].values()
    assert {"prose", "rfc"} == set(held_out["source"])
    mean = sum(s["loss"] * s["tokens"] for s in by_source) / sum(s["tokens"] for s in by_source)
    assert held_out["all"]["loss"] == pytest.approx(mean)
    first = sum(held_out["first"]) / len(held_out["first"])
    assert first == pytest.approx(held_out["position"]["0-15"]), "the first 16 one by one are the first 16"
    assert final["measures"]["tasks"]["piqa"]["items"] == 4
    report.write_report(results, tmp_path)
    assert f"{held_out['all']['loss']:.3f}" in (tmp_path / "results.md").read_text()
    again = call(FOLDER / "run.py", "run", *plan, "--tokens", "2560")
    assert again.stderr.startswith("0 runs done, 0 left")


def test_a_run_that_fails_is_said_and_the_others_go_on(unpacked, tmp_path):
    plan = ["--size", "toy", "--data", unpacked, "--out", tmp_path / "out", "--tokens", "512", "--rate", "0.01"]
    command = [FOLDER.parent / "ablations" / "run.py", "run", *plan, "--items", "0", "--windows", "2", "--only"]
    done = subprocess.run(
        [sys.executable, *map(str, command), "sketch-32", "deltanet-small", "attention-small", "small-no-alpha"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "toy-sketch-32-text-0.000512M-lr0.01-s0: left out: " in done.stderr
    assert "sketch_dim is 32, more than the 16 dimensions of a key" in done.stderr
    variants = [result["variant"] for result in sweep.read_results(tmp_path / "out" / "results.jsonl").values()]
    assert sorted(variants) == ["attention-small", "deltanet-small", "small-no-alpha"]


def test_runs_are_listed_as_they_are_named_each_with_its_seed():
    listed = call(FOLDER.parent / "ablations" / "run.py", "list", "--seeds", "2", "--only", "norm-eps:3", "base").stdout
    names = [line.split()[1] for line in listed.splitlines() if "12m-" in line]
    assert [(name.split("-text-")[0], name[-2:]) for name in names] == [
        ("12m-norm-eps", "s3"), ("12m-base", "s0"), ("12m-base", "s1")
    ]  # fmt: skip


def test_ablations_change_one_thing_and_measure_fewer_iterations_of_the_same_weights(unpacked, tmp_path):
    plan = ["--size", "toy", "--data", unpacked, "--out", tmp_path / "out", "--items", "0", "--windows", "2"]
    program = FOLDER.parent / "ablations" / "run.py"
    call(program, "run", *plan, "--only", "base", "low-alpha", "--tokens", "1024", "--rate", "0.01")
    base, shifted = sweep.read_results(tmp_path / "out" / "results.jsonl").values()
    before, after = (result["curve"][0][1] for result in (base, shifted))
    assert before != after and before == pytest.approx(after, rel=0.01)
    losses = [base["measures"]["iterations"][count]["all"]["loss"] for count in ("5", "10", "15")]
    losses.append(base["measures"]["held_out"]["all"]["loss"])
    assert len(set(losses)) == 4 and max(losses) - min(losses) < 0.5
    ablations = module_of(program)
    sys.path.insert(0, str(program.parent))
    import table

    found = {name: table.eps_of(variant) for name, variant in ablations.VARIANTS.items()}
    assert (found["base"], found["norm-eps"], found["gdn-eps-1e-2"]) == (1e-6, 1e-5, 1e-2)
    assert found["small-out"] is found["eps-1e-5-fast"] is found["a-0.1"] is found["gdn-wide-eps-1e-3"] is None
    table.write_report({"base": base, "shifted": shifted}, ablations.VARIANTS, tmp_path)
    written = (tmp_path / "results.md").read_text()
    assert f"{losses[-1]:.3f}" in written and len(list(tmp_path.glob("*.png"))) == written.count("![]") == 2


RULER = {  # a prompt, what it asks for, the answers
    "niah_single_2": (
        "Find one afterwards.\n{}\nWhat is the special number for {} mentioned in it? It is",
        "a-b",
        ["1234567"],
    ),
    "niah_multiquery": (
        "Find them afterwards.\n{}\nWhat are all the special numbers for {} mentioned? They are",
        "a-b, and c-d",
        ["1", "2"],
    ),
    "vt": (
        "Follow the following text.\n\n{}\nQuestion: Find all with the value {} in it. They are: ",
        "12345",
        ["ABCDE"],
    ),
    "cwe": ("Some come most often.\n{}\nQuestion: What are the {} most common? They are:", "10", ["abc"]),
}


def test_a_hybrid_goes_on_at_a_greater_length_and_is_asked_rulers_questions(data, unpacked, tmp_path):
    sys.path.insert(0, str(FOLDER.parent / "hybrids"))
    import ruler

    (unpacked / "ruler").mkdir()
    (unpacked / "text" / "wikipedia.1.jsonl").write_text((data / "text" / "prose.train.jsonl").read_text())
    for task, (prompt, query, answers) in RULER.items():
        line = {"input": prompt.format("some\u2028words " * 9 + answers[0], query), "outputs": answers}
        (unpacked / "ruler" / f"{task}-64.jsonl").write_bytes(ruler.as_task(task, 64, [line] * 2, 4))
    plan = ["--size", "toy", "--data", unpacked, "--out", tmp_path / "out", "--items", "0", "--windows", "2"]
    plan += ["--tokens", "2048", "--long-tokens", "512", "--samples", "1", "--rate", "0.01", "--eps", "0.001"]
    plan += ["--first-output", "0.5"]
    call(FOLDER.parent / "hybrids" / "run.py", "run", *plan, "--only", "hybrid")
    short, long = sweep.read_results(tmp_path / "out" / "results.jsonl").values()
    assert (short["stage"], long["stage"]) == ("short", "long") and short["parameters"] == long["parameters"]
    assert long["curve"][0][1] < short["curve"][0][1], "it goes on with the weights of the first stage"
    found = long["measures"]["ruler"]
    assert set(found) == {f"{task}-64" for task in RULER} and all(0 <= one["score"] <= 100 for one in found.values())
    import tables

    tables.write_report({"short": short, "long": long}, {"hybrid": "with attention"}, tmp_path)
    written = (tmp_path / "results.md").read_text()
    title = "with attention, ε 0.001, begun at 0.5"
    assert written.count(f"{title} |") == 2 and f"{title}, without S-NIAH-1 |" in written


def test_answers_count_as_ruler_counts_them():
    sys.path.insert(0, str(FOLDER.parent / "hybrids"))
    import ruler

    assert ruler.counted("niah_multivalue-64", "12 and 34.", ["12", "34", "56", "78"]) == 0.5
    assert ruler.counted("qa_1-64", "It was PARIS, I think", ["Lyon", "Paris"]) == 1


def test_a_metric_of_one_text_has_no_error():
    assert report.with_error({"value": 1.5, "stderr": None}) == "1.500"
    assert report.with_error({"value": 1.5, "stderr": 0.25}) == "1.500 ±0.250" and report.with_error(None) == "–"
