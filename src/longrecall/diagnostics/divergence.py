"""Where a model's numbers stop being finite: the first token and the first layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longrecall.diagnostics.streaming import Segment, recurrent_tensors


@dataclass(frozen=True)
class Divergence:
    """The first NaN or infinity of a reading.

    `position`: tokens before the one at which it shows; `layer`: the layer that made it, None for the embedding or the
    output head; `place`: "state", "activations", "embedding" or "logits"; `sequences`: rows that have it there.
    """

    position: int
    layer: int | None
    place: str
    sequences: int


def first_of(found: Sequence[Divergence]) -> Divergence | None:
    """Return the earliest of several readings' divergences, with the sequences of all that have the same one."""
    if not found:
        return None
    first = min(found, key=lambda item: item.position)
    same = [item for item in found if replace(item, sequences=0) == replace(first, sequences=0)]
    return replace(first, sequences=sum(item.sequences for item in same))


class DivergenceWatch:
    """Looks at the logits and recurrent states of every segment and locates the first that is not finite."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.found: Divergence | None = None

    def stops(self) -> Sequence[int]:
        """Any segmentation will do: a bad segment is read again to find its first bad token."""
        return ()

    def see(self, segment: Segment) -> None:
        """Check a segment; after the first divergence nothing more is looked at."""
        if self.found is not None:
            return
        states = recurrent_tensors(getattr(segment.state, "layers", ()))
        if _finite(segment.logits) and all(_finite(state) for _, _, state in states):
            return
        self.found = locate(self._model, segment.ids, segment.before, segment.start)


@torch.inference_mode()
def locate(model: Any, ids: Tensor, before: Any, start: int) -> Divergence:
    """Return where reading `ids` int64 ``[B, T]`` from the state `before` first leaves the finite numbers.

    `start`: the tokens read before. The segment is halved until one token is left, which is then read with all its
    hidden streams, so a long segment costs one more reading of itself and no memory. Raises ValueError when everything
    is finite.
    """
    while ids.shape[1] > 1:
        half = ids.shape[1] // 2
        output = model(ids[:, :half], past_key_values=before, use_cache=True)
        states = recurrent_tensors(getattr(output.past_key_values, "layers", ()))
        if _finite(output.logits) and all(_finite(state) for _, _, state in states):
            ids, before, start = ids[:, half:], output.past_key_values, start + half
        else:
            ids = ids[:, :half]
    output = model(ids, past_key_values=before, use_cache=True, output_hidden_states=True)
    streams = [_bad_rows(stream) for stream in output.hidden_states or ()]
    states = recurrent_tensors(getattr(output.past_key_values, "layers", ()))
    bad = [(index, rows) for index, _, state in states if int((rows := _bad_rows(state)).sum())]
    stream = next((index for index, rows in enumerate(streams) if int(rows.sum())), None)
    # Stream i + 1 is what layer i made; a state of a layer is written before its output is.
    if bad and (stream is None or bad[0][0] < stream):
        return Divergence(start, bad[0][0], "state", int(bad[0][1].sum()))
    if stream is not None:
        count = int(streams[stream].sum())
        return Divergence(start, stream - 1 if stream else None, "activations" if stream else "embedding", count)
    logits = _bad_rows(output.logits)
    if not int(logits.sum()):
        raise ValueError("every number of this segment is finite")
    return Divergence(start, None, "logits", int(logits.sum()))


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _bad_rows(tensor: Tensor) -> Tensor:
    """Return bool ``[B]``: the rows with a number that is not finite."""
    return ~torch.isfinite(tensor).flatten(1).all(1)
