"""gka's models in transformers: ``import gka.hf`` and the Auto classes open our checkpoints and published hybrids.

    import gka.hf
    model = transformers.AutoModelForCausalLM.from_pretrained("model/")
    model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=20)

Memories keep their states in transformers' own cache for linear layers; attention keeps its keys and values in the
usual place. In a padded batch memories never see the padding. Packed rows come with ``cu_seq_lens_q``, or (a single
row, without a mask or a cache) with position ids that begin anew.
"""

import json
import os
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

try:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
    from transformers.cache_utils import Cache, DynamicCache
    from transformers.masking_utils import (
        create_causal_mask,
        create_recurrent_attention_mask,
        create_sliding_window_causal_mask,
    )
    from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
    from transformers.utils.generic import can_return_tuple
except ImportError as error:
    raise ImportError(f"gka.hf needs transformers 5 (tested with 5.22.2): {error}") from error

from . import nn as layers
from ._library import load_floors
from .models import _Stack, read_config
from .nn import parameter_groups  # noqa: F401  (where it was first)

#: transformers' names for our layers; a memory has one for all kinds.
_NAMES = {"*": "full_attention", "SWA": "sliding_attention"}
_MEMORY = "linear_attention"
#: What the states of a layer have most of: GKA's three convolutions; a memory's tensors fit beside.
_STATES = 3


class GkaConfig(PreTrainedConfig):
    """config.json as it is; ``spelled_out()`` adds the default of every key that is left out.

    An option may be changed until a model is made, by ``from_pretrained(folder, rms_norm_eps=…)`` or as an attribute.
    """

    model_type = "hybrid_qwen3"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(self, **kwargs: object) -> None:
        for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
            kwargs.setdefault(key, None)
        layers_given = kwargs.pop("layer_types", None)
        given = kwargs if layers_given is None else kwargs | {"layer_types": list(layers_given)}
        spelled = _spelled_out(given) if "vocab_size" in kwargs else None
        super().__init__(**kwargs)
        if spelled is not None:  # transformers makes an empty one to compare with
            self._take(spelled)

    def _take(self, spelled: dict) -> None:
        """What transformers reads, and what may be left out in a file."""
        self.layer_types = [_NAMES.get(token, _MEMORY) for token in spelled["layer_types"]]
        self.hybrid_override_pattern = "-".join(spelled["layer_types"])
        self.number_of_conv_states = _STATES
        for key in ("num_hidden_layers", "num_key_value_heads", "head_dim", "max_position_embeddings", "vocab_size"):
            setattr(self, key, spelled[key])
        self.hidden_size, self.sliding_window = spelled["hidden_size"], spelled["sliding_window"]
        self.tie_word_embeddings = spelled["tie_word_embeddings"]

    def spelled_out(self) -> dict:
        """Of what would be written now, so that a model that is made now is the one that is read again."""
        kept = self.to_dict()
        kept.pop("layer_types", None)  # the pattern says more
        return _spelled_out(kept)

    def settled(self) -> dict:
        """The same, and the attributes that follow from others follow from these."""
        spelled = self.spelled_out()
        self._take(spelled)
        return spelled

    def to_dict(self) -> dict:
        kept = super().to_dict()
        kept.pop("number_of_conv_states", None)
        return kept


def _spelled_out(given: dict) -> dict:
    kept = {key: value for key, value in given.items() if _is_json(value) and key not in ("dtype", "torch_dtype")}
    return read_config(kept | {"model_type": GkaConfig.model_type}, strict=False)


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


class MemoryCache(DynamicCache):
    """transformers' cache for a model without attention, whose layers do not say how many tokens they have seen."""

    seen = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def reset(self) -> None:
        super().reset()
        self.seen = 0


