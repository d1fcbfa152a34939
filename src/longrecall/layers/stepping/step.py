"""What a mixer's decoding step offers: one token for every row of a batch, on buffers that its caller owns.

A mixer's layer makes its step (`decoding_step`), in the file of the mixer. A mixer without a faster one gets
`PlainStep`, which runs its forward pass on one token. The buffers of a step are the mixer's state, in the
dtype and the order of memory that decoding wants, with room for the tokens to come where a state grows. They are the
one place where a state is written in place: states are copied in by `load` and out by `export`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from longrecall.layers.descriptions.base import MixerConfig
from longrecall.layers.norm import Norm
from longrecall.layers.passed import wanted, without_carried
from longrecall.layers.stepping.stream import Stream
from longrecall.ops.backends import Choice
from longrecall.ops.decoding.op import RECURRENT_STEP

Buffers = Mapping[str, Tensor]
"""Tensors of one layer's step by their names in its state. Convolution states are seen as ``[B, C, W - 1]`` there and
stored as ``[B, W - 1, C]``: a step reads every tap of all channels."""


@dataclass(frozen=True)
class StepSettings:
    """What a step is made for.

    Attributes:
        batch: B, rows.
        room: tokens of context that buffers of growing states have room for, those yet to come included.
        fused: whether layers run in Triton kernels where they have some.
        dtype: of the weights.
        state_dtype: of the recurrent states in the buffers.
        embeddings: the model's table of token embeddings.
        tokens: int32 ``[B, room]``: the ids of the context, -1 where there is none; None for models that look up none.
    """

    batch: int
    room: int
    fused: bool
    dtype: torch.dtype
    state_dtype: torch.dtype
    embeddings: nn.Embedding
    tokens: Tensor | None = None

    @property
    def kernels(self) -> bool:
        """Whether a mixer may take its kernels: they have no float64."""
        return self.fused and self.dtype != torch.float64

    def serves_state(self, keys: int) -> bool:
        """Whether a mixer may take the kernels for recurrent states of so many keys."""
        if not self.kernels:
            return False
        state = self.embeddings.weight.new_empty((1, 1, keys, 1), dtype=self.state_dtype)
        return RECURRENT_STEP.why_no_kernels({"state": state}) is None


@dataclass(frozen=True)
class Progress:
    """How far a step is: tokens `read` since a state was loaded, `context` of them in all, `position` ``[B]``."""

    read: int
    context: int
    position: Tensor


class StatefulMixer(Protocol):
    """What a step needs of a mixer's description: the state before the first token."""

    def zero_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The state of `batch` rows before their first token."""


class Step(Protocol):
    """One token of every row through one mixer."""

    def allocate(self) -> dict[str, Tensor]:
        """New buffers, in the state before the first token; `clear` before they are used."""

    def __call__(self, stream: Stream, norm: Norm | None, buffers: Buffers, position: Tensor) -> None:
        """Add the mixer's output to the stream; `norm`: the layer's; `position` ``[B]``: tokens read before."""

    def clear(self, buffers: Buffers) -> None:
        """Go back to the state before the first token."""

    def load(self, buffers: Buffers, state: dict[str, Tensor], position: Tensor) -> int:
        """Copy a layer's state after `position` ``[B]`` tokens into the buffers; return how much room it takes."""

    def export(self, buffers: Buffers, progress: Progress) -> dict[str, Tensor]:
        """The layer's state now, recurrent states in float32; it may share the memory of the buffers."""

    def join(self, buffers: Buffers, rows: Tensor, state: dict[str, Tensor], position: Tensor) -> None:
        """Copy the state of n sequences into `rows` ``[n]`` (int64) of the buffers; the other rows stay as they are.

        `position` ``[B]`` is that of all rows before the new ones get theirs; `rebase` follows.
        """

    def rows_of(self, buffers: Buffers, rows: Tensor, position: Tensor) -> dict[str, Tensor]:
        """A copy of the state of some rows ``[n]``, recurrent states in float32; `position` ``[B]`` of all."""

    def rebase(self, by: Tensor) -> None:
        """Row 0 has another position, greater by ``[1]``, as its slot holds another sequence."""

    def tables(self) -> Sequence[Any]:
        """Steps, this one or those inside it, that look up keys and values of token ids: see `form_tables`."""

    def choices(self, buffers: Buffers) -> Sequence[Choice]:
        """Who computes the ops of this step on such buffers, which may be without memory."""


