"""What the interventions share: their Protocol, which rows and tensors take part, how a state is put together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from longrecall.layers.mixers.base import LayerState
from longrecall.layers.stepping.cache import PADDING_POSITION
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.training.recipe_states import AnyIntervention
from longrecall.training.sending import send
from longrecall.training.sources import random_generator

ROW_STREAM = 4
NOISE_STREAM = 5
"""Last part of the keys of random generators (`training.sources` and `training.data` have 1 to 3)."""

ROW_ENTRIES = ("carried", "position")
"""What an intervention keeps of each row of the batch: first parts of such names in its `state_dict`.

These tensors have one entry for each row, in the first dimension. Everything else is the same in every process.
"""


@dataclass(frozen=True)
class BatchRows:
    """The rows of the batch of all processes that this process reads, and how it adds up numbers over processes.

    What happens to a row depends on its number in the whole batch, never on the process that reads it, so that a run
    goes on alike with another number of processes.

    Attributes:
        seed: of the run.
        first: number, in the whole batch, of this process's first row.
        add_up: returns the sum of a tensor over all processes; None = this process is alone.
    """

    seed: int
    first: int = 0
    add_up: Callable[[Tensor], Tensor] | None = None


def sum_of(world: int) -> Callable[[Tensor], Tensor] | None:
    """Return what adds up a tensor over the `world` processes of a run, in place; None for a single process."""
    return _sum if world > 1 else None


def _sum(tensor: Tensor) -> Tensor:
    torch.distributed.all_reduce(tensor)
    return tensor


def is_of_rows(name: str) -> bool:
    """Whether a name in the `state_dict` of an intervention is that of a tensor with an entry for each row."""
    return name.partition(".")[0] in ROW_ENTRIES


class InitialState(Protocol):
    """What the trainer asks before and after every forward pass (with gradient accumulation: every micro-batch)."""

    by_row: ClassVar[bool]
    """A state belongs to a row of the batch and comes back to it; else to a sequence, however they lie in the batch.
    Where documents are kept apart, the former see one state a row, the latter one state a document."""
    continues: ClassVar[bool]
    """A row goes on in the text it was reading: where a document starts, the state is zero."""

    def before_batch(self, text: Tensor, row: Tensor | None = None) -> RecurrentState | None:
        """Return the state the next batch starts from (None = zeros).

        Args:
            text: bool ``[B]``: the rows of running text; of N documents that are kept apart, ``[N]``.
            row: int64 ``[N]``, ascending: the row that each document lies in; None = one sequence a row.
        """

    def after_batch(self, final: RecurrentState, lent: bool = False) -> None:
        """See the state that the batch ended in (with its history of gradients).

        `lent`: the next batch overwrites the memory of `final`, so what is kept of it must be copied. Else a state is a
        value that nobody changes, and is kept as it is.
        """

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
    """Draws which rows of a batch get a state: seeded, new in every batch, one stream of numbers for each row.

    Args:
        recipe: gives `probability` and, where it has it, `text_only`.
        rows: which rows this process has.
    """

    def __init__(self, recipe: AnyIntervention, rows: BatchRows) -> None:
        self._probability, self._text_only = recipe.probability, bool(getattr(recipe, "text_only", False))
        self._seed, self._first = rows.seed, rows.first
        self.shared = rows.add_up is not None
        """Whether other processes read rows of the batch too."""
        self.batches = 0
        """Batches begun."""

    def draw(self, text: Tensor, row: Tensor | None = None) -> Tensor:
        """Return bool ``[B]`` on the CPU for the next batch; arguments as of `InitialState.before_batch`."""
        places = _places(text, row)
        draws: list[float] = []
        for place in dict.fromkeys(places):
            draws += random_generator(*self._key(place), ROW_STREAM).random(places.count(place)).tolist()
        self.batches += 1
        chosen = torch.tensor(draws, dtype=torch.float64) < self._probability
        return chosen & text.cpu() if self._text_only else chosen

    def noise(self, text: Tensor, row: Tensor | None, chosen: Tensor) -> RowNoise:
        """Return the noise of the batch drawn last; `chosen`: what `draw` returned for `text` and `row`."""
        places = _places(text, row)
        seeds = {place: random_generator(*self._key(place), NOISE_STREAM).integers(1 << 63) for place in set(places)}
        return RowNoise(places, {place: int(seed) for place, seed in seeds.items()}, chosen.tolist())

    def _key(self, place: int) -> tuple[int, int, int]:
        return self._seed, self._first + place, self.batches


def _places(text: Tensor, row: Tensor | None) -> list[int]:
    return list(range(len(text))) if row is None else row.tolist()


class RowNoise:
    """Normal random numbers of which every row of the batch has a stream of its own; documents of a row share it.

    Args:
        places: the row of each sequence, ascending.
        seeds: of the stream of each row.
        chosen: which sequences need noise; the others get none, and draw none.
    """

    def __init__(self, places: Sequence[int], seeds: dict[int, int], chosen: Sequence[bool]) -> None:
        self._places, self._seeds, self._chosen = places, seeds, chosen
        self._generators: dict[int, torch.Generator] = {}

    def like(self, empty: Tensor) -> Tensor:
        """Return N(0, 1) numbers, at least float32, with the shape and on the device of `empty` ``[N, ...]``."""
        wide = torch.float64 if empty.dtype == torch.float64 else torch.float32
        noise = torch.zeros(empty.shape, device=empty.device, dtype=wide)
        for index, (place, chosen) in enumerate(zip(self._places, self._chosen, strict=True)):
            if chosen:
                noise[index].normal_(generator=self._generator(place, empty.device))
        return noise

    def _generator(self, place: int, device: torch.device) -> torch.Generator:
        if place not in self._generators:
            self._generators[place] = torch.Generator(device).manual_seed(self._seeds[place])
        return self._generators[place]


def keep_rows(tensor: Tensor, keep: Tensor, other: Tensor | None = None) -> Tensor:
    """Return the rows of ``[B, ...]`` where bool `keep` ``[B]``, those of `other` (None = zeros) elsewhere."""
    other = torch.zeros((), device=tensor.device, dtype=tensor.dtype) if other is None else other
    return torch.where(keep.view(-1, *[1] * (tensor.ndim - 1)), tensor, other)


def without_rows(layer: LayerState, keep: Tensor) -> LayerState:
    """The rows of a layer's state where bool `keep` ``[B]``, the state before the first token elsewhere."""
    empty = {name: _nothing(name, tensor) for name, tensor in layer.items()}
    return {name: keep_rows(tensor, keep, empty[name]) for name, tensor in layer.items()}


