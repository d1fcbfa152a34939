"""How many parameters a model has and how large its state is, from its config alone: nothing is built, nothing read."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from longrecall.layers.descriptions.base import MixerConfig
from longrecall.layers.descriptions.mlp import MLPConfig
from longrecall.layers.descriptions.retrieval import RetrievalConfig
from longrecall.models.sizes import LayerConfig, ModelSizes

STATE_BYTES = 4
"""Recurrent states are float32 whatever the weights are."""

CACHE_BYTES = 2
"""Key-value caches are counted in 16-bit numbers, as they are served."""


TOKEN_BYTES = 4
"""A state keeps token ids as int32."""


@dataclass(frozen=True)
class LayerAccount:
    """One layer: its mixer type, its sizes as `name=value` text, parameters, numbers in its recurrent state."""

    index: int
    mixer: str
    sizes: str
    parameters: int
    state_size: int


@dataclass(frozen=True)
class ModelAccount:
    """A whole model: every layer, the total of parameters (embeddings and head included) and of state numbers."""

    layers: tuple[LayerAccount, ...]
    parameters: int
    state_size: int
    active_parameters: int
    """The total without the experts (or memories) that one token is not sent to; embeddings and head count whole."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state of one sequence in float32 (no convolution inputs, no key-value cache)."""
        return STATE_BYTES * self.state_size


def account(config: ModelSizes) -> ModelAccount:
    """Count parameters and state of `config`; a tied head is counted once, a handover's `progress` not at all."""
    per_layer = [0] * len(config.layers)
    total = 0
    for name, shape in config.tensor_shapes().items():
        # progress is where a handover stands, a buffer: no optimizer ever sees it.
        if name.endswith(".mixer.progress"):
            continue
        count = math.prod(shape)
        total += count
        if name.startswith("model.layers."):
            per_layer[int(name.split(".")[2])] += count
    layers = tuple(
        LayerAccount(
            index=index,
            mixer=layer.mixer.type,
            sizes=_sizes(layer),
            parameters=per_layer[index],
            state_size=layer.state_size(),
        )
        for index, layer in enumerate(config.layer_configs())
    )
    parts = Counter(part for layer in config.layer_configs() for _, part in layer.parts())
    idle = sum(count * _idle_parameters(part, config.hidden_size) for part, count in parts.items())
    return ModelAccount(layers, total, sum(layer.state_size for layer in layers), total - idle)


def _sizes(layer: LayerConfig) -> str:
    """The sizes of a layer: of its first block's module and its MLP, then of what else it has."""
    others = [block.module for block in layer.blocks[1:] if not isinstance(block.module, MLPConfig)]
    shown = [f"{part.type} {describe_sizes(part.to_dict())}" for part in others]
    return " + ".join([describe_sizes(layer.mixer.to_dict(), layer.mlp_size), *shown])


def _idle_parameters(part: MixerConfig, hidden_size: int) -> int:
    """Parameters of a part of a layer that one token does not meet."""
    both = (part.tensor_shapes(hidden_size), part.active_tensor_shapes(hidden_size))
    every, active = (sum(math.prod(shape) for shape in shapes.values()) for shapes in both)
    return every - active


_SHOWN = (
    "num_heads",
    "value_heads",
    "kv_heads",
    "key_dim",
    "value_dim",
    "inner_dim",
    "head_dim",
    "kv_rank",
    "q_rank",
    "nope_dim",
    "rope_dim",
    "state_dim",
    "groups",
    "memories",
    "active",
    "num_experts",
    "top_k",
    "inner_size",
    "shared_size",
    "latent_size",
    "conv_width",
    "channels",
    "kernel",
    "shift_dim",
    "implicit",
    "max_length",
    "filter_width",
    "window",
    "meta_tokens",
    "merged",
)