class MixerStep:
    """Base of the steps of a mixer: how buffers are made, filled and read, as it stands for states of a fixed shape."""

    def __init__(self, config: StatefulMixer, mixer: nn.Module, settings: StepSettings) -> None:
        self.config, self.mixer, self.settings = config, mixer, settings

    def allocate(self) -> dict[str, Tensor]:
        settings = self.settings
        state = self.config.zero_state(settings.batch, settings.embeddings.weight.device, settings.dtype)
        return {name: self._laid_out(name, tensor) for name, tensor in state.items()}

    def _laid_out(self, name: str, tensor: Tensor) -> Tensor:
        if name.endswith("recurrent"):
            return torch.zeros_like(tensor, dtype=self.settings.state_dtype)
        if name.endswith("conv"):
            # Neighbouring channels side by side: a step reads every tap of all channels.
            return torch.zeros_like(tensor.transpose(1, 2).contiguous()).transpose(1, 2)
        return tensor.contiguous()

    def clear(self, buffers: Buffers) -> None:
        for tensor in buffers.values():
            tensor.zero_()

    def load(self, buffers: Buffers, state: dict[str, Tensor], position: Tensor) -> int:
        for name, tensor in state.items():
            buffers[name].copy_(tensor)
        return 0

    def export(self, buffers: Buffers, progress: Progress) -> dict[str, Tensor]:
        return {
            name: tensor.float() if name.endswith("recurrent") else tensor.contiguous()
            for name, tensor in buffers.items()
        }

    def join(self, buffers: Buffers, rows: Tensor, state: dict[str, Tensor], position: Tensor) -> None:
        for name, tensor in state.items():
            buffers[name].index_copy_(0, rows, tensor.to(buffers[name].dtype))

    def rows_of(self, buffers: Buffers, rows: Tensor, position: Tensor) -> dict[str, Tensor]:
        found = {name: tensor.index_select(0, rows) for name, tensor in buffers.items()}
        return {name: tensor.float() if name.endswith("recurrent") else tensor for name, tensor in found.items()}

    def rebase(self, by: Tensor) -> None:
        """A state of fixed shape does not know where it stands."""

    def tables(self) -> Sequence[Any]:
        return ()

    def choices(self, buffers: Buffers) -> Sequence[Choice]:
        return ()


class PlainStep(MixerStep):
    """The mixer's own forward pass on one token; its new state is copied over the old one."""

    def __init__(self, config: MixerConfig, mixer: nn.Module, settings: StepSettings) -> None:
        super().__init__(config, mixer, settings)
        self.takes = sorted(wanted(config))

    def __call__(self, stream: Stream, norm: Norm | None, buffers: Buffers, position: Tensor) -> None:
        taken = {name: stream.carried.get(name) for name in self.takes}
        y, after = self.mixer(stream.normed(norm)[:, None], dict(buffers), mask=None, position=position, **taken)
        after, passed = without_carried(after)
        stream.carried.update(passed)
        for name, tensor in after.items():
            buffers[name].copy_(tensor)
        stream.add(y[:, 0])


def step_of(config: MixerConfig, mixer: nn.Module, settings: StepSettings) -> Step:
    """The step that decodes one token with `mixer`, which was built from the description `config`.

    It is the description's `step_class`, or the layer's own, where its class has a method
    ``decoding_step(description, settings)``, else its forward pass.
    """
    if config.step_class:
        named: Step = pkgutil.resolve_name(config.step_class)(config, mixer, settings)
        return named
    own = getattr(mixer, "decoding_step", None)
    step: Step = PlainStep(config, mixer, settings) if own is None else own(config, settings)
    return step


class NestedSteps:
    """The steps of mixers inside a mixer, by the path that stands before the names of their buffers."""

    def __init__(self, inner: Mapping[str, Step]) -> None:
        self.inner = inner

    def allocate(self) -> dict[str, Tensor]:
        return {f"{path}.{name}": x for path, step in self.inner.items() for name, x in step.allocate().items()}

    def clear(self, buffers: Buffers) -> None:
        for path, step in self.inner.items():
            step.clear(part_under(buffers, path))

    def load(self, buffers: Buffers, state: dict[str, Tensor], position: Tensor) -> int:
        parts = self.inner.items()
        rooms = (step.load(part_under(buffers, path), part_under(state, path), position) for path, step in parts)
        return max(rooms, default=0)

    def export(self, buffers: Buffers, progress: Progress) -> dict[str, Tensor]:
        parts = {path: step.export(part_under(buffers, path), progress) for path, step in self.inner.items()}
        return {f"{path}.{name}": x for path, part in parts.items() for name, x in part.items()}

    def join(self, buffers: Buffers, rows: Tensor, state: dict[str, Tensor], position: Tensor) -> None:
        for path, step in self.inner.items():
            step.join(part_under(buffers, path), rows, part_under(state, path), position)

    def rows_of(self, buffers: Buffers, rows: Tensor, position: Tensor) -> dict[str, Tensor]:
        parts = {path: step.rows_of(part_under(buffers, path), rows, position) for path, step in self.inner.items()}
        return {f"{path}.{name}": x for path, part in parts.items() for name, x in part.items()}

    def rebase(self, by: Tensor) -> None:
        for step in self.inner.values():
            step.rebase(by)

    def tables(self) -> Sequence[Any]:
        return [table for step in self.inner.values() for table in step.tables()]

    def choices(self, buffers: Buffers) -> Sequence[Choice]:
        found = (step.choices(part_under(buffers, path)) for path, step in self.inner.items())
        return [choice for choices in found for choice in choices]


def part_under(tensors: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
    """Those whose names begin with ``path.``, without that."""
    prefix = f"{path}."
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
