"""Caches of tokens: a column for each, and buffers in which a decoding step has columns to spare.

A cache that grows has another shape for every token. In a step's buffers the positions say which columns hold a token,
-1 stands for none. With a window the columns are used round and round.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longrecall.layers.stepping.step import Buffers, MixerStep, Progress, StatefulMixer, StepSettings
from longrecall.ops.execution import shapes_are_fixed

Cache = dict[str, Tensor]
"""A layer's state with a column for every token ``[B, S, ...]``; `position` int64 ``[B, S]`` says which token."""

PADDING_POSITION = -1
"""The position of a column that nobody may see."""


def appended(state: Cache | None, new: Cache) -> Cache:
    """The columns of a cache and new ones behind them, in the dtype of the new ones."""
    if state is None:
        return new
    return {name: torch.cat([state[name].to(tensor.dtype), tensor], dim=1) for name, tensor in new.items()}


def trimmed(cache: Cache, newest: Tensor, window: int | None) -> Cache:
    """Drop the columns that no row's window can reach any more; `newest` ``[B, 1]``: positions of the last tokens.

    All stay while a training step is recorded as a graph: how many may go would have to be read back.
    """
    if window is None or (torch.is_grad_enabled() and shapes_are_fixed(newest.device)):
        return cache
    oldest = newest + 2 - window
    needed = ((cache["position"] >= oldest) & (cache["position"] != PADDING_POSITION)).any(0)
    first = int(needed.to(torch.int8).argmax()) if bool(needed.any()) else needed.shape[0]
    return {name: tensor[:, first:] for name, tensor in cache.items()}


def columns_for(room: int, window: int | None) -> int:
    """Columns of the buffers of a step with room for so many tokens."""
    # Twice a window: the columns that a state brings, at most one less than it, and as many again.
    return room if window is None else min(room, 2 * window)


class CacheStep(MixerStep):
    """Base of the steps of layers whose state is a cache: its buffers have columns for the tokens to come.

    `load` or `clear` before the first token: they say where the next column is.
    """

    def __init__(
        self, config: StatefulMixer, mixer: nn.Module, settings: StepSettings, window: int | None, device: torch.device
    ) -> None:
        super().__init__(config, mixer, settings)
        self.window = window
        self.offset = torch.zeros(1, dtype=torch.long, device=device)
        self.columns = 0

    def allocate(self) -> dict[str, Tensor]:
        columns = columns_for(self.settings.room, self.window)
        state = super().allocate()
        return {name: x.new_zeros((len(x), columns, *x.shape[2:])) for name, x in state.items()}

    def clear(self, buffers: Buffers) -> None:
        super().clear(buffers)
        buffers["position"].fill_(PADDING_POSITION)
        self.offset.zero_()
        self.columns = 0

    @torch.no_grad()
    def load(self, buffers: Buffers, state: Cache, position: Tensor) -> int:
        """Copy a cache after `position` ``[B]`` tokens into the buffers; return the columns it takes of the room.

        Raises:
            ValueError: it has more columns than there is room for.
        """
        if self.window is not None and state["position"].shape[1] >= self.window:
            state = _newest(state, self.window - 1)
        columns, room = state["position"].shape[1], buffers["position"].shape[1]
        if columns > room:
            raise ValueError(f"the state's cache has {columns} columns, the step room for {room}")
        buffers["position"].fill_(PADDING_POSITION)
        for name, tensor in state.items():
            buffers[name][:, :columns].copy_(tensor)
        self.columns = columns
        self.offset.copy_(columns - position[:1])
        return 0 if self.goes_round(buffers) else columns

    @torch.no_grad()
    def join(self, buffers: Buffers, rows: Tensor, state: Cache, position: Tensor) -> None:
        """Put the caches of n sequences just before the column that all rows write next.

        The columns are used round and round by all rows together. So a sequence keeps its tokens as long as it has no
        more than there are columns, whenever it has joined. Its caller must see to that.
        """
        if self.window is not None and state["position"].shape[1] >= self.window:
            state = _newest(state, self.window - 1)
        room = buffers["position"].shape[1]
        if state["position"].shape[1] > room:
            # The rest is padding: these sequences were read beside a longer one.
            state = _newest(state, room)
        columns = state["position"].shape[1]
        places = (self._next(position, room) + torch.arange(-columns, 0, device=rows.device)) % room
        for name, tensor in state.items():
            # Cleared, too: what is left of others there may be no number, and would not vanish when it is masked.
            nothing = PADDING_POSITION if name == "position" else 0
            fresh = buffers[name].new_full((len(rows), room, *tensor.shape[2:]), nothing)
            fresh.index_copy_(1, places, tensor.to(fresh.dtype))
            buffers[name].index_copy_(0, rows, fresh)

    def _next(self, position: Tensor, room: int) -> Tensor:
        """The column ``[1]`` that is written next, on a round that is not the first: all columns are looked at then."""
        column = position[:1] + self.offset
        first_round = (column < room).long() * room
        self.offset += first_round
        return column + first_round

    def rows_of(self, buffers: Buffers, rows: Tensor, position: Tensor) -> Cache:
        """The caches of some rows with all columns, the oldest first; those without a token say so."""
        room = buffers["position"].shape[1]
        order = (position[:1] + self.offset + torch.arange(room, device=rows.device)) % room
        return {name: x.index_select(0, rows).index_select(1, order) for name, x in buffers.items()}

    def rebase(self, by: Tensor) -> None:
        self.offset -= by

    def goes_round(self, buffers: Buffers) -> bool:
        """Whether a column is out of every row's window when it is used again: the buffers never fill up."""
        return self.window is not None and buffers["position"].shape[1] >= 2 * self.window

    def export(self, buffers: Buffers, progress: Progress) -> Cache:
        """The cache now, the oldest column first, as views or copies of the buffers."""
        columns, room = self.columns + progress.read, buffers["position"].shape[1]
        if columns <= room:
            cache = {name: tensor[:, :columns] for name, tensor in buffers.items()}
        else:
            cache = {name: tensor.roll(-(columns % room), 1) for name, tensor in buffers.items()}
        return trimmed(cache, progress.position[:, None] - 1, self.window)

    def write(self, buffers: Buffers, new: Cache, position: Tensor) -> None:
        """Put one token of every row ``[B, 1, ...]`` into the next column; `position` ``[B]``: tokens read before."""
        column = (position[:1] + self.offset) % buffers["position"].shape[1]
        for name, tensor in new.items():
            buffers[name].index_copy_(1, column, tensor.to(buffers[name].dtype))


def _newest(cache: Cache, count: int) -> Cache:
    """The `count` newest tokens of every row, the oldest of them first; padding goes to the front."""
    order = cache["position"].argsort(dim=1, stable=True)[:, cache["position"].shape[1] - count :]

    def kept(x: Tensor) -> Tensor:
        return x.gather(1, order.view(*order.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))

    return {name: kept(x) for name, x in cache.items()}