def describe_sizes(mixer: dict[str, Any], mlp_size: int = 0) -> str:
    """Return the sizes of a mixer description (defaults written out) as one line, e.g. `num_heads=4 key_dim=256`.

    A handover shows its old mixer, and of the new one what differs; hymba, parallel and shared_block show what is
    inside them, retrieval its base.
    """
    if mixer["type"] == "retrieval":
        base, own = mixer.get("base"), ("chunk", "top_k", "encoder_dim", "num_heads", "kv_heads", "head_dim")
        shown = " ".join([mixer["selector"], *(f"{name}={mixer[name]}" for name in own), f"blend={mixer['blend']}"])
        before = f"{base['type']} {describe_sizes(base)} + " if base else ""
        return f"{before}{shown}{f' mlp={mlp_size}' if mlp_size else ''}"
    if mixer["type"] == "handover":
        old, new = mixer["old"], mixer["new"]
        changed = {key: value for key, value in new.items() if value != old.get(key)}
        return f"{old['type']} {describe_sizes(old)} -> {describe_sizes({**changed, 'type': new['type']})}"
    if mixer["type"] in ("hymba", "parallel", "shared_block"):
        branches = [mixer[name] for name in ("attention", "ssm", "third", "mixer") if name in mixer]
        shown = " + ".join(f"{branch['type']} {describe_sizes(branch)}" for branch in branches)
        return f"{shown} mlp={mlp_size}" if mlp_size else shown
    parts = [key if mixer[key] is True else f"{key}={mixer[key]}" for key in _SHOWN if mixer.get(key)]
    if expansion := mixer.get("expansion"):
        parts.append(f"expansion={expansion['kind']}:{expansion['factor']}")
        parts += [] if expansion["subheads"] else ["subheads=no"]
    return " ".join([*parts, *([f"mlp={mlp_size}"] if mlp_size else [])])


def key_value_cache_size(config: ModelSizes, context: int) -> int:
    """Return the numbers that the layers of `config` cache for one sequence of `context` tokens.

    Attention keeps keys and values: 2 * kv_heads * head_dim a token and layer, at most `window` tokens where a layer
    has one. Implicit convolutions (`hyena`, `base_conv`) keep one number a channel and token.
    """
    return sum(numbers * _kept(window, context) for numbers, window in _caches(config))


def _caches(config: ModelSizes) -> list[tuple[int, int | None]]:
    return [cache for layer in config.layer_configs() for cache in layer.caches()]


def _kept(window: int | None, context: int) -> int:
    return context if window is None else min(context, window)


def retrieval_bytes(config: ModelSizes, context: int) -> int:
    """Return what retrieval layers keep of one sequence of `context` tokens, in bytes; 0 without such a layer.

    One vector of `encoder_dim` 16-bit numbers a finished chunk and layer, and the token ids (32 bit) once.
    """
    layers = [
        found for layer in config.layer_configs() for _, part in layer.parts() for found in _retrieval_layers(part)
    ]
    vectors = sum(layer.encoder_dim * (context // layer.chunk) for layer in layers)
    return CACHE_BYTES * vectors + (TOKEN_BYTES * context if layers else 0)


def _retrieval_layers(mixer: MixerConfig) -> list[RetrievalConfig]:
    if isinstance(mixer, RetrievalConfig):
        return [mixer]
    inner = [getattr(mixer, name) for name in mixer.nested]
    return [found for config in inner if config is not None for found in _retrieval_layers(config)]


def average_key_value_cache_size(config: ModelSizes, context: int) -> float:
    """Return the numbers that those layers cache on average while they read `context` L tokens.

    Source: "Scaling up the State Size of RNN LLMs for Long-Context Scenarios", section 3.1 and appendix A.4: half of
    the full cache without a window, L * H * (d_qk + d_v) / 2 a layer. With a window W < L it is the mean of min(t, W)
    times the numbers of a token, W * (1 - W / 2L) times 2 * kv_heads * head_dim, which for long contexts is the paper's
    W * H * (d_qk + d_v).
    """
    total = 0.0
    for numbers, window in _caches(config) if context else []:
        kept = _kept(window, context)
        total += numbers * kept * (1 - kept / (2 * context))
    return total


def transformer_cache_size(config: ModelSizes, context: int) -> int:
    """Return the numbers a Transformer of this width and depth would cache for one sequence of `context` tokens.

    The yardstick for a state: full multi-head attention in every layer keeps 2 * hidden_size numbers a token and layer.
    """
    return 2 * config.hidden_size * len(config.layers) * context


def equivalent_context(config: ModelSizes, state_size: int) -> float:
    """Return at how many tokens that Transformer's cache has the bytes of a recurrent state of `state_size` numbers."""
    per_token = CACHE_BYTES * transformer_cache_size(config, 1)
    return STATE_BYTES * state_size / per_token if per_token else 0.0


def state_ratio(config: ModelSizes, context: int) -> float | None:
    """Return the numbers in that Transformer's cache as a multiple of those in the recurrent state; None without state.

    Of the cache its average over `context` L tokens counts, half of the full one: for d_qk = d_v = d and one state a
    head this is L / d, equation 4 of "Scaling up the State Size of RNN LLMs for Long-Context Scenarios".
    """
    state = config.state_size()
    return transformer_cache_size(config, context) / 2 / state if state else None
