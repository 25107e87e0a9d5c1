"""lm-evaluation-harness through `gka serve`, on a task of its own: the same numbers as `gka score`, to the last digit.

requirements-test.txt has the harness; where it could not be installed there is nothing to test.
"""

import json
import os
import subprocess

import pytest

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
lm_eval = pytest.importorskip("lm_eval")
tasks = pytest.importorskip("lm_eval.tasks")

from test_serving_a_model import PROGRAM, model, serve  # noqa: E402, F401

QUESTIONS = [
    ("The cat sat on the", [" mat", " moon", " of"]),
    ("one two three", [" four", " five six", " x"]),
    ("\u00c4pfel und", [" Birnen", " \u00c4ste"]),
]
TASK = """
task: local_choices
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
"""


@pytest.fixture
def task(tmp_path):
    questions = tmp_path / "questions.jsonl"
    rows = [json.dumps({"context": context, "choices": choices}) for context, choices in QUESTIONS]
    questions.write_text("\n".join(rows) + "\n")
    (tmp_path / "local_choices.yaml").write_text(TASK.replace("QUESTIONS", str(questions)))
    return tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)


def scored(model, tmp_path, context, choice):  # noqa: F811
    """The log-probability of a continuation by `gka score`; the model's tokens are bytes."""
    ids = tmp_path / "ids.txt"
    ids.write_text(" ".join(map(str, (context + choice).encode())) + "\n")
    command = [PROGRAM, "score", model, "--ids", ids, "--per-token", "--device", "cpu"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return sum(told["sequences"][0]["log_probabilities"][len(context.encode()) - 1 :])


def test_log_likelihoods_through_the_harness_are_those_of_gka_score(model, task, tmp_path):  # noqa: F811
    with serve(model) as server:
        arguments = {
            "base_url": f"{server.address}/v1/completions",
            "model": model.name,
            "tokenizer_backend": "remote",
            "num_concurrent": 2,
            "max_retries": 1,
        }
        done = lm_eval.simple_evaluate(
            "local-completions", model_args=arguments, tasks=["local_choices"], task_manager=task, log_samples=True
        )
    samples = sorted(done["samples"]["local_choices"], key=lambda sample: sample["doc_id"])
    assert len(samples) == len(QUESTIONS)
    for sample, (context, choices) in zip(samples, QUESTIONS, strict=True):
        got = [response[0] for response in sample["filtered_resps"]]
        assert got == [scored(model, tmp_path, context, choice) for choice in choices]