class Backbone(_Stack):
    """Embedding, blocks and norm behind transformers' interface, for use with a head or a loss of your own."""

    def __init__(self, config: GkaConfig) -> None:
        super().__init__(config.settled())
        self.config = config
        self.gradient_checkpointing = False  # transformers looks for it

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **_: object,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, and not both.")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if cu_seq_lens_q is None and attention_mask is None and past_key_values is None:
            cu_seq_lens_q = _packed_by(position_ids)
        recompute = self.gradient_checkpointing and self.training
        use_cache = not self.training if use_cache is None else use_cache and not recompute
        if use_cache and past_key_values is None and cu_seq_lens_q is None:
            past_key_values = self.new_cache()
        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = (torch.arange(x.shape[1], device=x.device) + seen).unsqueeze(0)
        masks = self._masks(x, attention_mask, past_key_values, position_ids)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        before = []  # of each block, where they are asked for
        for i in range(len(self.layers)):
            before += [x] if wanted else []
            given = (i, x, masks, position_ids, past_key_values, cu_seq_lens_q)
            x = self._gradient_checkpointing_func(self._through, *given) if recompute else self._through(*given)
        if isinstance(past_key_values, MemoryCache):
            past_key_values.seen += x.shape[1]
        hidden = self.norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=past_key_values,
            hidden_states=(*before, hidden) if wanted else None,
        )

    def _through(
        self, i: int, x: Tensor, masks: dict, positions: Tensor, cache: Cache | None, bounds: Tensor | None
    ) -> Tensor:
        """One block."""
        block, kind = self.layers[i], self.config.layer_types[i]
        normed = block.input_layernorm(x)
        if bounds is not None:
            mixed, _ = block.mixer(normed, None, bounds)
        elif kind == _MEMORY:
            mixed = _remember(block.mixer, normed, masks[kind], cache, i)
        else:
            mixed = _attend(block.mixer, normed, masks[kind], positions, cache, i)
        return block.finish(x, mixed)

    def has_attention(self) -> bool:
        return any(kind != _MEMORY for kind in self.config.layer_types)

    def new_cache(self) -> Cache:
        return (DynamicCache if self.has_attention() else MemoryCache)(config=self.config)

    def _masks(self, x: Tensor, mask: Tensor | dict | None, cache: Cache | None, positions: Tensor) -> dict:
        if isinstance(mask, dict):
            return mask
        makers = {
            "full_attention": create_causal_mask,
            "sliding_attention": create_sliding_window_causal_mask,
            _MEMORY: create_recurrent_attention_mask,
        }
        given = {"attention_mask": mask, "past_key_values": cache, "position_ids": positions}
        return {
            kind: makers[kind](config=self.config, inputs_embeds=x, **given) for kind in set(self.config.layer_types)
        }


class GkaPreTrainedModel(PreTrainedModel):
    config_class = GkaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _is_stateful = True
    _no_split_modules = ("Block",)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, *more: object, **options: object
    ) -> "PreTrainedModel":
        """As in transformers; refuses a folder of gka's whose files are not those that were written."""
        folder = pretrained_model_name_or_path
        if folder is not None and Path(folder).is_dir():
            load_floors()
            try:
                torch.ops.gka.verify_model(os.fspath(folder))
            except RuntimeError as error:
                raise ValueError(str(error).splitlines()[0]) from None
        return super().from_pretrained(folder, *more, **options)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *more: object, **options: object) -> None:
        """As in transformers; the folder also opens without importing gka (``trust_remote_code=True``)."""
        super().save_pretrained(save_directory, *more, **options)
        folder = Path(save_directory)
        (folder / "CHECKSUMS.xxh64").unlink(missing_ok=True)  # of what was here before
        if (folder / "config.json").exists():
            add_auto_map(folder)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Only what no checkpoint brought."""
        own = [*module.parameters()] if isinstance(module, layers.Mixer) else [*module.parameters(recurse=False)]
        if not own or any(getattr(parameter, "_is_hf_initialized", False) for parameter in own):
            return
        std = self.config.spelled_out()["initializer_range"]
        if isinstance(module, layers.Mixer):
            module.reset_parameters(std)
        elif isinstance(module, nn.Linear | nn.Embedding):
            module.weight.normal_(std=std)


class GkaForCausalLM(GkaPreTrainedModel, GenerationMixin):
    """The decoder of :mod:`gka.models` behind transformers' interface, with the same parameter names."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: GkaConfig) -> None:
        super().__init__(config)
        spelled = config.settled()
        if spelled["attention_config"]["conv_size"]:
            raise ValueError(
                "attention_config.conv_size is above 0: transformers' cache has no room for it; use gka.load."
            )
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seq_lens_q: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: object,
    ) -> CausalLMOutputWithPast:
        given = (input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, cu_seq_lens_q)
        below = self.model(*given, output_hidden_states, return_dict=True)
        hidden = below.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else slice(None)
        logits = self.lm_head(hidden[:, logits_to_keep if isinstance(logits_to_keep, Tensor) else kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=below.past_key_values, hidden_states=below.hidden_states
        )

    def _prepare_cache_for_generation(
        self, generation_config: object, model_kwargs: dict, *more: object, **named: object
    ) -> None:
        if (
            not self.model.has_attention()
            and model_kwargs.get("past_key_values") is None
            and generation_config.use_cache
        ):
            model_kwargs["past_key_values"] = self.model.new_cache()
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *more, **named)


