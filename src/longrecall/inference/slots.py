"""A decoding step whose rows are slots: sequences join and leave between two tokens, each with a state of its own.

The memory is that of one `DecodingStep` for all slots. A token is read for the first rows alone, as many as are in use,
rounded up to one of a few counts; on a GPU there is a CUDA graph for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from longrecall.inference.as_built import why_not_as_built
from longrecall.inference.eligibility import why_no_graph_by_design, why_no_recording, why_no_step, why_not_fixed
from longrecall.inference.recorded_calls import NotRecordable
from longrecall.inference.recorded_step import one_token, recorded, state_of, tensors_of
from longrecall.inference.step import DecodingStep
from longrecall.inference.to_device import to_device
from longrecall.layers.recording import record, recording_stream
from longrecall.layers.stepping.step import Buffers
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.ops.execution import prefetching

FINE = 16
"""Counts of rows with a graph of their own: powers of two up to this, and its multiples."""

MOST_RECORDED = 64
"""Slots whose steps are recorded on a CPU. All of them are computed then, in use or not."""

LEAST_ROOM = 256
"""Tokens that a slot has room for at least, in models whose caches grow; larger rooms are powers of two."""


def why_no_slots(model: RecurrentLM) -> str | None:
    """Return why sequences of this model cannot be decoded in slots, in plain words; None when they can."""
    if model.training:
        return "the model is in training mode"
    if model.config.reads_tokens():
        return "its retrieval layers look up tokens in one context, which slots do not share"
    return why_no_step(model) or why_not_as_built(model)


def slot_room(tokens: int) -> int:
    """Room of a slot for sequences of so many tokens at most."""
    return max(LEAST_ROOM, 1 << (tokens - 1).bit_length())


class Slots(Protocol):
    """One token for the sequences in some slots, each with a state of its own."""

    ids: Tensor
    """int64 ``[slots]``: what the next step reads."""
    room: int
    """Tokens of a sequence at most; 0 where there is no limit."""

    def count_for(self, rows: int) -> int:
        """The number of rows that are computed where the first `rows` are in use."""

    def decode(self, rows: int) -> Tensor:
        """Read `ids` of the first rows, at least so many; logits ``[n, vocab]``, n >= rows, until the next call."""

    def join(self, rows: Sequence[int], state: RecurrentState) -> None:
        """Put the sequences of a state ``[n]`` into these slots; the others notice nothing."""

    def move(self, rows: Sequence[int], to: Sequence[int]) -> None:
        """Copy what is in some slots to others."""

    def take(self, rows: Sequence[int]) -> RecurrentState:
        """A copy of what is in some slots, as a state."""


def make_slots(model: RecurrentLM, slots: int, room: int = 0) -> Slots:
    """The fastest way to decode so many slots of this model; `room` as for `SlotStep`."""
    model.decoding.check()
    if slots <= MOST_RECORDED and why_no_recording(model) is None:
        with suppress(NotRecordable, RuntimeError):
            return RecordedSlots(model, slots)
    return SlotStep(model, slots, model.decoding.state_dtype, room)


class SlotStep(DecodingStep):
    """`join` states, set `ids`, call it with the number of rows in use.

    `room`: tokens of the longest sequence, those yet to come included, for a model whose caches grow. Its columns are
    used round and round by all slots together.
    """

    def __init__(
        self,
        model: RecurrentLM,
        slots: int,
        state_dtype: torch.dtype | None = None,
        room: int = 0,
        fused: bool | None = None,
    ) -> None:
        super().__init__(model, slots, state_dtype, fused, room if why_not_fixed(model) is not None else 0)
        if self.tokens is not None:
            raise ValueError("sequences of a model with retrieval layers cannot join others")
        fine = [1 << i for i in range(FINE.bit_length()) if 1 << i < min(FINE, slots)]
        self.counts: list[int] = [*fine, *range(FINE, slots, FINE), slots]
        self.views = {count: self._views(count) for count in self.counts}
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        if why_no_graph_by_design(model) is None:
            self._capture_all()

    def _views(self, count: int) -> tuple[Tensor, Tensor, Sequence[Buffers]]:
        if count == self.batch:
            return self.ids, self.position, self.buffers
        layers = [{name: tensor[:count] for name, tensor in buffers.items()} for buffers in self.buffers]
        return self.ids[:count], self.position[:count], layers

    def count_for(self, rows: int) -> int:
        return next(count for count in self.counts if count >= rows)

    @torch.no_grad()
    def _tokens_of(self, count: int) -> Tensor:
        with prefetching():
            return self._forward(*self.views[count])

    def _capture_all(self) -> None:
        """Record a graph for every count of rows, before there is a sequence: recording reads tokens."""
        pool = None
        # The largest first: the others fit into its memory.
        for count in reversed(self.counts):
            kept: list[Tensor] = []

            def work(count: int = count, kept: list[Tensor] = kept) -> None:
                kept[:] = [self._tokens_of(count)]

            graph = record(work, 2, recording_stream(self.ids.device), pool=pool)
            pool = graph.pool()
            self.graphs[count] = graph, kept[0]
        self.clear()

    def decode(self, rows: int) -> Tensor:
        count = self.count_for(rows)
        found = self.graphs.get(count)
        if found is None:
            return self._tokens_of(count)
        found[0].replay()
        return found[1]

    @torch.no_grad()
    def join(self, rows: Sequence[int], state: RecurrentState) -> None:
        index = to_device(rows, self.position.device)
        for step, buffers, layer in zip(self.steps, self.buffers, state.layers, strict=True):
            step.join(buffers, index, layer, self.position)
        self._place(index, state.position)

    @torch.no_grad()
    def move(self, rows: Sequence[int], to: Sequence[int]) -> None:
        index, places = (to_device(found, self.position.device) for found in (rows, to))
        for buffers in self.buffers:
            for tensor in buffers.values():
                tensor.index_copy_(0, places, tensor.index_select(0, index))
        self.ids.index_copy_(0, places, self.ids.index_select(0, index))
        self._place(places, self.position.index_select(0, index))

    @torch.no_grad()
    def take(self, rows: Sequence[int]) -> RecurrentState:
        index = to_device(rows, self.position.device)
        layers = [
            step.rows_of(buffers, index, self.position) for step, buffers in zip(self.steps, self.buffers, strict=True)
        ]
        position = self.position.index_select(0, index)
        return RecurrentState(tuple(layers), position, int(position.max()))

    def _place(self, rows: Tensor, position: Tensor) -> None:
        before = self.position[:1].clone()
        self.position.index_copy_(0, rows, position)
        for step in self.steps:
            step.rebase(self.position[:1] - before)


class RecordedSlots:
    """Slots on a CPU, of a model whose states have a fixed shape: calls that are recorded and repeated, for all slots.

    Raises:
        NotRecordable, RuntimeError: the calls of a token cannot be recorded.
    """

    # Made in inference mode, `ids` could not be written outside of it.
    @torch.inference_mode(False)
    def __init__(self, model: RecurrentLM, slots: int) -> None:
        self.ids = torch.zeros(slots, dtype=torch.long, device=model.device)
        self.room, self.slots = 0, slots
        read = one_token(model)
        with torch.inference_mode():
            # The state after a token, which may lie otherwise in memory than zeros.
            _, self.like = read(self.ids, model.zero_state(slots))
        self.calls = recorded(read, self.ids, self.like)

    def count_for(self, rows: int) -> int:
        return self.slots

    @torch.inference_mode()
    def decode(self, rows: int) -> Tensor:
        self.calls.given.copy_(self.ids)
        return self.calls()

    @torch.inference_mode()
    def join(self, rows: Sequence[int], state: RecurrentState) -> None:
        index = torch.tensor(rows)
        # By their names: the order is that of whoever made the state.
        named = RecurrentState(
            tuple({name: new[name] for name in old} for old, new in zip(self.like.layers, state.layers, strict=True)),
            state.position,
        )
        for buffer, tensor in zip(self.calls.state, tensors_of(named), strict=True):
            buffer.index_copy_(0, index, tensor.to(buffer.dtype))

    @torch.inference_mode()
    def move(self, rows: Sequence[int], to: Sequence[int]) -> None:
        index, places = torch.tensor(rows), torch.tensor(to)
        for tensor in (*self.calls.state, self.ids):
            tensor.index_copy_(0, places, tensor.index_select(0, index))

    @torch.inference_mode()
    def take(self, rows: Sequence[int]) -> RecurrentState:
        state = state_of(self.calls.state, self.like)
        found = state.select_rows(torch.tensor(rows))
        return replace(found, length=int(found.position.max()))
