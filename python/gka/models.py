"""Whole models: one decoder for any mixture of layers, loaded from and saved to the published layout.

model = gka.load("model/")                         # a checkpoint's folder, or a training run
logits = model(ids)                                # ids [B, T] -> [B, T, vocabulary]
logits, state = model(ids, return_state=True)      # to continue later: model(more, state)
tokens = model.generate(ids, max_tokens=50)
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from . import _parts as parts
from . import nn as layers
from ._library import load_floors

_KEEP = ("rms_norm_eps", "attention_bias", "rope_theta")


def _attention(c: dict, window: int | None, **factory: object) -> nn.Module:
    own = c["attention_config"]
    return layers.Attention(
        c["hidden_size"],
        c["num_attention_heads"],
        c["num_key_value_heads"],
        c["head_dim"],
        sliding_window=window,
        rope_parameters=c["rope_parameters"],
        **{key: c[key] for key in _KEEP},
        **own,
        **factory,
    )


def _grouped(kind: type, group: str) -> Callable[..., nn.Module]:
    """GKA and GDN: heads are those of attention unless the group says otherwise."""

    def make(c: dict, **factory: object) -> nn.Module:
        own = dict(c[group])
        heads = [own.pop(f"num_{name}_heads") for name in "qkv"]
        usual = (c["num_attention_heads"], c["num_key_value_heads"], c["num_key_value_heads"])
        size = own.pop("head_dim") or c["head_dim"]
        own["kv_proj_rank"] = own["kv_proj_rank"] or None
        counts = [given or otherwise for given, otherwise in zip(heads, usual, strict=True)]
        return kind(c["hidden_size"], size, *counts, **own, **factory)

    return make


def _headed(kind: type, group: str) -> Callable[..., nn.Module]:
    def make(c: dict, **factory: object) -> nn.Module:
        own = dict(c[group])
        heads = own.pop("num_heads") or c["num_attention_heads"]
        size = own.pop("head_dim") or c["head_dim"]
        return kind(c["hidden_size"], size, heads, **own, **factory)

    return make


def _shared(kind: type, group: str) -> Callable[..., nn.Module]:
    def make(c: dict, **factory: object) -> nn.Module:
        own = dict(c[group])
        return kind(c["hidden_size"], own.pop("num_heads") or c["num_attention_heads"], **own, **factory)

    return make


#: A layer for every token of a pattern.
MIXERS: dict[str, Callable[..., nn.Module]] = {
    "*": lambda c, **factory: _attention(c, None, **factory),
    "SWA": lambda c, **factory: _attention(c, c["sliding_window"], **factory),
    "GKA": _grouped(layers.GatedKalmaNet, "gka_config"),
    "GDN": _grouped(layers.GatedDeltaNet, "gdn_config"),
    "M2": lambda c, **factory: layers.Mamba2(c["hidden_size"], **c["mamba2_config"], **factory),
    "DN": _headed(layers.DeltaNet, "deltanet_config"),
    "KDA": _headed(layers.KimiDeltaAttention, "kda_config"),
    "MESA": _headed(layers.MesaNet, "mesa_config"),
    "GLA": _shared(layers.GatedLinearAttention, "gla_config"),
    "RET": _shared(layers.RetNet, "retnet_config"),
    "LA": _shared(layers.LinearAttention, "linear_attn_config"),
}


def read_config(source: dict | str | os.PathLike[str], *, strict: bool = True) -> dict:
    """A configuration with every key spelled out, from the dict of a config.json or from a checkpoint's folder.

    The library reads and checks it, so errors are those of the command line, in one sentence. ``strict=False`` ignores
    unknown keys of a dict.
    """
    load_floors()
    try:
        if isinstance(source, dict):
            return json.loads(torch.ops.gka.parse_config(json.dumps(source), "the configuration", strict))
        return json.loads(torch.ops.gka.read_config(os.fspath(source)))
    except RuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from None


def checkpoint_of(folder: str | os.PathLike[str]) -> Path:
    """The folder itself, or the newest checkpoint of a training run."""
    folder = Path(folder)
    latest = folder / "latest"
    return latest if not (folder / "config.json").exists() and (latest / "config.json").exists() else folder


class Mlp(nn.Module):
    """down(SiLU(gate x) · up x)."""

    def __init__(self, hidden_size: int, intermediate_size: int, **factory: object) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False, **factory)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False, **factory)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """x += mixer(norm(x)); x += mlp(norm(x)). The mixer has its published name (``self_attn``, ``gka``, …)."""

    def __init__(self, config: dict, place: int, **factory: object) -> None:
        super().__init__()
        token, self.prefix = config["layer_types"][place], config["prefixes"][place]
        self.recompute = False  # in the backward pass, instead of keeping what lies inside
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = parts.Norm(width, eps, **factory)
        self.add_module(self.prefix, MIXERS[token](config, **factory))
        self.mlp = None
        if not config["without_mlp"][place]:
            self.post_attention_layernorm = parts.Norm(width, eps, **factory)
            self.mlp = Mlp(width, config["intermediate_size"], **factory)

    @property
    def mixer(self) -> nn.Module:
        return getattr(self, self.prefix)

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + mixed
        return x if self.mlp is None else x + self.mlp(self.post_attention_layernorm(x))

    def forward(
        self, x: Tensor, state: tuple | None, cu_seqlens: Tensor | None, keep: bool = True
    ) -> tuple[Tensor, tuple | None]:
        """``keep=False``: the state after it is not needed."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._run, x, state, cu_seqlens, keep, use_reentrant=False, preserve_rng_state=False)
        return self._run(x, state, cu_seqlens, keep)

    def _run(
        self, x: Tensor, state: tuple | None, cu_seqlens: Tensor | None, keep: bool
    ) -> tuple[Tensor, tuple | None]:
        mixed, state = self.mixer(self.input_layernorm(x), state, cu_seqlens)
        return self.finish(x, mixed), state if keep else None


