"""Attention and a recurrent mixer side by side, added up (Falcon-H1, Zuo et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from longrecall.layers.access import visitable
from longrecall.layers.descriptions.parallel import ParallelConfig
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.nested import read_nested
from longrecall.layers.norm import Norm
from longrecall.layers.stepping.step import Buffers, NestedSteps, Step, StepSettings, part_under, step_of
from longrecall.layers.stepping.stream import InnerStream, Stream
from longrecall.layers.tokens import TokenContext


class Parallel(nn.Module):
    r"""y = sum_i output_i * branch_i(input_i * x), with constant factors: no norm and no projection after the sum.

    Source: "Falcon-H1: A Family of Hybrid-Head Language Models Redefining Efficiency and Performance", section 2.
    """

    def __init__(self, config: ParallelConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        for path, branch in config.branches().items():
            self.add_module(path, branch.build(hidden_size))

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
        """x ``[B, T, d]`` -> y ``[B, T, d]`` and the states of the branches, prefixed ``attention.`` and ``ssm.``."""
        total: Tensor | None = None
        new_state: LayerState = {}
        for path in self.config.branches():
            before, behind = self.config.factors(path)
            (y,), after = read_nested(
                self,
                (path,),
                _scaled(x, before),
                state,
                mask=mask,
                position=position,
                context=context,
                carried=carried,
            )
            y = _scaled(y, behind)
            total = y if total is None else total + y
            new_state |= after
        assert total is not None
        return total, new_state

    def decoding_step(self, config: ParallelConfig, settings: StepSettings) -> Step:
        """The step that decodes one token with this layer, described by `config`."""
        parts = config.branches().items()
        return ParallelStep(config, {path: step_of(part, self.get_submodule(path), settings) for path, part in parts})


class ParallelStep(NestedSteps):
    """The steps of the branches on the same stream; their last products are added to it where they are formed."""

    def __init__(self, config: ParallelConfig, inner: Mapping[str, Step]) -> None:
        super().__init__(inner)
        self.config = config

    def __call__(self, stream: Stream, norm: Norm | None, buffers: Buffers, position: Tensor) -> None:
        branches = {path: ScaledStream(stream, self.config.factors(path)[0]) for path in self.inner}
        for path, step in self.inner.items():
            step(branches[path], norm, part_under(buffers, path), position)
        # Only now: every branch reads the stream as it was.
        for path, branch in branches.items():
            factor = self.config.factors(path)[1]
            if branch.found is None and branch.put_off is not None:
                y, weight = branch.put_off
                stream.add_product(_scaled(y, factor), weight)
            else:
                stream.add(_scaled(branch.result(), factor))


class ScaledStream(InnerStream):
    """The stream that a branch sees: the normed stream times a factor; what the branch adds is kept."""

    def __init__(self, stream: Stream, factor: float) -> None:
        super().__init__(stream, [])
        self.factor = factor

    def normed(self, norm: Norm | None) -> Tensor:
        return _scaled(self.stream.normed(norm), self.factor)

    def project(self, norm: Norm | None, weights: list[Tensor]) -> list[Tensor]:
        return [_scaled(y, self.factor) for y in self.stream.project(norm, weights)]


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor
