"""Training on more than one device: ``torchrun --nproc-per-node 8 -m gka.train TRAIN.json``.

The training file, the batches and their order, the first weights and the folder of the run are those of `gka train`
(docs/training.md). Weights, gradients and optimiser are cut over the ranks; docs/distributed.md says how.
"""

import argparse
import json
import math
import os
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from . import _run_folder as folders
from ._adamw import AdamW, local
from ._context import Context, cut_sequence
from ._library import load_floors
from ._ranks import Ranks, Refusal, sentence_of
from ._sharding import Sharded
from ._tensor import cut_heads
from ._watchdog import Watchdog
from .models import Decoder, read_config

STOPPED = 128 + signal.SIGINT
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass
class Batch:
    """This rank's part."""

    inputs: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None  # of packed documents, and how many tokens of the first one are other ranks'
    before: int
    row_targets: Tensor  # of its rows, with the tokens that other ranks have


@dataclass
class Step:
    """The parts of a batch, what all ranks together have of it, and the source's position after it."""

    parts: list[Batch]
    tokens: int
    targets: int
    position: int


class Plan:
    """A training file as `gka train` reads it."""

    def __init__(self, read: dict[str, Any], verify: bool = True) -> None:
        self.settings: dict[str, Any] = read["settings"]
        self.steps, self.micro_batch, self.verify = read["steps"], read["micro_batch"], verify
        self.run = Path(self.settings["output"])

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["settings"][name]
        except KeyError:
            raise AttributeError(name) from None

    def learning_rate_at(self, step: int) -> float:
        """A straight line up, then half a cosine down; steps count from 1."""
        peak, last = self.learning_rate, self.final_learning_rate
        rising = math.floor(self.warmup * self.steps + 0.5)
        if step <= rising:
            return peak * step / rising
        progress = min(1.0, (step - rising) / max(1, self.steps - rising))
        return peak * (last + (1 - last) * 0.5 * (1 + math.cos(math.pi * progress)))


def read_plan(path: str, assignments: list[str]) -> dict[str, Any]:
    return json.loads(torch.ops.gka.training_settings(path, assignments))


def open_source(plan: Plan, source: dict[str, Any], evaluates: bool) -> Any:
    seeded = {"seed": plan.seed} | source
    return torch.classes.gka.Source(json.dumps(seeded), evaluates, plan.verify)


