"""gka's models under other people's training loops; a package that is not installed skips its test and says so."""

import copy
import json
import os
import subprocess
import sys

import pytest
import torch

import gka

transformers = pytest.importorskip("transformers", reason="transformers is not installed; requirements.txt has it")
import gka.hf  # noqa: E402  (it needs transformers)

CONFIG = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hybrid_override_pattern": "GKA-*",
    "eos_token_id": 60,
}


def needs(package):
    """The package, or a skip; also where something it needs is missing."""
    reason = f"{package} is not installed, or not all it needs: pip install {package.split('.')[0]}"
    return pytest.importorskip(package, reason=reason, exc_type=ImportError)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return gka.hf.GkaForCausalLM(gka.hf.GkaConfig(**CONFIG))


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(60, (8, 12), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def plain_steps(model, rows, rate=0.01):
    """Two steps of AdamW by hand: the losses."""
    model = copy.deepcopy(model)
    optimiser = torch.optim.AdamW(gka.hf.parameter_groups(model, 0.1), lr=rate)
    losses = []
    for half in (rows[:4], rows[4:]):
        batch = torch.stack([row["input_ids"] for row in half])
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses, model


def trainer_for(model, rows, folder, **options):
    needs("accelerate")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=2,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )
    return transformers.Trainer(model=model, args=arguments, train_dataset=rows, **options)


def test_transformers_trainer_trains_as_a_loop_of_ones_own(model, rows, tmp_path):
    losses, trained = plain_steps(model, rows)
    optimiser = torch.optim.AdamW(gka.hf.parameter_groups(model, 0.1), lr=0.01)
    trainer = trainer_for(model, rows, tmp_path, optimizers=(optimiser, None))
    trainer.train()
    said = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert said == pytest.approx(losses, abs=1e-4)  # what it logs is rounded
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, trained.get_parameter(name), rtol=1e-5, atol=1e-6)


def test_activations_computed_again_give_the_same_gradients(model, rows):
    batch = torch.stack([row["input_ids"] for row in rows])
    model.train()
    wanted = torch.autograd.grad(model(batch, labels=batch).loss, list(model.parameters()))
    model.gradient_checkpointing_enable()
    through, calls = model.model._through, []
    model.model._through = lambda *given: (calls.append(given[0]), through(*given))[1]
    got = torch.autograd.grad(model(batch, labels=batch, use_cache=True).loss, list(model.parameters()))
    assert calls == [0, 1, 1, 0]  # forward, and again on the way back
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_what_must_not_decay_does_not(model):
    decays, stays = gka.hf.parameter_groups(model, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    kept = {names[id(p)] for p in stays["params"]}
    from_library = set(torch.ops.gka.decaying_parameters(json.dumps(CONFIG)))
    assert {names[id(p)] for p in decays["params"]} == from_library
    assert {"model.layers.0.gka.A_log", "model.layers.0.gka.dt_bias", "model.norm.weight"} <= kept


def test_peft_adds_low_rank_parts_to_named_projections(model, rows, tmp_path):
    peft = needs("peft")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    adapted = peft.get_peft_model(model, settings)
    trainer_for(adapted, rows, tmp_path).train()
    batch = torch.stack([row["input_ids"] for row in rows])
    logits = adapted(batch).logits.detach()
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(batch).logits.detach(), logits, rtol=1e-4, atol=1e-5)
    changed = {n for n, p in merged.named_parameters() if not torch.equal(p.detach(), before[n])}
    wanted = {n for n in before if n.endswith(("q_proj.weight", "v_proj.weight", "o_proj.weight"))}
    assert changed == wanted
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(gka.load(tmp_path / "merged")(batch).detach(), logits, rtol=1e-4, atol=1e-5)


def tokenizer():
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(60)} | {"<end>": 60}, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")


def test_lm_eval_scores_as_we_do(model):
    scorer = needs("lm_eval.models.huggingface").HFLM(
        pretrained=model.eval(), tokenizer=tokenizer(), device="cpu", batch_size=2
    )
    ids = [3, 4, 5, 6, 7]
    longer = [9, 8, *ids, 2]  # in one batch with it: the shorter one is padded
    asked = [((" ", " "), each[:2], each[2:]) for each in (ids, longer)]
    for (score, _), each in zip(scorer._loglikelihood_tokens(asked), (ids, longer), strict=True):
        with torch.no_grad():
            log = model(torch.tensor([each])).logits.log_softmax(-1)[0]
        wanted = sum(log[i, each[i + 1]].item() for i in range(1, len(each) - 1))
        assert score == pytest.approx(wanted, abs=1e-4)


def test_lightning_trains_as_a_loop_of_ones_own(model, rows, tmp_path):
    lightning = needs("lightning")
    losses, _ = plain_steps(model, rows)
    seen = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _):
            loss = self.model(batch, labels=batch).loss
            seen.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(gka.hf.parameter_groups(self.model, 0.1), lr=0.01)

    ids = torch.stack([row["input_ids"] for row in rows])
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "barebones": False}
    trainer = lightning.Trainer(max_steps=2, accelerator="cpu", default_root_dir=tmp_path, **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(ids, batch_size=4))
    assert seen == pytest.approx(losses, rel=1e-5)


def test_trl_takes_a_step_of_fine_tuning(model, rows, tmp_path):
    trl = needs("trl")
    datasets = needs("datasets")
    losses, _ = plain_steps(model, rows)
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=1,
        learning_rate=0.01,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )
    data = datasets.Dataset.from_dict({"input_ids": [row["input_ids"].tolist() for row in rows]})
    before = model.model.layers[0].gka.q_proj.weight.detach().clone()
    trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer())
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(losses[0], abs=1e-3)
    assert not torch.equal(model.model.layers[0].gka.q_proj.weight.detach(), before)


DEEPSPEED = """
import json, sys, torch, deepspeed, gka.hf

model, rows = torch.load(sys.argv[1], weights_only=False)
settings = {
    "train_batch_size": 4,
    "zero_optimization": {"stage": int(sys.argv[2])},
    "zero_allow_untested_optimizer": True,
}
groups = gka.hf.parameter_groups(model, 0.1)
engine, *_ = deepspeed.initialize(model=model, config=settings, optimizer=torch.optim.AdamW(groups, lr=0.01))
losses = []
for half in (rows[:4], rows[4:]):
    loss = engine(half, labels=half).loss
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
print("losses", json.dumps(losses))
"""


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_trains_as_a_loop_of_ones_own(model, rows, tmp_path, stage):
    """In a process of its own: it starts torch.distributed."""
    needs("deepspeed")
    losses, _ = plain_steps(model, rows)
    torch.save((model, torch.stack([row["input_ids"] for row in rows])), tmp_path / "given.pt")
    (tmp_path / "train.py").write_text(DEEPSPEED)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    words = [sys.executable, tmp_path / "train.py", tmp_path / "given.pt", str(stage)]
    environment = {**os.environ, **alone, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    said = [line for line in done.stdout.splitlines() if line.startswith("losses ")]
    assert said, done.stderr[-2000:]
    assert json.loads(said[0].split(" ", 1)[1]) == pytest.approx(losses, rel=1e-5)