def _nothing(name: str, like: Tensor) -> Tensor:
    """Zeros; of a cache's positions, that no column holds a token."""
    return like.new_full((), PADDING_POSITION if name.rpartition(".")[2] == "position" else 0)


class AttentionWindow:
    """What attention layers keep of their last tokens, for interventions that let a row go on from another one.

    Args:
        tokens: how many; None = the caches start empty, and nothing is kept.
    """

    def __init__(self, model: RecurrentLM, tokens: int | None) -> None:
        self.tokens = tokens or 0
        layers = model.config.layer_configs() if tokens else []
        self._caches = [_caches_by_path(layer.attention_caches()) for layer in layers]

    def newest(self, layers: tuple[LayerState, ...]) -> tuple[LayerState, ...]:
        """The last tokens of every cache, without gradients, in `tokens` columns: unused ones stand first.

        They are gathered into memory of their own.
        """
        if not self._caches:
            return tuple({} for _ in layers)
        return tuple(
            {name: tensor for names in paths for name, tensor in self._last(layer, names).items()}
            for layer, paths in zip(layers, self._caches, strict=True)
        )

    def _last(self, layer: LayerState, names: list[str]) -> LayerState:
        place = next(layer[name] for name in names if name.endswith("position"))
        # Padding has position -1, so that the newest tokens of every row come last.
        order = place.argsort(dim=1, stable=True)[:, max(0, place.shape[1] - self.tokens) :]
        missing = self.tokens - order.shape[1]
        kept = {}
        for name in names:
            tensor = layer[name].detach()
            index = order.view(*order.shape, *[1] * (tensor.ndim - 2)).expand(-1, -1, *tensor.shape[2:])
            front = _nothing(name, tensor).expand(len(tensor), missing, *tensor.shape[2:])
            kept[name] = torch.cat([front, tensor.gather(1, index)], dim=1)
        return kept

    def given(
        self, state: RecurrentState, carried: tuple[LayerState, ...], position: Tensor, chosen: Tensor
    ) -> RecurrentState:
        """The state with the carried caches in the chosen rows (bool ``[B]``), whose positions go on."""
        if not self._caches:
            return state
        keep = send(chosen, position.device)
        caches = (
            {name: layer[name] for names in paths for name in names}
            for layer, paths in zip(carried, self._caches, strict=True)
        )
        layers = tuple(layer | without_rows(own, keep) for layer, own in zip(state.layers, caches, strict=True))
        return replace(state, layers=layers, position=keep_rows(position, keep))


def _caches_by_path(names: set[str]) -> list[list[str]]:
    """The tensors of every cache: those that have one path."""
    paths = sorted({name.rpartition(".")[0] for name in names})
    return [sorted(name for name in names if name.rpartition(".")[0] == path) for path in paths]


def own_copy(layer: LayerState) -> LayerState:
    """The same state in memory of its own."""
    return {name: tensor.clone() for name, tensor in layer.items()}


def clip_heads(state: Tensor, limit: float | None) -> Tensor:
    """Shrink heads of ``[B, H, K, V]`` whose Frobenius norm is above `limit` (None = none) to that norm."""
    if limit is None:
        return state
    norm = torch.linalg.vector_norm(state, dim=(-2, -1), keepdim=True)
    clipped: Tensor = state * (limit / norm.clamp(min=limit))
    return clipped


def filled_state(
    model: RecurrentLM,
    chosen: Tensor,
    convolution: bool,
    fill: Callable[[int, str, Tensor], Tensor],
    shared: bool = False,
) -> RecurrentState | None:
    """Return the zero state with ``fill(layer, name, zeros)`` in the chosen rows; None when no row is chosen.

    In a model with memory tokens the zero state is what these leave, which is returned then.

    Args:
        chosen: bool ``[B]`` on the CPU.
        convolution: convolution states are filled too.
        fill: gets the zeros ``[B, ...]`` that it replaces, for their shape, dtype and device.
        shared: there are rows in other processes too; then the zero state is returned when no row is chosen.
    """
    # Sharded weights are gathered by all processes together, in the backward pass too. So each reads memory tokens in
    # the same place, whichever of its rows get a state. And a recorded pass is replayed by all or none: with a state
    # or without one they are different passes.
    alike = shared or bool(model.config.memory_tokens)
    if not bool(chosen.any()) and not alike:
        return None
    zero = model.zero_state(len(chosen))
    keep = None if bool(chosen.all()) and not alike else send(chosen, zero.position.device)
    layers: list[LayerState] = [dict(layer) for layer in zero.layers]
    for index, name, empty in each_tensor(zero.layers, convolution):
        tensor = fill(index, name, empty).to(empty.dtype)
        layers[index][name] = tensor if keep is None else keep_rows(tensor, keep, empty)
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
