"""What the interventions share: their Protocol, which rows and tensors take part, how a state is put together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from longrecall.layers.mixers.base import LayerState
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.training.recipe_states import AnyIntervention
from longrecall.training.sources import random_generator

ROW_STREAM = 4
NOISE_STREAM = 5
"""Last part of the keys of random generators (`training.sources` and `training.data` have 1 to 3)."""


class InitialState(Protocol):
    """What the trainer asks before and after every forward pass (with gradient accumulation: every micro-batch)."""

    by_row: ClassVar[bool]
    """A state belongs to a row of the batch and comes back to it; else to a sequence, however they lie in the batch.
    Where documents are kept apart, the former see one state a row, the latter one state a document."""
    continues: ClassVar[bool]
    """A row goes on in the text it was reading: where a document starts, the state is zero."""

    def before_batch(self, text: Tensor) -> RecurrentState | None:
        """Return the state the next batch starts from (None = zeros); `text` bool ``[B]``: the rows of running text."""

    def after_batch(self, final: RecurrentState) -> None:
        """See the state that the batch ended in (with its history of gradients)."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that `load_state_dict` needs to continue exactly; no two entries share memory."""

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Continue from `state_dict`."""


def is_recurrent(name: str) -> bool:
    """Whether a state tensor is a recurrent state; names may carry a path (``old.recurrent``)."""
    return name.rpartition(".")[2] == "recurrent"


def takes_part(name: str, convolution: bool) -> bool:
    """Whether an intervention touches this state tensor; convolution states end in conv (``q_conv``) or shift."""
    return is_recurrent(name) or (convolution and name.rpartition(".")[2].endswith(("conv", "shift")))


def each_tensor(layers: tuple[LayerState, ...], convolution: bool) -> Iterator[tuple[int, str, Tensor]]:
    """Layer, name and tensor of everything that takes part, in a fixed order."""
    for index, layer in enumerate(layers):
        for name, tensor in layer.items():
            if takes_part(name, convolution):
                yield index, name, tensor


class RowChoice:
    """Draws which rows of a batch get a state: seeded, new in every batch, one stream a process.

    Args:
        recipe: gives `probability` and, where it has it, `text_only`.
        seed, rank: of the run and of this process.
    """

    def __init__(self, recipe: AnyIntervention, seed: int, rank: int) -> None:
        self._probability, self._text_only = recipe.probability, bool(getattr(recipe, "text_only", False))
        self._seed, self._rank = seed, rank
        self.batches = 0
        """Batches begun."""

    def draw(self, text: Tensor) -> Tensor:
        """Return bool ``[B]`` on the CPU for the next batch, whose rows of running text are `text` (bool ``[B]``)."""
        draws = random_generator(self._seed, self._rank, self.batches, ROW_STREAM).random(len(text))
        self.batches += 1
        chosen = torch.from_numpy(draws < self._probability)
        return chosen & text.cpu() if self._text_only else chosen

    def noise_generator(self, device: torch.device) -> torch.Generator:
        """Return the generator of the batch drawn last, on `device`."""
        seed = random_generator(self._seed, self._rank, self.batches, NOISE_STREAM).integers(1 << 63)
        return torch.Generator(device).manual_seed(int(seed))


def keep_rows(tensor: Tensor, keep: Tensor, other: Tensor | None = None) -> Tensor:
    """Return the rows of ``[B, ...]`` where bool `keep` ``[B]``, those of `other` (None = zeros) elsewhere."""
    other = torch.zeros((), device=tensor.device, dtype=tensor.dtype) if other is None else other
    return torch.where(keep.view(-1, *[1] * (tensor.ndim - 1)), tensor, other)


def clip_heads(state: Tensor, limit: float | None) -> Tensor:
    """Shrink heads of ``[B, H, K, V]`` whose Frobenius norm is above `limit` (None = none) to that norm."""
    if limit is None:
        return state
    norm = torch.linalg.vector_norm(state, dim=(-2, -1), keepdim=True)
    clipped: Tensor = state * (limit / norm.clamp(min=limit))
    return clipped


def filled_state(
    model: RecurrentLM, chosen: Tensor, convolution: bool, fill: Callable[[int, str, Tensor], Tensor]
) -> RecurrentState | None:
    """Return the zero state with ``fill(layer, name, zeros)`` in the chosen rows; None when no row is chosen.

    Args:
        chosen: bool ``[B]`` on the CPU.
        convolution: convolution states are filled too.
        fill: gets the zeros ``[B, ...]`` that it replaces, for their shape, dtype and device.
    """
    if not bool(chosen.any()):
        return None
    zero = model.zero_state(len(chosen))
    keep = None if bool(chosen.all()) else chosen.to(zero.position.device)
    layers: list[LayerState] = [dict(layer) for layer in zero.layers]
    for index, name, empty in each_tensor(zero.layers, convolution):
        tensor = fill(index, name, empty).to(empty.dtype)
        layers[index][name] = tensor if keep is None else keep_rows(tensor, keep)
    return replace(zero, layers=tuple(layers))


def pack_layers(prefix: str, layers: tuple[LayerState, ...]) -> dict[str, Tensor]:
    """Return contiguous copies of layer tensors as ``{prefix}.{layer}.{name}``."""
    return {
        f"{prefix}.{index}.{name}": tensor.clone(memory_format=torch.contiguous_format)
        for index, layer in enumerate(layers)
        for name, tensor in layer.items()
    }


def unpack_layers(prefix: str, tensors: dict[str, Tensor], model: RecurrentLM) -> tuple[LayerState, ...] | None:
    """The inverse of `pack_layers`, on the model's device; None when nothing has this prefix."""
    layers: list[LayerState] = [{} for _ in range(model.config.num_hidden_layers)]
    found = False
    for full, tensor in tensors.items():
        head, _, rest = full.partition(".")
        if head == prefix:
            index, _, name = rest.partition(".")
            layers[int(index)][name] = tensor.to(model.device)
            found = True
    return tuple(layers) if found else None