class Reader:
    """The batches of `gka train`, in their order: every rank reads all of a batch and keeps its own part."""

    def __init__(self, plan: Plan, ranks: Ranks, evaluates: bool = False) -> None:
        self.plan, self.ranks = plan, ranks
        data = plan.eval_data if evaluates and plan.eval_data is not None else plan.data
        self.source, self.is_task = open_source(plan, data, evaluates), "task" in data
        self._ahead = ThreadPoolExecutor(1)
        self._coming: Future | None = None

    def part(self, inputs: Tensor, targets: Tensor, bounds: Tensor | None) -> Batch:
        rows = self.plan.micro_batch // self.ranks.data
        place = self.ranks.place("data")
        if bounds is None:
            inputs, whole = (tensor[place * rows : (place + 1) * rows] for tensor in (inputs, targets))
            tokens = self.tokens_of(whole)
            return Batch(inputs[:, tokens], whole[:, tokens], None, 0, whole)
        length = inputs.shape[1] // self.plan.micro_batch * rows
        row = slice(place * length, (place + 1) * length)
        inputs, whole = inputs[:, row], targets[:, row]
        tokens = self.tokens_of(whole)  # documents may begin and end anywhere in them
        first, last = row.start + tokens.start, row.start + tokens.stop
        inside = bounds[(bounds > first) & (bounds < last)]
        ends = bounds.new_tensor([first, last])
        before = first - int(bounds[bounds <= first].max())
        return Batch(
            inputs[:, tokens], whole[:, tokens], torch.cat([ends[:1], inside, ends[1:]]) - first, before, whole
        )

    def tokens_of(self, rows: Tensor) -> slice:
        """The tokens of a sequence that lie on this rank."""
        count, ranks = rows.shape[1], self.ranks.context
        if count % ranks:
            raise Refusal(f"sequences have {count} tokens, which {ranks} context-parallel ranks cannot share.")
        place = self.ranks.place("context")
        return slice(count // ranks * place, count // ranks * (place + 1))

    def whole_prediction(self, part: Batch, predicted: Tensor) -> Tensor:
        """Of every target of the rows, from what each rank that has a part of them predicted."""
        targets, ranks = part.row_targets, self.ranks
        places = torch.arange(targets.numel()).view_as(targets)[:, self.tokens_of(targets)].flatten()
        count, first = len(places), ranks.place("tensor")
        places = places[count * first // ranks.tensor : count * (first + 1) // ranks.tensor]
        counted = targets.flatten()[places] != torch.ops.gka.ignored_label()
        if predicted.numel() == len(places):  # labels on a GPU: every token is predicted, counted or not
            predicted = predicted[counted.to(predicted.device)]
        places = places[counted].to(predicted.device)
        whole = torch.zeros(targets.numel(), dtype=torch.long, device=predicted.device).index_copy_(
            0, places, predicted
        )
        for name in ("context", "tensor"):
            if ranks.mesh[name].size() > 1:
                ranks.sum(whole, name)
        return whole.view_as(targets).cpu()

    def next_whole(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.source.next(self.plan.micro_batch, self.plan.length)

    def _read(self) -> Step:
        wholes = [self.next_whole() for _ in range(self.plan.accumulation)]
        tokens = sum(inputs.numel() for inputs, _, _ in wholes)
        targets = sum(int((labels != torch.ops.gka.ignored_label()).sum()) for _, labels, _ in wholes)
        return Step([self.part(*whole) for whole in wholes], tokens, targets, self.source.position())

    def next(self, more: bool) -> Step:
        """``more``: read the batch after it while this one is trained on."""
        step = self._coming.result() if self._coming else self._read()
        self._coming = self._ahead.submit(self._read) if more else None
        return step


def choose_device(name: str) -> torch.device:
    """One GPU for each process of a machine, or the CPU."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if ":" in name and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        raise RuntimeError(f'device is "{name}", and there are several processes: "cuda" gives each its own GPU.')
    place = int(name.split(":")[1]) if ":" in name else int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count()
    if place >= count:
        raise RuntimeError(
            f'device is "{name}", but torch sees {count} GPUs here and this process would take number {place}; start '
            "fewer processes per machine, or --set device=cpu trains on the CPU."
        )
    torch.cuda.set_device(place)
    return torch.device("cuda", place)


def memory_in_use(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


class StopSignals:
    """The first signal asks the loop to finish its step and save; the second ends the process at once."""

    def __init__(self) -> None:
        self.received = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on)

    def _on(self, number: int, _frame: object) -> None:
        self.received = number
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_DFL)


class Trainer:
    """The loop of `gka train` on many ranks."""

    def __init__(self, plan: Plan, ranks: Ranks, watchdog: Watchdog, resume: bool) -> None:
        self.plan, self.ranks, self.watchdog = plan, ranks, watchdog
        self.step = self.tokens = self.saved_step = self.position = 0
        self.seconds, self.step_seconds, self.reached = 0.0, 0.0, False
        self.signals = StopSignals()
        about = ranks.on_first(lambda: json.loads(torch.ops.gka.training_model(json.dumps(plan.settings))))
        self.notes, self.model_json = about["notes"], json.dumps(about["model"])
        self.config = ranks.on_first(lambda: read_config(about["model"]))
        self._check_batches()
        self.reader = Reader(plan, ranks)
        # Read now: token files may go meanwhile.
        self.tokenizer = torch.ops.gka.training_tokenizer(json.dumps(plan.data))
        self.sources = json.dumps({"sources": [plan.data, plan.eval_data]})
        self.data = json.loads(torch.ops.gka.training_checksums(self.sources))
        self.eval_reader = Reader(plan, ranks, evaluates=True) if plan.eval_every else None
        self._check_data()
        self.context: Context | None = None
        self.dtype = torch.float64 if plan.dtype == "float64" else torch.float32
        self.sharded = self._build()
        self.optimiser = AdamW(
            self.sharded.parameters,
            set(torch.ops.gka.decaying_parameters(self.model_json)),
            betas=tuple(plan.betas),
            eps=plan.eps,
            weight_decay=plan.weight_decay,
        )
        self._fill(resume)
        self.metrics: folders.Metrics | None = None
        self.progress = folders.Progress(plan.log_every)

    @property
    def compute(self) -> torch.dtype:
        on_cuda = self.ranks.device.type == "cuda"
        return DTYPES.get(self.plan.dtype, torch.bfloat16 if on_cuda else torch.float32)

    def _check_batches(self) -> None:
        plan, ranks = self.plan, self.ranks
        if plan.micro_batch % ranks.data:
            raise Refusal(
                f"batch_tokens / (length × accumulation) is {plan.micro_batch} sequences, which {ranks.data} "
                f"data-parallel ranks cannot share; it takes a multiple of {ranks.data}."
            )
        if plan.cuda_graph:
            raise Refusal("cuda_graph=true is for one process: `gka train`; set it to false for several.")

    def _check_data(self) -> None:
        size = self.config["vocab_size"]
        for reader in (self.reader, self.eval_reader):
            if reader and reader.source.vocab_size() > size:
                most = reader.source.vocab_size()
                raise Refusal(
                    f"the data has tokens up to {most - 1}, but the model's vocab_size is {size}; set "
                    f"model.vocab_size to at least {most}."
                )
        for _ in range(self.plan.eval_batches if self.eval_reader else 0):
            self.eval_reader.next_whole()  # too little to evaluate on shows now, not hours later
        longest = self.reader.source.longest(self.plan.length)
        if longest != self.plan.length:
            raise Refusal(
                f"length is {self.plan.length}, but the longest sequence of the data has {longest} tokens; set "
                f"length={longest}."
            )

    def _build(self) -> Sharded:
        try:
            model = Decoder(self.config, device="meta", dtype=self.dtype)
        except ValueError as error:
            raise Refusal(sentence_of(error)) from None
        for block in model.model.layers:
            block.recompute = self.plan.checkpoint_activations
        if self.ranks.tensor > 1:
            cut_heads(model, self.ranks.mesh["tensor"])
        if self.ranks.context > 1:
            self.context = cut_sequence(model, self.ranks.group("context"))
        return Sharded(model, self.ranks, self.compute, self.dtype)

    # -- where the weights come from

    def _fill(self, resume: bool) -> None:
        saved = self.ranks.on_first(lambda: [str(path) for path in folders.list_checkpoints(self.plan.run)])
        if resume and saved:
            self._resume_from(Path(saved[-1]))
        elif self.plan.settings["from"]:
            self._load_model(Path(self.plan.settings["from"]))
        else:
            drawn = None
            if self.ranks.first:
                drawn = torch.ops.gka.draw_weights(self.model_json, self.plan.seed, self.dtype)
            self.sharded.load_whole(drawn)
        self.ranks.on_first(lambda: folders.tidy_checkpoints(self.plan.run, self.plan.keep))

    def _load_model(self, folder: Path) -> None:
        weights: dict[str, Tensor] = {}

        def read() -> None:
            saved = folders.list_checkpoints(folder) if folders.is_run(folder) else [folder]
            if not saved:
                raise RuntimeError(f"the run '{folder}' has no checkpoint to start from yet.")
            if not saved[-1].is_dir():
                raise RuntimeError(f"there is no checkpoint '{saved[-1]}' to start from; check the path.")
            torch.ops.gka.check_training_tokenizer(json.dumps(self.plan.settings), os.fspath(saved[-1]))
            weights.update(torch.ops.gka.load_weights(os.fspath(saved[-1])))
            for name, parameter in self.sharded.parameters.items():
                got = weights[name].shape if name in weights else None
                if got != parameter.shape:
                    raise RuntimeError(
                        f"'{saved[-1]}' has {name} as {list(got) if got else 'nothing'}, and the model takes "
                        f"{list(parameter.shape)}; --from takes a model of the same shapes."
                    )

        self.ranks.on_first(read)
        self.sharded.load_whole(weights)

    def _state(self) -> dict[str, Tensor]:
        weights = {f"model.{name}": parameter.detach() for name, parameter in self.sharded.parameters.items()}
        return weights | self.optimiser.state()

    def _resume_from(self, folder: Path) -> None:
        def verify() -> dict[str, Any]:
            try:
                torch.ops.gka.verify_folder(os.fspath(folder))
            except RuntimeError as error:
                raise RuntimeError(
                    f"{sentence_of(error)}; remove that folder, and {how_to_continue(self.plan.run)} goes on from the "
                    "checkpoint before it."
                ) from None
            return json.loads((folder / "trainer.json").read_text())

        progress = self.ranks.on_first(verify)
        if (folder / "distributed").is_dir():
            dcp.load(self._state(), checkpoint_id=folder / "distributed")
        else:
            self._load_single(folder)
        self.step = self.saved_step = progress["step"]
        self.tokens, self.seconds, self.position = progress["tokens"], progress["seconds"], progress["position"]
        data = json.dumps(progress.get("data", {}))
        try:
            torch.ops.gka.check_training_data(self.sources, data, self.step, os.fspath(self.plan.run))
        except RuntimeError as error:
            raise Refusal(sentence_of(error)) from None
        before = progress["settings"]
        planned = before["steps"] or -(-before["tokens"] // before["batch_tokens"])
        self.reached = progress["finished"] and self.step != planned
        if self.step > self.plan.steps:
            raise Refusal(
                f"the run has taken {self.step} steps already; steps is {self.plan.steps}, and it takes at least as "
                "many."
            )
        self.reader.source.seek(self.position)

    def _load_single(self, folder: Path) -> None:
        """A checkpoint of `gka train` itself."""
        self._load_model(folder)
        state: dict[str, Tensor] = {}
        if self.ranks.first:
            from safetensors.torch import load_file

            state = load_file(folder / "optimizer.safetensors")
        for part, tensors in (("exp_avg", self.optimiser.first), ("exp_avg_sq", self.optimiser.second)):
            named = {name: state[f"{part}.{name}"] for name in tensors} if state else None
            self.sharded.load_whole(named, tensors)
        if state:
            self.optimiser.steps.copy_(next(value for name, value in state.items() if name.startswith("step.")))
        dist.broadcast(self.optimiser.steps, src=0)

    # -- a step

    def _backward(self, step: Step) -> Tensor:
        self.optimiser.zero_gradients()
        divisor, total = float(max(1, step.targets)), torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for part in step.parts:
            loss = self._loss(part, divisor)[0]
            loss.backward()
            total += loss.detach()
        self.sharded.sum_small_gradients()
        return total

    def _loss(self, part: Batch, divisor: float, predict: bool = False) -> tuple[Tensor, Tensor | None]:
        device = self.ranks.device
        bounds = None if part.cu_seqlens is None else part.cu_seqlens.to(device)
        if self.context is not None:
            self.context.enter(None if bounds is None else part.cu_seqlens.tolist(), part.before)
        return self.sharded.model.loss(
            part.inputs.to(device), part.targets, cu_seqlens=bounds, divisor=divisor, predict=predict
        )

    def _take_step(self) -> tuple[dict[str, float], bool]:
        self.watchdog.at(self.step, "reading data")
        step = self.reader.next(more=self.step < self.plan.steps)
        self.position = step.position
        self.watchdog.at(self.step, "computing")
        loss = self._backward(step)
        stop = torch.tensor(float(self.signals.received != 0), dtype=torch.float64, device=loss.device)
        sums = self.ranks.sum(torch.stack([loss, self.sharded.gradient_square(), stop]))
        loss_sum, square, stops = sums.tolist()  # the one moment a step waits for a GPU
        length = math.sqrt(square)
        rate = self.plan.learning_rate_at(self.step)
        if not (math.isfinite(loss_sum) and math.isfinite(length)):
            self._explain_not_finite(loss_sum)
        if self.plan.clip > 0 and (factor := self.plan.clip / (length + 1e-6)) < 1:
            torch._foreach_mul_(self.sharded.gradients(), factor)
        self.optimiser.step(rate)
        self.tokens += step.tokens
        measured = {"loss": loss_sum, "learning_rate": rate, "gradient_norm": length, "batch": step.tokens}
        return measured, stops > 0

    def _explain_not_finite(self, loss: float) -> None:
        names, parameters = list(self.sharded.parameters), list(self.sharded.parameters.values())
        there = [i for i, parameter in enumerate(parameters) if parameter.grad is not None]
        broken = [i for i in there if not bool(local(parameters[i].grad).isfinite().all())]
        last = torch.tensor(float(max(broken, default=-1)), dtype=torch.float64, device=self.ranks.device)
        dist.all_reduce(last, op=dist.ReduceOp.MAX)
        # The backward pass goes from the last parameter to the first.
        where = "every gradient is finite, but their sum is not"
        if last >= 0:
            where = f"the first gradient that is not finite is that of {names[int(last)]}"
        saved = folders.list_checkpoints(self.plan.run)
        raise Refusal(
            f"the loss is {loss:g} at step {self.step}: {where}; start a new run with a lower learning_rate (it was "
            f"{self.plan.learning_rate:g}) or more warmup"
            + (f", with --from {saved[-1]} to keep what was learned." if saved else ".")
        )

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Every rank evaluates its rows. Right answers are counted as in `gka train`."""
        reader = self.eval_reader
        reader.source.seek(0)
        counts = torch.zeros(5, dtype=torch.float64, device=self.ranks.device)
        for _ in range(self.plan.eval_batches):
            self.watchdog.at(self.step, "evaluating")
            part = reader.part(*reader.next_whole())
            loss, predicted = self._loss(part, 1.0, predict=True)
            right = torch.ops.gka.count_right(reader.whole_prediction(part, predicted), part.row_targets)
            if self.ranks.place("context") or self.ranks.place("tensor"):  # others count the same rows
                right = [0] * 4
            counts += torch.tensor([float(loss), *right], dtype=torch.float64).to(counts.device)
        loss, tokens, right_tokens, answers, right_answers = self.ranks.sum(counts).tolist()
        right, asked = (right_answers, answers) if reader.is_task else (right_tokens, tokens)
        return {"eval_loss": loss / max(1.0, tokens), "eval_accuracy": right / asked if asked else 0.0}

    # -- saving

    def save(self) -> None:
        if self.saved_step == self.step:
            return
        self.watchdog.at(self.step, "saving")
        run, folder = self.plan.run, folders.checkpoint_path(self.plan.run, self.step)
        try:
            unfinished = Path(self.ranks.on_first(lambda: str(self._begin_save(folder))))
            self._save_shards(unfinished / "distributed")
            weights = self.sharded.whole()
            self.ranks.on_first(lambda: self._finish_save(folder, weights))
        except Refusal as error:
            raise Refusal(f"step {self.step} could not be saved ({error}); {after_making_room(run)}") from None
        self.saved_step = self.step

    def _begin_save(self, folder: Path) -> Path:
        self.metrics.flush()
        return folders.begin_checkpoint(folder)

    def _save_shards(self, folder: Path) -> None:
        problem = ""
        try:
            dcp.save(self._state(), checkpoint_id=folder)
        except Exception as error:
            problem = sentence_of(error)
        problems: list = [None] * self.ranks.size
        dist.all_gather_object(problems, problem)
        if any(problems):
            raise Refusal(next(filter(None, problems)))

    def _finish_save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        unfinished = folders.unfinished_path(folder)
        if self.tokenizer is not None:
            folders.write_text(unfinished / "tokenizer.json", self.tokenizer)
        torch.ops.gka.save_model(os.fspath(unfinished), self.model_json, weights)
        progress = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "position": self.position,
            "finished": self.reached or self.step == self.plan.steps,
            "threads": torch.get_num_threads(),
            "ranks": self.ranks.size,
            "data": self.data,
            "settings": self.plan.settings,
        }
        folders.write_text(unfinished / "trainer.json", json.dumps(progress, indent=2) + "\n")
        folders.finish_checkpoint(folder)
        folders.tidy_checkpoints(self.plan.run, self.plan.keep)

    # -- the loop

    def _due(self, every: int) -> bool:
        return every > 0 and (self.step % every == 0 or self.step == self.plan.steps)

    def _report(self, measured: dict[str, float], evaluation: dict[str, float], seconds: float) -> None:
        self.step_seconds = seconds if self.step_seconds == 0 else 0.95 * self.step_seconds + 0.05 * seconds
        tokens = measured.pop("batch")
        line = {"step": self.step, "tokens": self.tokens, **measured}
        line["tokens_per_second"] = float(round(tokens / seconds))
        line["memory_bytes"], line["seconds"] = memory_in_use(self.ranks.device), self.seconds
        line |= evaluation
        try:
            self.metrics.append(line)
        except RuntimeError as error:
            raise Refusal(f"{sentence_of(error)}; {after_making_room(self.plan.run)}") from None
        left = self.step_seconds * (self.plan.steps - self.step)
        self.progress.step(line | {"steps": self.plan.steps, "seconds_left": left})

    def _say(self, text: str) -> None:
        if self.ranks.first:
            self.progress.say(text)

    def _say_start(self) -> str:
        ranks, plan, short = self.ranks, self.plan, torch.ops.gka.short_count
        count = sum(parameter.numel() for parameter in self.sharded.parameters.values())
        kinds = [f"{size} {name}" for name, size in zip(("data", "context", "tensor"), ranks.mesh.shape, strict=True)]
        cut = f"{ranks.size} ranks ({' × '.join(kinds)})" if ranks.size > 1 else "one rank"
        return (
            f"{plan.run}: {short(float(count))} parameters, {str(self.compute).removeprefix('torch.')} on {cut} of "
            f"{ranks.device.type}; {self.reader.source.describe()}; "
            + (f"continues after step {self.step} of " if self.step else "")
            + f"{plan.steps} steps of {short(float(plan.batch_tokens))} tokens"
        )

    def run(self) -> bool:
        """Trains; returns whether the run is finished."""
        plan, begun, before = self.plan, time.monotonic(), self.seconds
        if self.ranks.first:
            self.metrics = folders.Metrics(plan.run, self.step)
        for note in self.notes:
            self._say(note)
        self._say(self._say_start())
        while self.step < plan.steps and not self.reached:
            started = time.monotonic()
            self.step += 1
            measured, stop = self._take_step()
            seconds = time.monotonic() - started
            evaluation = self.evaluate() if self.eval_reader and self._due(plan.eval_every) else {}
            wanted = plan.stop_accuracy
            self.reached = bool(evaluation) and wanted is not None and evaluation["eval_accuracy"] >= wanted
            self.seconds = before + time.monotonic() - begun
            if self.ranks.first:
                self._report(measured, evaluation, seconds)
            if stop or self.reached or self.step == plan.steps or self._due(plan.checkpoint_every):
                self.save()
            if stop and not self.reached and self.step < plan.steps:
                self._say(f"stopped after step {self.step}, saved; {how_to_continue(plan.run)} goes on from there.")
                return False
        took = torch.ops.gka.short_duration(self.seconds)
        self._say(f"finished after step {self.step} in {took}; the weights are in {plan.run / 'latest'}")
        return True


def how_to_continue(run: Path) -> str:
    return f"`torchrun … -m gka.train {run} --resume`"


def after_making_room(run: Path) -> str:
    """How to continue a run whose disk was full."""
    saved = folders.list_checkpoints(run)
    after = f"after step {int(saved[-1].name[5:])}." if saved else "from the beginning."
    return f"make room there, then {how_to_continue(run)} goes on {after}"


def check_folder(plan: Plan, resume: bool) -> None:
    """A new run needs a folder without one; a run to be continued must be the same one."""
    run = plan.run
    if not resume:
        if not folders.is_run(run) and folders.list_checkpoints(run):
            raise RuntimeError(
                f"'{run}' holds checkpoints of a run that has lost its train.json; move them, or choose another "
                "folder with --set output=FOLDER."
            )
        if folders.is_run(run) and folders.has_begun(run):
            raise RuntimeError(
                f"'{run}' already holds a run; {how_to_continue(run)} continues it, --set output=FOLDER starts "
                "another one elsewhere."
            )
        return
    before = read_plan(os.fspath(run), [])["settings"]
    now = plan.settings | {key: before[key] for key in ("steps", "tokens")}  # a run may go on for longer
    key = torch.ops.gka.training_difference(json.dumps(before), json.dumps(now))
    if key:
        raise RuntimeError(
            f"the run in '{run}' has another {key} ({json.dumps(before[key])[:60]}) than this one "
            f"({json.dumps(now[key])[:60]}); resume it with its own settings, {how_to_continue(run)}, or start a new "
            f"run from its weights with --from {run} --set output=FOLDER."
        )


def write_settings(plan: Plan, resume: bool) -> None:
    before = json.loads((plan.run / "train.json").read_text()) if resume else {}
    if any(before.get(key, "") != plan.settings[key] for key in ("steps", "tokens")):
        folders.write_text(plan.run / "train.json", json.dumps(plan.settings, indent=2) + "\n")
    folders.write_state(plan.run, "running", plan.steps)


def train(plan: Plan, ranks: Ranks, *, resume: bool = False, timeout: float = 600.0) -> bool:
    """Trains into ``plan.run`` until the steps are done or a signal asks to stop. Returns whether it is finished."""
    lock, entered, begun = None, False, False
    made: list[Path] = []  # folders, the deepest first
    watchdog = Watchdog(ranks.rank, ranks.size, timeout)

    def enter() -> None:
        nonlocal lock, entered
        if resume and not folders.is_run(plan.run):
            raise RuntimeError(f"there is no run in '{plan.run}' to resume; leave out --resume to start one.")
        made.extend(folder for folder in (plan.run, *plan.run.parents) if not folder.exists())
        plan.run.mkdir(parents=True, exist_ok=True)
        lock = torch.classes.gka.RunLock(os.fspath(plan.run))
        check_folder(plan, resume)
        entered = True

    try:
        ranks.on_first(enter)
        trainer = Trainer(plan, ranks, watchdog, resume)
        ranks.on_first(lambda: write_settings(plan, resume))
        begun = True
        finished = trainer.run()
        ranks.on_first(lambda: folders.write_state(plan.run, "finished" if finished else "stopped", plan.steps))
        return finished
    except BaseException as error:
        if ranks.first and lock is not None:
            # A run that was asked for something it cannot do stands as it did.
            note_failure(plan, lock, begun or (entered and folders.has_begun(plan.run)), sentence_of(error))
        raise
    finally:
        folders.remove_empty(made)
        watchdog.close()


def note_failure(plan: Plan, lock: Any, begun: bool, sentence: str) -> None:
    """Leaves no trace of a run that never began; notes in a run that did what went wrong. A finished run that could not
    continue stays finished."""
    try:
        if folders.is_finished(plan.run):
            return
        if begun:
            folders.write_state(plan.run, "failed", plan.steps, sentence)
        elif not folders.is_run(plan.run):
            lock.remove()
    except OSError:  # a full disk takes no notes, but the sentence still reaches the user
        pass


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchrun … -m gka.train", description="Trains as `gka train` does, on many devices."
    )
    parser.add_argument("config", help="a training file (JSON), or the folder of a run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one key of the file")
    parser.add_argument("--resume", action="store_true", help="continue the run; the number of ranks may differ")
    parser.add_argument("--from", dest="source", metavar="FOLDER", help="start from a checkpoint, run or model")
    parser.add_argument("--no-verify", action="store_true", help="do not check token files")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="ranks that share the heads (1)")
    parser.add_argument("--context-parallel", type=int, default=1, metavar="N", help="ranks that share a sequence (1)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds a rank may stand still (600)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    load_floors()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        if options.resume and options.source:
            raise Refusal("--resume continues a run and --from starts a new one from other weights; give one of them.")
        assignments = [*options.set, *([f"from={json.dumps(options.source)}"] if options.source else [])]
        try:
            plan = Plan(read_plan(options.config, assignments), verify=not options.no_verify)
            device = choose_device(plan.device)
        except RuntimeError as error:
            raise Refusal(sentence_of(error)) from None
        cut = {"context": options.context_parallel, "tensor": options.tensor_parallel}
        ranks = Ranks(device, **cut, timeout=options.timeout + 60)
        finished = train(plan, ranks, resume=options.resume, timeout=options.timeout)
        dist.all_reduce(torch.zeros(()))  # a rank that hangs up first would be an error of those that still listen
        dist.destroy_process_group()
        return 0 if finished else STOPPED
    except Refusal as error:
        if rank == 0:
            sys.stderr.write(f"gka.train: {error}\n")
    except Exception as error:
        if os.environ.get("GKA_TRACEBACK"):
            raise
        sys.stderr.write(f"gka.train: {f'rank {rank}: ' if size > 1 else ''}{sentence_of(error)}\n")
    sys.stderr.flush()
    os._exit(1)  # ranks that still wait for this one are not waited for


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is saved. Taking the interpreter down is a race with gloo's threads: one that then drops the tensors of a
    # finished message asks for the GIL, is ended for it by Python inside a destructor, and the process aborts.
    os._exit(status)
