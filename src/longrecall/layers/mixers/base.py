"""What every token mixer promises: a checked config and `mixer(x, state) -> (y, new_state)`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from longrecall.errors import UserError, did_you_mean
from longrecall.layers.stepping.step import NO_ROOM, PlainStep, Step, StepSettings, part_under

LayerState = dict[str, Tensor]
StateShapes = dict[str, tuple[int, ...]]

AUXILIARY_LOSS = "auxiliary_loss"
"""Key under which a mixer may put a scalar loss of its own beside its new state; the model takes it out again."""


@dataclass(frozen=True)
class MixerConfig:
    """Sizes of one token mixer. Subclasses add fields; every number is a count of channels, heads or taps."""

    type: ClassVar[str] = ""
    nested: ClassVar[tuple[str, ...]] = ()
    """Fields that are mixers themselves."""

    @property
    def reads_tokens(self) -> bool:
        """Whether the mixer (or one inside it) looks up tokens read before: it is called with ``context=`` too."""
        inner = (getattr(self, name) for name in self.nested)
        return any(config.reads_tokens for config in inner if config is not None)

    @classmethod
    def from_dict(cls, description: dict[str, Any]) -> Self:
        """Build from plain data; raises UserError on an unknown key, a missing key or a value that cannot be."""
        given = {key: value for key, value in description.items() if key != "type"}
        known = {field.name for field in fields(cls)}
        for key in given:
            if key not in known:
                raise UserError(f'mixer "{cls.type}" has no field "{key}".{did_you_mean(key, known)}')
        try:
            return cls(**given)
        except TypeError as error:
            raise UserError(f'mixer "{cls.type}" is incomplete: {error}. Fields: {", ".join(sorted(known))}') from None

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back, with every default written out."""
        return {"type": self.type, **{field.name: getattr(self, field.name) for field in fields(self)}}

    def state_shapes(self) -> StateShapes:
        """Shape of every state tensor of one sequence, without the batch dimension."""
        raise TypeError(f"{type(self).__name__} does not describe a state")

    def build(self, hidden_size: int) -> nn.Module:
        """The module, freshly initialised; call under `torch.device("meta")` for its shapes alone."""
        raise TypeError(f"{type(self).__name__} does not build a mixer")

    def decoding_step(self, mixer: nn.Module, settings: StepSettings) -> Step:
        """The step that decodes one token with `mixer`, built from this description; its forward pass by default."""
        return PlainStep(self, mixer, settings)

    @property
    def grows(self) -> bool:
        """Whether the state has no fixed shape: one of its tensors is empty before the first token."""
        return self.reads_tokens or any(0 in shape for shape in self.state_shapes().values())

    def why_no_room(self) -> str | None:
        """Why a step's buffers cannot hold a state that grows, in words; None = they can, or it does not grow."""
        return f"{self.type} {NO_ROOM}" if self.grows else None

    def why_not_in_segments(self, length: int) -> str | None:
        """Why a prompt is not read in segments of `length` tokens with buffers of fixed shapes; None = it is."""
        return f"{self.type} {NO_ROOM}" if self.grows else None

    def state_size(self) -> int:
        """Numbers in the recurrent state of one sequence: the papers' state size, without convolutions and caches."""
        return sum(math.prod(shape) for name, shape in self.state_shapes().items() if name.endswith("recurrent"))

    def caches(self) -> list[tuple[int, int | None]]:
        """Caches that grow with the context: numbers kept of a token, and of how many tokens at most (None = of all).

        They are the state's tensors of no columns before the first token, those of nested mixers included.
        """
        inner = [getattr(self, name) for name in self.nested]
        if inner:
            return [cache for config in inner if config is not None for cache in config.caches()]
        shapes = [shape for shape in self.state_shapes().values() if len(shape) > 1 and shape[0] == 0]
        numbers = sum(math.prod(shape[1:]) for shape in shapes)
        return [(numbers, getattr(self, "window", None))] if numbers else []

    def tensor_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Name under `mixer.` -> shape of every tensor in a checkpoint."""
        with torch.device("meta"):
            module = self.build(hidden_size)
        return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}

    def zero_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> LayerState:
        """The state before the first token: recurrent states in float32, the others in the model's dtype."""
        wide = dtype if dtype == torch.float64 else torch.float32
        return {
            name: torch.zeros(
                (batch, *shape),
                device=device,
                dtype=torch.long if name.endswith("position") else wide if name.endswith("recurrent") else dtype,
            )
            for name, shape in self.state_shapes().items()
        }

    def _require_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f'mixer "{self.type}": {name} must be a positive whole number, got {value!r}')

    def _require_multiple(self, large: str, small: str) -> None:
        if getattr(self, large) % getattr(self, small):
            raise UserError(
                f'mixer "{self.type}": {small} ({getattr(self, small)}) must divide {large} ({getattr(self, large)})'
            )


def without_auxiliary_losses(state: LayerState) -> tuple[LayerState, list[Tensor]]:
    """What a mixer returned -> its new state alone, and the losses that it or mixers inside it put there."""
    losses = [tensor for name, tensor in state.items() if _is_loss(name)]
    return ({name: t for name, t in state.items() if not _is_loss(name)} if losses else state), losses


def _is_loss(name: str) -> bool:
    # Nested mixers put a path before their names.
    return name.rpartition(".")[2] == AUXILIARY_LOSS


def state_under(state: LayerState | None, path: str) -> LayerState | None:
    """The part of a nested layer's state whose names begin with ``path.``, without that; None without a state."""
    return None if state is None else part_under(state, path)
