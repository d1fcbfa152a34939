"""Attention and an MLP in front of a mixer, with weights that several layers share (Zamba2, Glorioso et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longrecall.layers.access import inside, visitable
from longrecall.layers.descriptions.attention import AttentionConfig
from longrecall.layers.descriptions.shared_block import SharedBlockConfig
from longrecall.layers.mixers.attention import Attention, AttentionStep, Projected
from longrecall.layers.mixers.base import LayerState, state_under
from longrecall.layers.mlp import ACTIVATIONS
from longrecall.layers.nested import read_nested
from longrecall.layers.norm import Norm, RMSNorm
from longrecall.layers.passed import EMBEDDED
from longrecall.layers.stepping.step import Buffers, NestedSteps, Step, StepSettings, part_under, step_of
from longrecall.layers.stepping.stream import InnerStream, Stream
from longrecall.layers.tokens import TokenContext


class SharedWeights(nn.Module):
    """What several layers share: norm, attention, norm, MLP; without residuals between them."""

    def __init__(self, config: SharedBlockConfig, hidden_size: int) -> None:
        super().__init__()
        assert isinstance(config.attention, AttentionConfig)
        self.norm = RMSNorm(2 * hidden_size, config.norm_eps)
        self.attention = Attention(config.attention, hidden_size)
        self.mlp_norm = RMSNorm(hidden_size, config.norm_eps)
        self.gate_up_proj = nn.Linear(hidden_size, 2 * config.mlp_size, bias=config.bias)
        self.down_proj = nn.Linear(config.mlp_size, hidden_size, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(
        self,
        both: Tensor,
        state: LayerState | None,
        *,
        mask: Tensor | None,
        position: Tensor,
        added: Callable[[Tensor], Projected | None],
        adapter: nn.Module | None,
    ) -> tuple[Tensor, LayerState]:
        """The stream beside the embeddings ``[B, T, 2d]`` -> ``[B, T, d]`` and attention's state.

        `added` and `adapter` are the adapters of the layer that uses the weights: as for `Attention.project`, `mlp`.
        """
        x = self.norm(both)
        found, cache = self.attention(x, state, mask=mask, position=position, added=added(x))
        return self.mlp(found, adapter), cache

    def mlp(self, x: Tensor, adapter: nn.Module | None) -> Tensor:
        """What attention gave ``[..., d]`` -> ``[..., d]``; the adapter adds to the gate and what it multiplies."""
        x = self.mlp_norm(x)
        gate_up = self.gate_up_proj(x)
        gate, up = (gate_up if adapter is None else gate_up + adapter(x)).chunk(2, dim=-1)
        y: Tensor = self.down_proj(self.activation(gate) * up)
        return y


class SharedBlock(nn.Module):
    r"""y = mixer(norm(x + W_o block([x, e]))), with e the embeddings before the first layer.

    The block is shared by several layers, each with low-rank adapters of its own. Its weights are in the first layer
    that uses them; the others are lent them (`borrow`), so that no parameter is there twice.

    Source: "Zamba: A Compact 7B SSM Hybrid Model", section 2, and "The Zamba2 Suite: Technical Report", section 2.
    """

    def __init__(self, config: SharedBlockConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.lent: tuple[SharedWeights, ...] = ()
        self.owners: tuple[nn.Module, ...] = ()
        self.q_adapter: nn.Module | None
        self.k_adapter: nn.Module | None
        self.v_adapter: nn.Module | None
        self.mlp_adapter: nn.Module | None
        if config.weights_of is None:
            self.shared = SharedWeights(config, hidden_size)
        rank, adapters = config.adapter_rank, config.adapters(hidden_size)
        for name in ("q_adapter", "k_adapter", "v_adapter", "mlp_adapter"):
            pair = None
            if name in adapters:
                width, out = adapters[name]
                pair = nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, out, bias=False))
            self.register_module(name, pair)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.norm = RMSNorm(hidden_size, config.norm_eps)
        self.mixer = config.mixer.build(hidden_size)

    def borrow(self, lender: SharedBlock, owners: Sequence[nn.Module] = ()) -> None:
        """Use the shared weights of another layer, whatever becomes of them.

        `owners`: that layer and the modules in it that lead to the lender, which are entered to use its weights.
        """
        # In a tuple they are no part of this module: they move, train and are stored with the lender.
        self.lent, self.owners = (lender.shared,), tuple(owners)

    @property
    def weights(self) -> SharedWeights:
        """The shared weights, this layer's or those it was lent."""
        return self.lent[0] if self.lent else self.shared

    @visitable
    def forward(
        self,
        x: Tensor,
        state: LayerState | None,
        *,
        mask: Tensor | None,
        position: Tensor,
        context: TokenContext | None = None,
        **carried: Tensor | None,
    ) -> tuple[Tensor, LayerState]:
        """The stream x ``[B, T, d]``, without a norm -> y ``[B, T, d]`` and the states of attention and mixer."""
        weights, before = self.weights, state_under(state, "attention")

        def use(both: Tensor) -> tuple[Tensor, LayerState]:
            how: dict[str, Any] = {"mask": mask, "position": position, "added": self.added, "adapter": self.mlp_adapter}
            found: tuple[Tensor, LayerState] = weights(both, before, **how)
            return found

        found, cache = inside(self.owners, use, beside_embeddings(x, carried.get(EMBEDDED)))
        (y,), after = read_nested(
            self,
            ("mixer",),
            self.norm(x + self.out_proj(found)),
            state,
            mask=mask,
            position=position,
            context=context,
            carried=carried,
        )
        return y, {f"attention.{name}": tensor for name, tensor in cache.items()} | after

    def added(self, x: Tensor) -> Projected | None:
        """What the adapters add to queries, keys and values of x ``[..., 2d]``; None without them."""
        if self.q_adapter is None or self.k_adapter is None or self.v_adapter is None:
            return None
        return Projected(self.q_adapter(x), self.k_adapter(x), self.v_adapter(x))

    def decoding_step(self, config: SharedBlockConfig, settings: StepSettings) -> Step:
        """The step that decodes one token with this layer, described by `config`."""
        return SharedBlockStep(config, self, settings)


def beside_embeddings(x: Tensor, embedded: Tensor | None) -> Tensor:
    """x and the embeddings, both ``[..., d]`` -> what attention reads ``[..., 2d]``, before its norm."""
    assert embedded is not None, "the embeddings are there in every pass"
    return torch.cat([x, embedded.to(x.dtype)], dim=-1)


class SharedBlockStep(NestedSteps):
    """The steps of attention and mixer, each on a stream of its own."""

    def __init__(self, config: SharedBlockConfig, mixer: SharedBlock, settings: StepSettings) -> None:
        attention = step_of(config.attention, mixer.weights.attention, settings)
        assert isinstance(attention, AttentionStep)
        super().__init__({"attention": attention, "mixer": step_of(config.mixer, mixer.mixer, settings)})
        self.mixer, self.attention = mixer, attention

    def __call__(self, stream: Stream, norm: Norm | None, buffers: Buffers, position: Tensor) -> None:
        mixer, x = self.mixer, stream.normed(norm)
        weights = mixer.weights
        both = weights.norm(beside_embeddings(x, stream.carried[EMBEDDED][:, 0]))
        found = weights.mlp(self._attended(both, part_under(buffers, "attention"), position), mixer.mlp_adapter)
        over = self._over(x + mixer.out_proj(found), stream)
        self.inner["mixer"](over, mixer.norm, part_under(buffers, "mixer"), position)
        stream.add(over.result())

    def _attended(self, x: Tensor, buffers: Buffers, position: Tensor) -> Tensor:
        """x ``[B, 2d]`` -> what attention gives ``[B, d]``; kernels do not know of adapters."""
        added = self.mixer.added(x)
        if added is not None:
            one = Projected(*(each[:, None] for each in added))
            return self.attention.plain(x[:, None], buffers, position, one)[:, 0]
        stream = InnerStream(Stream(x, x.dtype), [])
        self.attention(stream, None, buffers, position)
        return stream.result()

    @staticmethod
    def _over(x: Tensor, outer: Stream) -> InnerStream:
        """A stream that reads x ``[B, d]`` and keeps what is added."""
        stream = Stream(x, outer.dtype)
        stream.carried = outer.carried
        return InnerStream(stream, [])