class _Stack(nn.Module):
    """What lies under ``model.`` in a checkpoint."""

    def __init__(self, config: dict, **factory: object) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"], **factory)
        self.layers = nn.ModuleList(Block(config, i, **factory) for i in range(len(config["layer_types"])))
        self.norm = parts.Norm(config["hidden_size"], config["rms_norm_eps"], **factory)


State = tuple  # of each block's state, in order


class Decoder(nn.Module):
    """Embedding, blocks, norm, head; the pattern of the configuration picks each block's mixer.

    Args:
        config: as in config.json (docs/models.md), a dict.
        device, dtype: of the parameters. On ``meta`` nothing is allocated; ``reset_parameters`` draws them later.
    """

    def __init__(
        self, config: dict, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = c = config if isinstance(config, dict) and "prefixes" in config else read_config(config)
        factory = {"device": device, "dtype": dtype}
        self.share: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] | None = None
        self.model = _Stack(c, **factory)
        self.lm_head = None
        if not c["tie_word_embeddings"]:
            self.lm_head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws first weights as `gka train` does."""
        std = self.config["initializer_range"]
        parts.reset(self, std)
        for block in self.model.layers:
            block.mixer.reset_parameters(std)

    def forward(
        self,
        ids: Tensor,
        state: State | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, State]:
        """ids [B, T] -> logits [B, T, vocabulary]; with ``return_state`` also what each block remembers.

        With ``cu_seqlens`` ids are one row of packed sequences that begin here.
        """
        hidden, state = self.hidden(ids, state, cu_seqlens)
        logits = self.head(hidden)
        return (logits, state) if return_state else logits

    def hidden(
        self, ids: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None, keep: bool = True
    ) -> tuple[Tensor, State]:
        """The input of the head, [B, T, hidden_size], and the states, if they are to be kept."""
        if state is not None and len(state) != len(self.model.layers):
            raise ValueError(f"state is of {len(state)} blocks, and the model has {len(self.model.layers)}.")
        x, after = self._embed(ids), []
        for i, block in enumerate(self.model.layers):
            x, kept = block(x, None if state is None else state[i], cu_seqlens, keep)
            after.append(kept)
        return self.model.norm(x), tuple(after)

    def _embed(self, ids: Tensor) -> Tensor:
        _check_ids(ids)
        try:
            return self.model.embed_tokens(ids)
        except IndexError:
            least, most = (int(bound) for bound in ids.aminmax())
            size = self.config["vocab_size"]
            raise IndexError(f"ids takes numbers from 0 to {size - 1}, got some from {least} to {most}.") from None

    def head(self, hidden: Tensor) -> Tensor:
        return (
            functional.linear(hidden, self.model.embed_tokens.weight) if self.lm_head is None else self.lm_head(hidden)
        )

    def loss(
        self,
        ids: Tensor,
        targets: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        divisor: float = 0.0,
        predict: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The mean cross entropy, computed without holding the logits of all tokens at once.

        Args:
            ids, targets: [B, T]; targets[t] is the token after ids[t], or −100 to leave it out.
            divisor: the number by which the sum over the targets is divided. Left out: their number.
            predict: also return the likeliest token at each target, int64 in the order of the targets.
        """
        hidden, _ = self.hidden(ids, None, cu_seqlens, keep=False)
        weight = (self.model.embed_tokens if self.lm_head is None else self.lm_head).weight
        if self.share is not None:  # ranks that have the same tokens take a part each
            hidden, weight, targets = self.share(hidden, weight, targets)
        load_floors()
        return torch.ops.gka.head_loss(hidden, weight, targets, divisor, predict)

    @torch.no_grad()
    def score(self, ids: Tensor) -> Tensor:
        """log p of every token but the first given those before it: ids [B, T] -> [B, T − 1] in float32."""
        logits = self(ids)[:, :-1].float()
        return logits.log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        max_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
        state: State | None = None,
    ) -> Tensor:
        """ids [B, T] -> the tokens that follow, [B, up to max_tokens]; temperature 0 takes the likeliest.

        A row that has met one of ``eos_token_id`` repeats it until all rows have ended.
        """
        parts.at_least("temperature", temperature, 0)
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p is {top_p}; it takes a number above 0 and at most 1.")
        _check_ids(ids)
        if ids.shape[1] == 0 and max_tokens > 0:
            raise ValueError("ids has no tokens; the model needs one to begin with.")
        ends = torch.tensor(self.config["eos_token_id"], dtype=torch.long, device=ids.device)
        over = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
        last, tokens = ids, []
        for _ in range(max_tokens):
            hidden, state = self.hidden(last, state)
            token = _draw(self.head(hidden[:, -1]).float(), temperature, top_p, generator)
            if tokens:
                token = torch.where(over, tokens[-1], token)
            tokens.append(token)
            over |= torch.isin(token, ends)
            if over.all():
                break
            last = token.unsqueeze(1)
        return torch.stack(tokens, 1) if tokens else ids[:, :0]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes a folder that `gka generate`, `gka train --from` and :func:`load` open."""
        weights = {name: tensor.detach().cpu() for name, tensor in self.state_dict().items()}
        kept = {key: value for key, value in self.config.items() if key not in ("prefixes", "without_mlp")}
        torch.ops.gka.save_model(os.fspath(folder), json.dumps(kept), weights)


def _check_ids(ids: Tensor) -> None:
    if not isinstance(ids, Tensor):
        raise TypeError(f"ids takes a tensor of token numbers [B, T], got {type(ids).__name__}.")
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"ids takes token numbers [B, T] in int64 or int32, got {ids.dtype} of shape {list(ids.shape)}."
        )


def _draw(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = (logits / temperature).softmax(-1)
    if top_p < 1:
        ordered, places = probabilities.sort(-1, descending=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0)
        probabilities = torch.zeros_like(probabilities).scatter_(-1, places, ordered)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


def load(
    folder: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Decoder:
    """The model of a checkpoint's folder or of a training run. Without ``dtype`` it has the files' own type.

    Raises:
        ValueError: one sentence, if the folder holds no complete model that gka supports.
    """
    folder = checkpoint_of(folder)
    config = read_config(folder)
    try:
        weights = torch.ops.gka.load_weights(os.fspath(folder))
    except RuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from None
    stored = dtype or next(iter(weights.values())).dtype
    model = Decoder(config, device="meta", dtype=stored)
    placed = {name: tensor.to(device, stored, copy=True) for name, tensor in weights.items()}
    model.load_state_dict(placed, assign=True)
    return model
