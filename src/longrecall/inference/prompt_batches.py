"""Reading short prompts of many requests side by side, in segments that were captured for a few sizes beforehand.

A GPU reads a prompt of a hundred tokens in the time of one of a thousand: it waits for launches. Several prompts in the
rows of one segment cost little more than one. Rows end where their prompts end; the rest of a row is padding.

On a GPU all this has a stream of its own. Decoding steps of few rows leave most of a GPU idle; prompts are read there
at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from longrecall.inference.segments import CapturedSegments
from longrecall.inference.to_device import sent
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState

ROWS = (1, 4, 16)
"""Rows of segments. Every row has a state of its own in memory, and another while it is read."""

LENGTHS = (64, 128, 192, 256, 384, 512)
"""Their lengths; recurrences are computed in chunks of 64 tokens. Longer prompts are work enough by themselves."""

SEGMENT_COST = 1024
"""Tokens that a GPU reads in the time that a segment takes however short it is (400M parameters on an H200)."""


class PromptBatches:
    """Segments of one model for every number of rows and every length; off a GPU they run eagerly.

    `most_rows`: rows of a segment at most. For models whose states have a fixed shape and which begin with zeros.
    """

    def __init__(self, model: RecurrentLM, most_rows: int = ROWS[-1]) -> None:
        self.rows = tuple(rows for rows in ROWS if rows <= max(1, most_rows))
        self.longest, self.device = LENGTHS[-1], model.device
        # Of its own for the recordings too: libraries have a workspace for every stream, which two at once would spoil.
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        # The most rows first: the others fit into their memory.
        self.segments: dict[int, CapturedSegments] = {}
        pool = None
        for rows in reversed(self.rows):
            segments = CapturedSegments(model, rows, LENGTHS, pool=pool, stream=self.stream)
            segments.prepare_rows()
            pool, self.segments[rows] = segments.pool, segments

    @contextmanager
    def beside(self, states: Sequence[RecurrentState | None]) -> Iterator[None]:
        """Inside, work goes to the stream of the segments, after all that was given to the current one before.

        `states`: made elsewhere, and used inside; their memory may be given up afterwards.
        """
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        for state in states:
            for tensor in () if state is None else (state.position, *(x for y in state.layers for x in y.values())):
                tensor.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            yield

    def arrival(self) -> torch.cuda.Event | None:
        """What tells that all work of `beside` up to now is done; None where it is done already."""
        return None if self.stream is None else self.stream.record_event()

    def wait(self) -> None:
        """The current stream goes on after all work of `beside` up to now."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def passes(self, lengths: Sequence[int], most_tokens: int) -> list[list[int]]:
        """Prompts of these lengths, by their numbers, in the segments that read them in the least time.

        `most_tokens`: of a segment with several rows, padding included.
        """
        order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
        # The time, and the prompts of the last segment, of the first so many prompts.
        best: list[tuple[int, int]] = [(0, 0)]
        for end in range(1, len(order) + 1):
            found = []
            for count in range(1, min(end, self.rows[-1]) + 1):
                tokens = self._rows_for(count) * _length_for(lengths[order[end - count]])
                if count == 1 or tokens <= most_tokens:
                    found.append((best[end - count][0] + SEGMENT_COST + tokens, count))
            best.append(min(found))
        cuts, end = [], len(order)
        while end:
            cuts.append(order[end - best[end][1] : end])
            end -= best[end][1]
        return cuts

    def _rows_for(self, count: int) -> int:
        return next(rows for rows in self.rows if rows >= count)

    def read(self, pieces: Sequence[Sequence[int]], state: RecurrentState | None) -> tuple[Tensor, RecurrentState]:
        """Read a piece of each of n prompts from a row of `state` ``[n]`` on; None = from the start. Call it `beside`.

        Returns:
            Logits ``[n, vocab]`` of the last tokens and the states ``[n]`` after them, both overwritten by the next
            call.
        """
        count, length = len(pieces), _length_for(max(map(len, pieces)))
        segments = self.segments[self._rows_for(count)]
        ids = torch.zeros(len(segments.count), length, dtype=torch.long)
        ends = torch.ones(len(ids), dtype=torch.long)
        for row, piece in enumerate(pieces):
            ids[row, : len(piece)] = torch.tensor(piece)
            ends[row] = len(piece)
        if state is None:
            segments.state.clear()
        else:
            spare = torch.arange(len(ids)).clamp(max=count - 1)
            state = state.select_rows(sent(spare, self.device)) if count < len(ids) else state
            segments.state.write(state.layers, state.position)
        logits = segments.read_rows(sent(ids, self.device), sent(ends, self.device))[:count]
        layers = tuple({name: x[:count] for name, x in layer.items()} for layer in segments.state.layers)
        before = 0 if state is None else state.length
        return logits, RecurrentState(layers, segments.state.position[:count], before + max(map(len, pieces)))


def _length_for(tokens: int) -> int:
    return next(length for length in LENGTHS if length >= tokens)
