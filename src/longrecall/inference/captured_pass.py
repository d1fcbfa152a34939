"""Reading short texts in captured segments, in the place of a plain forward pass without gradients.

A forward pass of a few thousand tokens is bound by launches: a GPU ends them sooner than Python sends them. Segments
that were captured once (inference/segments.py) are replayed with a launch each. In a text of many segments launches
hide behind the work, and longer pieces are the faster ones.
"""

from __future__ import annotations

import warnings

from torch import Tensor

from longrecall.errors import first_line
from longrecall.inference.eligibility import why_no_graph, why_no_room
from longrecall.inference.reading import MOST_ROWS, captured_segments
from longrecall.inference.segments import SEGMENT, CapturedSegments
from longrecall.models.captured_steps import addresses
from longrecall.models.long_texts import Text, Wanted
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState

SHORTEST = 32
"""Columns from which on segments are worth a look: a decoding loop of somebody else reads one token at a time."""

MOST_TOKENS = 4 * SEGMENT
"""Tokens of all rows up to which segments are the faster way on an H200: one takes as long as a fifth of the launches
of a plain pass."""


def may_capture(source: Tensor) -> bool:
    """Whether ids or embeddings ``[B, T, ...]`` have a size that captured segments may read; answers at once."""
    rows, columns = source.shape[:2]
    return source.device.type == "cuda" and rows <= MOST_ROWS and columns >= SHORTEST and rows * columns <= MOST_TOKENS


def why_no_capture(model: RecurrentLM, text: Text, wanted: Wanted) -> str | None:
    """Return why a text of such a size is not read in captured segments, in plain words; None where it may be."""
    if text.ids is None or text.embeddings is not None:
        return "embeddings are given instead of ids"
    if text.documents is not None:
        return "documents share its rows"
    if wanted.hidden_states:
        return "hidden states are wanted"
    if "forward" in vars(model):
        return "the forward method of the model was replaced"
    if reason := why_no_graph(model) or why_no_room(model, text.ids.shape[1]):
        return reason
    return "padded" if text.mask is not None and not bool(text.mask.all()) else None


def captured_pass(model: RecurrentLM, text: Text) -> CapturedPass | None:
    """The pass for a text that may be captured; None while its length is a rare one, or where capturing fails.

    Nobody else may use the model's captured work until the text is read.
    """
    assert text.ids is not None
    rows, columns = text.ids.shape
    try:
        segments = captured_segments(model, rows, columns, addresses(model))
        if segments.from_the_start and text.state is not None:
            return None
        # Graphs for a rest take as long as a few plain passes: they are for lengths that come again.
        if columns % segments.longest and not segments.reads_rests():
            return None
        segments.prepare(columns)
    except RuntimeError as error:  # out of memory, or a driver that refuses to capture
        reason = first_line(error)
        warnings.warn(f"reading without CUDA graphs, which failed: {reason}", stacklevel=2)
        model.captured_steps.clear()
        return None
    return CapturedPass(segments, text)


class CapturedPass:
    """`inference.reader.Pass`: the segments of one text, one after the other, on a state that stays where it is."""

    def __init__(self, segments: CapturedSegments, text: Text) -> None:
        assert text.ids is not None
        self.length, self._segments, self._ids, self._read = segments.longest, segments, text.ids, 0
        self._before = 0 if text.state is None else text.state.length
        if text.state is None:
            segments.state.clear()
        else:
            segments.state.write(text.state.layers, text.state.position)

    def __call__(
        self, model: RecurrentLM, given: object, state: RecurrentState | None, own: slice, keep_hidden: bool
    ) -> tuple[Tensor, RecurrentState, list[Tensor]]:
        """Hidden states of the next columns, overwritten by the next call, and after the last ones the state."""
        segments, columns = self._segments, self._ids.shape[1]
        hidden = segments.read_piece(self._ids, self._read)
        self._read += hidden.shape[1]
        if self._read < columns:
            # Nobody looks at it: the next segment goes on from where this one has left it.
            return hidden, RecurrentState(segments.state.layers, segments.state.position), []
        return hidden, segments.export(self._ids, columns + self._before), []
