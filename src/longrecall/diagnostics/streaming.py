"""Reading long sequences once, in segments with a carried state, while observers take what they need from each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longrecall.errors import UserError
from longrecall.evaluation.token_bytes import tokenize_with_bytes
from longrecall.layers.mixers.base import LayerState

# Logits of one segment in float32: 2**27 numbers are half a GiB.
_LOGIT_BUDGET = 2**27
# Recurrent states of all rows that are read together, in float32: 2**28 numbers are 1 GiB.
_STATE_BUDGET = 2**28
# Weights times tokens that are read between two lines of a journal: some seconds on two CPU cores.
_WORK_BUDGET = 2**38


@dataclass(frozen=True)
class Segment:
    """Columns `start` to `end` of all rows, just read.

    `logits` ``[B, end - start, vocab]`` (the last column alone where nothing else was asked for), on the model's
    device; `before` and `state`: the model's state before and after these columns; `ids` int64 ``[B, end - start]``;
    `following` int64 ``[B]``: the tokens after the segment, None at the end of the sequence.
    """

    start: int
    end: int
    ids: Tensor
    following: Tensor | None
    logits: Tensor
    before: Any
    state: Any


class Observer(Protocol):
    """Something that looks at every segment of a reading and keeps a summary whose size does not grow with it."""

    def stops(self) -> Sequence[int]:
        """Return the columns at which a segment must end so that the state there can be seen."""
        ...

    def see(self, segment: Segment) -> None:
        """Take what is needed from a segment; keep neither its logits nor its states."""
        ...


def segment_size(rows: int, vocabulary: int, batch_tokens: int, segment_tokens: int) -> int:
    """Return how many columns of `rows` rows are read at once: at most `segment_tokens`, at least 1."""
    tokens = min(batch_tokens, _LOGIT_BUDGET // vocabulary)
    return max(1, min(segment_tokens, tokens // max(1, rows)))


def rows_at_once(model: Any, copies: int = 1) -> int:
    """Return how many sequences, each with `copies` states, may be read together; at least 1."""
    return max(1, _STATE_BUDGET // (copies * max(1, int(model.config.state_size()))))


def windows_at_once(model: Any, tokens: int, copies: int = 1) -> int:
    """Return how many windows, each of `tokens` tokens to read, make a batch whose loss in a kill can be borne.

    At most `rows_at_once`. It depends on the model and the lengths alone, so a run that goes on makes the same batches.
    """
    weights: int = sum(parameter.numel() for parameter in model.parameters())
    return max(1, min(rows_at_once(model, copies), _WORK_BUDGET // max(1, weights * tokens)))


def segment_ends(length: int, columns: int, stops: Iterable[int] = ()) -> list[int]:
    """Return the ends of segments of at most `columns` columns up to `length`, with one at every stop on the way."""
    ends = {stop for stop in stops if 0 < stop < length} | {length}
    start, every = 0, []
    for end in sorted(ends):
        every += [*range(start + columns, end, columns), end]
        start = end
    return every


def read_segments(
    model: Any, ids: NDArray[np.int64], columns: int, stops: Iterable[int] = (), last_only: bool = False
) -> Iterator[Segment]:
    """Read `ids` int64 ``[B, T]`` from the zero state and yield every segment; nothing is kept between two of them.

    `last_only`: compute logits for the last column of a segment alone.
    """
    state: Any = None
    start = 0
    for end in segment_ends(ids.shape[1], columns, stops):
        block = torch.from_numpy(ids[:, start:end]).to(model.device)
        logits, after = forward(model, block, state, last_only)
        following = torch.from_numpy(ids[:, end]).to(model.device) if end < ids.shape[1] else None
        yield Segment(start, end, block, following, logits, state, after)
        state, start = after, end


@torch.inference_mode()
def forward(model: Any, ids: Tensor, state: Any, last_only: bool = False) -> tuple[Tensor, Any]:
    """Return the logits of `ids` int64 ``[B, T]`` (of the last column if `last_only`) and the state after them."""
    output = model(ids, past_key_values=state, use_cache=True, logits_to_keep=1 if last_only else 0)
    return output.logits, output.past_key_values


def read(
    model: Any,
    ids: NDArray[np.int64],
    observers: Sequence[Observer],
    columns: int,
    advance: Callable[[int], object] = lambda tokens: None,
    last_only: bool = False,
) -> None:
    """Read `ids` int64 ``[B, T]`` once, at most `columns` at a time, and show every segment to every observer.

    Memory does not grow with T for recurrent layers; attention without a window keeps its keys. `advance` is told the
    tokens read.
    """
    stops = [stop for observer in observers for stop in observer.stops()]
    for segment in read_segments(model, ids, columns, stops, last_only):
        for observer in observers:
            observer.see(segment)
        advance(int(segment.ids.numel()))


def recurrent_tensors(layers: Sequence[LayerState]) -> list[tuple[int, str, Tensor]]:
    """Return (layer, path, state ``[B, H, K, V]``) of every recurrent state; path: "" or that of a mixer inside."""
    return [
        (index, name.rpartition("recurrent")[0].rstrip("."), tensor)
        for index, layer in enumerate(layers)
        for name, tensor in layer.items()
        if name.endswith("recurrent")
    ]


def text_windows(
    tokenizer: Any, text: str, length: int, sequences: int
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Return windows of a text, int64 ``[B, length]``, and the bytes of each token, or None where they are unknown.

    At most `sequences` windows, none overlapping, spread evenly over the text. Raises `UserError` for a text with
    fewer than `length` tokens.
    """
    sizes: NDArray[np.int64] | None
    try:
        ids, sizes = tokenize_with_bytes(tokenizer, text)
    except UserError:
        ids, sizes = np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64), None
    available = len(ids) // length
    if available < 1:
        raise UserError(
            f"the text has {len(ids)} tokens, fewer than the {length} to read; "
            "give a longer text, a smaller --multiple or a smaller --training-length"
        )
    count = min(sequences, available)
    starts = np.arange(count, dtype=np.int64) * available // count * length
    places = starts[:, None] + np.arange(length)
    return ids[places], None if sizes is None else sizes[places]
