"""A decoding step of one layer: the steps of its blocks, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from longrecall.layers.descriptions.block import BlockConfig
from longrecall.layers.mlp import SwiGLU
from longrecall.layers.norm import Norm, RMSNorm
from longrecall.layers.stepping.step import Buffers, Progress, Step, StepSettings, part_under, step_of
from longrecall.layers.stepping.stream import InnerStream, Stream
from longrecall.models.recurrent_layer import RecurrentLayer
from longrecall.ops.backends import Choice


class BlockStep:
    """The step of one block on the residual stream."""

    def __init__(self, block: BlockConfig, layer: RecurrentLayer, path: str, settings: StepSettings) -> None:
        self.path, self.multiplier = path, block.multiplier
        self.norm: Norm | None = layer.norm_of(block)
        self.post_norm: Norm | None = layer.post_norm_of(block)
        self.module: nn.Module = layer.module_of(block)
        self.step: Step | None = None
        if not block.module.positionwise:
            self.step = step_of(block.module, self.module, settings)

    def __call__(self, stream: Stream, buffers: Buffers, position: Tensor) -> None:
        if self.post_norm is None and self.multiplier == 1.0:
            self._run(stream, buffers, position)
            return
        inner = InnerStream(stream, [])
        self._run(inner, buffers, position)
        y = inner.result()
        y = y if self.post_norm is None else self.post_norm(y)
        stream.add(y if self.multiplier == 1.0 else y * self.multiplier)

    def _run(self, stream: Stream, buffers: Buffers, position: Tensor) -> None:
        if self.step is not None:
            self.step(stream, self.norm, buffers, position)
        elif isinstance(self.module, SwiGLU) and isinstance(self.norm, RMSNorm):
            stream.add_mlp(self.norm, self.module)
        else:
            found = self.module(stream.normed(self.norm))
            stream.add(found[0] if isinstance(found, tuple) else found)


class LayerStep:
    """The steps of a layer's blocks. Buffers have the names of the layer's state."""

    def __init__(self, layer: RecurrentLayer, settings: StepSettings) -> None:
        paths = ["", *(f"{block.name}." for block in layer.blocks[1:])]
        self.blocks = [BlockStep(block, layer, path, settings) for block, path in zip(layer.blocks, paths, strict=True)]
        # Where one block alone has a state, the first, its buffers are the layer's.
        self.stateful = [(block, block.step) for block in self.blocks if block.step is not None]

    def _part(self, tensors: dict[str, Tensor] | Buffers, block: BlockStep) -> dict[str, Tensor]:
        if block.path:
            return part_under(tensors, block.path.removesuffix("."))
        others = tuple(other.path for other, _ in self.stateful if other.path)
        return {name: x for name, x in tensors.items() if not name.startswith(others)} if others else dict(tensors)

    def allocate(self) -> dict[str, Tensor]:
        """New buffers, in the state before the first token; `clear` before they are used."""
        return {f"{b.path}{name}": x for b, step in self.stateful for name, x in step.allocate().items()}

    def clear(self, buffers: Buffers) -> None:
        """Go back to the state before the first token."""
        for block, step in self.stateful:
            step.clear(self._part(buffers, block))

    def load(self, buffers: Buffers, state: dict[str, Tensor], position: Tensor) -> int:
        """Copy a layer's state after `position` ``[B]`` tokens into the buffers; return how much room it takes."""
        rooms = [
            step.load(self._part(buffers, block), self._part(state, block), position) for block, step in self.stateful
        ]
        return max(rooms, default=0)

    def export(self, buffers: Buffers, progress: Progress) -> dict[str, Tensor]:
        """The layer's state now; it may share the memory of the buffers."""
        parts = [(block.path, step.export(self._part(buffers, block), progress)) for block, step in self.stateful]
        return {f"{path}{name}": x for path, part in parts for name, x in part.items()}

    def join(self, buffers: Buffers, rows: Tensor, state: dict[str, Tensor], position: Tensor) -> None:
        """Copy the state of some sequences into `rows` of the buffers; see `Step.join`."""
        for block, step in self.stateful:
            step.join(self._part(buffers, block), rows, self._part(state, block), position)

    def rows_of(self, buffers: Buffers, rows: Tensor, position: Tensor) -> dict[str, Tensor]:
        """The layer's state in some rows, as copies."""
        parts = [
            (block.path, step.rows_of(self._part(buffers, block), rows, position)) for block, step in self.stateful
        ]
        return {f"{path}{name}": x for path, part in parts for name, x in part.items()}

    def rebase(self, by: Tensor) -> None:
        """Row 0 has another position than before, so much greater ``[1]``; the others go on as they were."""
        for _, step in self.stateful:
            step.rebase(by)

    def tables(self) -> Sequence[Any]:
        """Steps that look up keys and values of token ids: see `form_tables`."""
        return [table for _, step in self.stateful for table in step.tables()]

    def choices(self, buffers: Buffers) -> Sequence[Choice]:
        """Who computes the ops of this step on such buffers, which may be without memory."""
        return [choice for block, step in self.stateful for choice in step.choices(self._part(buffers, block))]

    def __call__(self, stream: Stream, buffers: Buffers, position: Tensor) -> None:
        """Read one token of every row; `position` ``[B]``: tokens read before."""
        for block in self.blocks:
            block(stream, self._part(buffers, block) if block.step is not None else {}, position)
