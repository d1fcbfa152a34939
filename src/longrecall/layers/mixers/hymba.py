"""Hymba (Dong et al. 2025): attention heads and state-space heads side by side on the same input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import Tensor, nn

from longrecall.layers.access import visitable
from longrecall.layers.descriptions.hymba import HymbaConfig
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.nested import read_nested
from longrecall.layers.norm import Norm, RMSNorm
from longrecall.layers.stepping.step import Buffers, NestedSteps, Step, StepSettings, part_under, step_of
from longrecall.layers.stepping.stream import InnerStream, Stream
from longrecall.layers.tokens import TokenContext


class Hymba(nn.Module):
    r"""y = W_o mean_i(beta_i * norm(branch_i(x))), beta_i a learned weight of every channel.

    The norms make branches of unlike magnitude comparable. They are over what the branches return: of the published
    models' branches, which have no output projection of their own, that is as wide as they are inside.

    Source: "Hymba: A Hybrid-head Architecture for Small Language Models", section
    2.1.
    """

    def __init__(self, config: HymbaConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.paths = tuple(config.branches())
        width = config.width(hidden_size)
        for path, branch in config.branches().items():
            self.add_module(path, branch.build(hidden_size))
            self.add_module(f"{path}_norm", RMSNorm(width, config.norm_eps))
        self.out_proj = nn.Linear(width, hidden_size, bias=False)

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
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the states of the branches, prefixed ``attention.``, ``ssm.``..."""
        branches, after = read_nested(
            self, self.paths, x, state, mask=mask, position=position, context=context, carried=carried
        )
        normed = [getattr(self, f"{path}_norm")(y) for path, y in zip(self.paths, branches, strict=True)]
        total = normed[0]
        for y in normed[1:]:
            total = total + y
        projected: Tensor = self.out_proj((total / len(normed)).to(x.dtype))
        return projected, after

    def decoding_step(self, config: HymbaConfig, settings: StepSettings) -> Step:
        """The step that decodes one token with this layer, described by `config`."""
        parts = config.branches().items()
        inner = {path: step_of(part, self.get_submodule(path), settings) for path, part in parts}
        return HymbaStep(self, inner)


class HymbaStep(NestedSteps):
    """The steps of the branches on the same stream, and the mean of their norms."""

    def __init__(self, mixer: nn.Module, inner: Mapping[str, Step]) -> None:
        super().__init__(inner)
        self.mixer = cast(Hymba, mixer)

    def __call__(self, stream: Stream, norm: Norm | None, buffers: Buffers, position: Tensor) -> None:
        total: Tensor | None = None
        for path, step in self.inner.items():
            branch = InnerStream(stream, [])
            step(branch, norm, part_under(buffers, path), position)
            y: Tensor = self.mixer.get_submodule(f"{path}_norm")(branch.result())
            total = y if total is None else total + y
        assert total is not None
        stream.add_product((total / len(self.inner)).to(stream.dtype), self.mixer.out_proj.weight)