def _packed_by(positions: Tensor | None) -> Tensor | None:
    """The bounds of a packed row whose positions begin anew; None for any other row."""
    if positions is None or positions.shape[0] != 1 or positions.shape[1] < 2:
        return None
    anew = (positions[0, 1:] <= positions[0, :-1]).nonzero().flatten() + 1
    return functional.pad(functional.pad(anew, (1, 0)), (0, 1), value=positions.shape[1]) if len(anew) else None


def _attend(mixer: nn.Module, x: Tensor, mask: Tensor | None, positions: Tensor, cache: Cache | None, i: int) -> Tensor:
    q, k, v, _ = mixer.project(x, None, None, positions.expand(x.shape[0], -1))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if cache is not None:
        k, v = cache.update(k, v, i)
    o = functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None and q.shape[2] > 1,
        enable_gqa=mixer.heads != mixer.kv_heads,
    )
    return mixer.o_proj(o.transpose(1, 2).flatten(-2))


def _remember(mixer: nn.Module, x: Tensor, mask: Tensor | None, cache: Cache | None, i: int) -> Tensor:
    """Tokens that are padding are left out: the others of all rows go through the memory packed."""
    before = None if cache is None else _state_in(cache, i, mixer)
    if mask is None:
        mixed, after = mixer(x, before)
    else:
        kept = mask.bool()
        bounds = functional.pad(kept.sum(1).cumsum(0), (1, 0))
        packed, after = mixer(x[kept].unsqueeze(0), before, bounds)
        mixed = torch.zeros_like(x)
        mixed[kept] = packed.squeeze(0)
    if cache is not None:
        _keep(cache, i, after)
    return mixed


def _split(state: tuple) -> tuple[list[str], list[str]]:
    """The names of a state's convolutions, and of its memories."""
    names = [name for name in state._fields if getattr(state, name) is not None]
    return [n for n in names if n.startswith("conv")], [n for n in names if not n.startswith("conv")]


def _keep(cache: Cache, i: int, state: tuple) -> None:
    convolutions, memories = _split(state)
    layer = cache.layers[i]
    layer.gka_fields = (type(state), convolutions, memories)
    if layer.device is None:
        layer.dtype, layer.device = state[-1].dtype if state[-1] is not None else None, _device(state)
    for place, name in enumerate(convolutions):
        cache.update_conv_state(getattr(state, name), i, state_idx=place)
    for place, name in enumerate(memories):
        cache.update_recurrent_state(getattr(state, name), i, state_idx=place)


def _device(state: tuple) -> torch.device:
    return next(tensor.device for tensor in state if tensor is not None)


def _state_in(cache: Cache, i: int, mixer: nn.Module) -> tuple | None:
    layer = cache.layers[i]
    if not hasattr(layer, "gka_fields"):
        return None
    kind, convolutions, memories = layer.gka_fields
    found = {name: layer.conv_states[place] for place, name in enumerate(convolutions)}
    found |= {name: layer.recurrent_states[place] for place, name in enumerate(memories)}
    return kind(**{name: found.get(name) for name in kind._fields})


AutoConfig.register(GkaConfig.model_type, GkaConfig, exist_ok=True)
AutoModelForCausalLM.register(GkaConfig, GkaForCausalLM, exist_ok=True)

AUTO_MAP = {"AutoConfig": "gka_hf.GkaConfig", "AutoModelForCausalLM": "gka_hf.GkaForCausalLM"}


def add_auto_map(folder: str | os.PathLike[str]) -> None:
    """Makes ``from_pretrained(…, trust_remote_code=True)`` open a folder without ``import gka.hf`` first."""
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"auto_map": AUTO_MAP}, indent=2) + "\n")
    (Path(folder) / "gka_hf.py").write_text("from gka.hf import GkaConfig, GkaForCausalLM  # noqa: F401\n")
