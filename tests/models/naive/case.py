"""What the models written out here share: how weights are drawn, the blocks around a mixer, and norms."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from tests.models.families.case import VOCABULARY

Config = dict[str, Any]


class Weights:
    """The tensors of a checkpoint, drawn when a model asks for them the first time.

    A matrix has entries of a size that keeps what it multiplies as large as it was.
    """

    def __init__(self, seed: int = 0) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, name: str, *shape: int, mean: float = 0.0, size: float = 1.0) -> Tensor:
        """The tensor `name` of the file, in float64."""
        if name not in self.tensors:
            drawn = torch.randn(*shape, generator=self._generator)
            wide = shape[-1] ** -0.5 if len(shape) == 2 else 0.4
            self.tensors[name] = mean + size * wide * drawn
        assert self.tensors[name].shape == shape, name
        return self.tensors[name].double()

    def under(self, prefix: str) -> Callable[..., Tensor]:
        """The same with `prefix` before every name."""
        return lambda name, *shape, **how: self(prefix + name, *shape, **how)


@dataclass(frozen=True)
class Naive:
    """One configuration of a family.

    Attributes:
        format: the format's name in longrecall.
        name: what is special about it.
        config: the config.json.
        logits: (config, weights, ids [B, T]) -> logits [B, T, vocabulary], in float64.
        older: tensors as they are stored now -> as older files have them; they have to be read too.
    """

    format: str
    name: str
    config: Config
    logits: Callable[[Config, Weights, Tensor], Tensor]
    older: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None

    def __str__(self) -> str:
        return f"{self.format}-{self.name}"

    def write(self, folder: Path, ids: Tensor, *, older: bool = False) -> Tensor:
        """Write the checkpoint with drawn weights into a new folder, and return the logits of `ids` [B, T]."""
        weights = Weights()
        logits = self.logits(self.config, weights, ids)
        tensors = self.older(weights.tensors) if older and self.older is not None else weights.tensors
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(tensors, folder / "model.safetensors")
        return logits


Mixer = Callable[[Config, Callable[..., Tensor], Tensor, int, dict[str, Any]], Tensor]
"""(config, weights below the layer's mixer, x [B, T, d], layer, what layers share) -> y [B, T, d]."""


def transformer(config: Config, w: Weights, ids: Tensor, mixer: Mixer, shared: dict[str, Any] | None = None) -> Tensor:
    """Most models of fla: RMS norms, a mixer and a SwiGLU MLP in every layer, attention in some."""
    d, eps, inner = config["hidden_size"], config.get("norm_eps", 1e-6), config["intermediate_size"]
    x, shared = w("model.embeddings.weight", VOCABULARY, d, size=d**0.5)[ids], {} if shared is None else shared
    for index in range(config["num_hidden_layers"]):
        own = w.under(f"model.layers.{index}.")
        attn = w.under(f"model.layers.{index}.attn.")
        normed = rms(x, own("attn_norm.weight", d, mean=1.0), eps)
        spec = attention_of(config, index)
        x = x + (mixer(config, attn, normed, index, shared) if spec is None else attention(spec, attn, normed))
        normed = rms(x, own("mlp_norm.weight", d, mean=1.0), eps)
        gate, up = (normed @ own(f"mlp.{name}_proj.weight", inner, d).T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ own("mlp.down_proj.weight", d, inner).T
    return head(config, w, rms(x, w("model.norm.weight", d, mean=1.0), eps))


def head(config: Config, w: Weights, x: Tensor) -> Tensor:
    d = config["hidden_size"]
    if config.get("tie_word_embeddings"):
        return x @ w(config.get("embedding_name", "model.embeddings.weight"), VOCABULARY, d).T
    return x @ w("lm_head.weight", VOCABULARY, d, size=2.0).T


def attention_of(config: Config, index: int) -> dict[str, Any] | None:
    given = config.get("attn") or []
    specs = [given] if isinstance(given, dict) else given
    return next((spec for spec in specs if index in spec["layers"]), None)


def attention(spec: dict[str, Any], w: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Causal softmax attention with rotated queries and keys."""
    length, d = x.shape[1:]
    heads, theta = spec["num_heads"], spec.get("rope_theta", 10000.0)
    width, groups = d // heads, spec.get("num_kv_heads") or heads
    q, k, v = (
        x @ w(f"{name}_proj.weight", count * width, d).T
        + (w(f"{name}_proj.bias", count * width) if spec.get("qkv_bias") else 0)
        for name, count in (("q", heads), ("k", groups), ("v", groups))
    )
    q, k, v = (y.unflatten(-1, (-1, width)) for y in (q, k, v))
    k, v = (y.repeat_interleave(heads // groups, 2) for y in (k, v))
    angles = torch.arange(length)[:, None, None] * theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    q, k = (y * cos + torch.cat([-y[..., width // 2 :], y[..., : width // 2]], -1) * sin for y in (q, k))
    scores = torch.einsum("bihp,bjhp->bhij", q, k) * width**-0.5
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (distance < (spec.get("window_size") or length))
    read = torch.einsum("bhij,bjhp->bihp", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
    return read.flatten(-2) @ w("o_proj.weight", d, d).T


def rms(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def before(x: Tensor) -> Tensor:
    """What the token before was, less the token itself."""
    return F.pad(x, (0, 0, 1, -1)) - x


def convolved(x: Tensor, taps: Tensor) -> Tensor:
    """A causal convolution of every channel of x ``[B, T, n]`` with its taps ``[n, 1, width]``."""
    return F.conv1d(F.pad(x.mT, (taps.shape[-1] - 1, 0)), taps, groups=len(taps)).mT


def short(config: Config, w: Callable[..., Tensor], name: str, x: Tensor, default: bool = True) -> Tensor:
    """A projection after its short convolution, where there is one, and SiLU."""
    if config.get("use_short_conv", default):
        x = convolved(x, w(f"{name}_conv1d.weight", x.shape[-1], 1, config.get("conv_size", 4)))
    return F.silu(x)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Steps of the gated delta rule.

    q, k ``[B, T, n, H, K]`` (of n steps of a token the last is read), v ``[B, T, n, H, V]``,
    decay ``[B, T, n, H, K or 1]``, beta ``[B, T, n, H]``.
    """
    state, outputs = v.new_zeros(v.shape[0], v.shape[3], k.shape[-1], v.shape[-1]), []
    for t in range(k.shape[1]):
        for n in range(k.shape[2]):
            state = decay[:, t, n, :, :, None] * state
            change = v[:, t, n] - torch.einsum("bhk,bhkv->bhv", k[:, t, n], state)
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t, n] * beta[:, t, n, :, None], change)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * k.shape[-1] ** -0.5)
    return torch.stack(outputs, 1)
