"""A run that was killed and resumed ends in the same bits as one that was not."""

import json
import signal

import pytest
from training import KILLED

# What depends on the clock and the machine, not on the mathematics.
MEASURED = {"tokens_per_second", "memory_bytes", "seconds"}


def mathematics(lines):
    return [{key: value for key, value in line.items() if key not in MEASURED} for line in lines]


def assert_same_bits(gka, run, whole):
    assert mathematics(gka.metrics(run)) == mathematics(whole.metrics("runs/small"))
    assert gka.weights(run) == whole.weights("runs/small")
    optimiser = "latest/optimizer.safetensors"
    assert (gka.folder / run / optimiser).read_bytes() == (whole.folder / "runs/small" / optimiser).read_bytes()


def test_the_same_file_gives_the_same_bits(gka, whole):
    gka.train(gka.write())
    assert_same_bits(gka, "runs/small", whole)


def test_another_seed_gives_others(gka, whole):
    gka.train(gka.write(), "--set", "seed=1", "--set", "steps=2")
    assert gka.metrics("runs/small")[0]["loss"] != whole.metrics("runs/small")[0]["loss"]


@pytest.mark.parametrize(
    "fault, steps_left",
    [
        ("step@5", []),  # before the first checkpoint
        ("step@13", ["step-000000008"]),  # between checkpoints, after the gradient and before the update
        ("save@16", ["step-000000008"]),  # weights written, the rest not
        ("saved@16", ["step-000000008", "step-000000016"]),  # renamed, the link not yet moved
        ("save@24", ["step-000000008", "step-000000016"]),  # in the very last save
    ],
)
def test_a_killed_run_goes_on_to_the_same_bits(gka, whole, fault, steps_left):
    killed = gka.call("train", gka.write(), GKA_TEST_FAULT=fault)
    assert killed.returncode == KILLED
    finished = [name for name in gka.checkpoints("runs/small") if not name.startswith(".")] if steps_left else []
    assert finished == steps_left
    (told,) = json.loads(gka.call("runs", "--json").stdout)
    assert told["state"] == "killed"

    gka.train("small.json", "--resume")
    assert_same_bits(gka, "runs/small", whole)
    assert gka.checkpoints("runs/small") == ["step-000000016", "step-000000024"]


def test_a_run_killed_at_any_moment_goes_on_to_the_same_bits(gka, whole):
    process = gka.start("train", gka.write())
    for line in process.stderr:
        if line.startswith("step 10"):
            break
    process.kill()
    process.communicate()
    gka.train("runs/small", "--resume")
    assert_same_bits(gka, "runs/small", whole)


def test_a_run_can_be_killed_twice(gka, whole):
    gka.call("train", gka.write(), GKA_TEST_FAULT="step@13")
    assert gka.call("train", "runs/small", "--resume", GKA_TEST_FAULT="save@16").returncode == KILLED
    gka.train("runs/small", "--resume")
    assert_same_bits(gka, "runs/small", whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=["Ctrl-C", "SIGTERM", "SIGHUP"])
def test_a_signal_saves_and_says_how_to_go_on(gka, whole, number):
    process = gka.start("train", gka.write(), "--set", "log_every=1")
    for line in process.stderr:
        if line.startswith("step  3/"):
            break
    process.send_signal(number)
    _, rest = process.communicate()
    assert process.returncode == 130
    (said,) = [line for line in rest.splitlines() if line.startswith("stopped after step")]
    step = int(said.split()[3].rstrip(","))
    assert 3 <= step < 24
    assert "`gka train runs/small --resume`" in said
    assert gka.checkpoints("runs/small")[-1] == f"step-{step:09}"
    (told,) = json.loads(gka.call("runs", "--json").stdout)
    assert (told["state"], told["step"]) == ("stopped", step)

    gka.train("runs/small", "--resume")
    assert_same_bits(gka, "runs/small", whole)


def test_a_reader_that_goes_away_does_not_end_the_run(gka, whole):
    process = gka.start("train", gka.write())
    process.stderr.readline()
    process.stderr.close()
    assert process.wait() == 0
    process.stdout.close()
    assert_same_bits(gka, "runs/small", whole)


def test_a_finished_run_has_nothing_left_to_do(gka, whole):
    before = whole.weights("runs/small")
    done = whole.train("runs/small", "--resume")
    assert "finished after step 24" in done.stderr
    assert whole.weights("runs/small") == before


def test_resuming_with_other_settings_is_refused(gka, whole):
    done = whole.call("train", "small.json", "--resume", "--set", "learning_rate=0.5")
    assert done.returncode == 1
    assert "has another learning_rate (0.003) than this one (0.5)" in done.stderr
    assert whole.call("train", "small.json", "--resume", "--set", "keep=5").returncode == 0


def test_a_batch_in_parts_is_the_same_batch(gka, whole):
    gka.train(gka.write(accumulation=1, steps=4, output="one"))
    gka.train(gka.write(accumulation=4, steps=4, output="four"))
    for one, four in zip(gka.metrics("one"), gka.metrics("four"), strict=True):
        assert one["loss"] == pytest.approx(four["loss"], rel=1e-5)
        assert one["gradient_norm"] == pytest.approx(four["gradient_norm"], rel=1e-4)


def test_recomputing_activations_changes_no_bit(gka, whole):
    gka.train(gka.write(), "--set", "checkpoint_activations=true")
    assert_same_bits(gka, "runs/small", whole)
