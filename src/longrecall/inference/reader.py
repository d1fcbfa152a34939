"""The one reader of long texts without gradients: in segments, so that memory grows only with what the caller keeps.

A forward pass holds every layer's activations of all its tokens. Cut into segments, with the state carried from each to
the next, it holds those of one segment, and of the rest what was asked for: logits of some columns or of all, a loss,
hidden states. Every forward pass without gradients comes here first (models/recurrent_lm.py), so model(), the prompt of
generate(), evaluation and others have this in common. A text that fits into one segment is read as ever.

The numbers are those of one pass but for sums in another order, as with any text that is read from a state.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from longrecall.inference.captured_pass import captured_pass, may_capture, why_no_capture
from longrecall.layers.access import is_hooked
from longrecall.layers.descriptions.base import MixerConfig
from longrecall.models.captured_steps import modules_of, tensors_of
from longrecall.models.logits import loss_without_logits
from longrecall.models.long_texts import Read, Text, Wanted
from longrecall.models.losses import mean_loss, next_token_loss
from longrecall.models.recurrent_lm import RecurrentLayer, RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.models.token_ids import embedded
from longrecall.ops.execution import choices_noted, context, shapes_are_fixed, states_are_wanted, texts_are_whole

WORKSPACE = {"cpu": 64 << 20, "cuda": 2 << 30}
"""Bytes that the activations of a segment may take, about, by the type of device; others as "cuda"."""

LEAST_TOKENS = {"cpu": 1024, "cuda": 65536}
"""Tokens of all rows in a segment at least: with fewer a GPU waits for launches, and a CPU for Python."""

LEAST_COLUMNS = 256
"""Columns of a segment at least, and what its length is a multiple of: the chunks of all recurrences fit into it."""

BYTES_A_NUMBER = 32
"""Of workspace, for each number of a token's widest activation: several of them live at once, some in float32."""

CHUNK = 64
"""Tokens for which chunked recurrences hold a whole state."""

ROOMIER = 8
"""So many times the workspace for models whose caches grow: a segment copies them, and a pass from the first token on
has faster kernels for attention."""


class SegmentReader:
    """`models.long_texts.TextReader`: segments one after the other; short ones captured on a GPU."""

    def may_cut(self, source: Tensor) -> bool:
        return source.shape[0] * source.shape[1] > LEAST_TOKENS[_kind(source.device)] or may_capture(source)

    def read(self, model: RecurrentLM, text: Text, wanted: Wanted) -> Read | None:
        if model.training:
            return None
        rows, columns = text.source.shape[:2]
        if may_capture(text.source):
            if why_one_pass(model, text, wanted) is not None or why_no_capture(model, text, wanted) is not None:
                return None
            with model.captured_steps.alone() as alone:
                segment = captured_pass(model, text) if alone else None
                return None if segment is None else _read(model, Rows(text), Plan(segment.length, segment), wanted)
        if text.documents is not None:
            rows, columns = text.documents.mask.shape
        length = segment_length(model, rows, columns)
        if length >= columns or why_one_pass(model, text, wanted) is not None:
            return None
        return _read(model, Rows(text), Plan(length, _segment), wanted)


class Pass(Protocol):
    """Reads one segment of a text."""

    def __call__(
        self, model: RecurrentLM, given: Rows, state: RecurrentState | None, own: slice, keep_hidden: bool
    ) -> tuple[Tensor, RecurrentState, list[Tensor]] | None:
        """Hidden states ``[N, S, d]`` of the columns `own`, the state after them and, if asked for, all streams.

        None where a layer returns a loss of its own, which is one of the whole text.
        """
        ...


class Plan(NamedTuple):
    """How a text is read: so many columns at a time, each by such a pass."""

    length: int
    segment: Pass


def _kind(device: torch.device) -> str:
    return device.type if device.type in WORKSPACE else "cuda"


def why_one_pass(model: RecurrentLM, text: Text, wanted: Wanted) -> str | None:
    """Return why a text is read in one pass, however long it is, in plain words; None where it may be cut."""
    if texts_are_whole():
        return "whole_texts is on"
    if model.device.type == "meta" or choices_noted() is not None or shapes_are_fixed(model.device):
        return "the pass is being examined or recorded"
    if context() is not None:
        return "its sequences are split over ranks"
    if model.training:
        return "the model is in training mode"
    labels, keep = wanted.labels, wanted.logits_to_keep
    if (wanted.loss_only and labels is None) or (isinstance(keep, Tensor) and (keep.dim() != 1 or not len(keep))):
        return "the model itself must check its arguments"
    if labels is not None and not wanted.loss_only and (isinstance(keep, Tensor) or keep):
        return "the model itself must check a loss beside only some logits"
    modules = modules_of(model)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*tensors_of(modules), *_given(text))):
        return "gradients are wanted"
    if any(is_hooked(module) for module in modules if module is not model):
        return "modules inside it have hooks, which would see segments"
    if any(layer._compiled_call_impl is not None for layer in model.model.layers):
        return "its layers are compiled"
    for mixer in _mixers(model):
        if mixer.grows and (mixer.reads_tokens or mixer.why_no_room() is not None):
            return f"{mixer.type} looks at the whole text"
    return None


def segment_length(model: RecurrentLM, rows: int, columns: int) -> int:
    """Columns of a segment for a text of this size: as many as the workspace holds, in segments of equal length."""
    kind = _kind(model.device)
    mixers = _mixers(model)
    roomier = ROOMIER if any(mixer.grows for mixer in mixers) else 1
    tokens = WORKSPACE[kind] * roomier // (BYTES_A_NUMBER * _width(model, mixers))
    most = max(LEAST_COLUMNS, max(tokens, LEAST_TOKENS[kind]) // rows)
    if columns <= most:
        return columns
    equal = math.ceil(columns / math.ceil(columns / most))
    return min(math.ceil(equal / LEAST_COLUMNS) * LEAST_COLUMNS, columns)


def _width(model: RecurrentLM, mixers: list[MixerConfig]) -> int:
    """Numbers of a token in the widest activation of any layer."""
    width = model.config.hidden_size
    for mixer in mixers:
        for name, shape in mixer.state_shapes().items():
            if name.endswith("recurrent"):
                *_, keys, values = (1, *shape) if len(shape) < 3 else shape
                heads = math.prod(shape) // (keys * values)
                width = max(width, heads * keys, heads * values, math.prod(shape) // CHUNK)
    linear = [module.weight for module in modules_of(model.model.layers) if isinstance(module, torch.nn.Linear)]
    return max(width, *(weight.shape[0] for weight in linear)) if linear else width


def _mixers(model: RecurrentLM) -> list[MixerConfig]:
    """Every description of a module with a state, once."""
    blocks = [block.module for layer in model.model.layers for block in cast(RecurrentLayer, layer).blocks]
    return [module for module in dict.fromkeys(blocks) if not module.positionwise]


def _given(text: Text) -> list[Tensor]:
    states = [] if text.state is None else [tensor for layer in text.state.layers for tensor in layer.values()]
    return states if text.embeddings is None else [text.embeddings, *states]


class Rows:
    """A text as the rows that are read, a document each, and where a position of the caller's rows is among them."""

    def __init__(self, text: Text) -> None:
        self.rows, self.columns = text.source.shape[:2]
        self.ids, self.embeddings, self.mask, self.state = text.ids, text.embeddings, text.mask, text.state
        self.places: tuple[Tensor, Tensor] | None = None
        if (found := text.documents) is not None:
            self.ids, self.embeddings = (None if x is None else found.apart(x) for x in (text.ids, text.embeddings))
            self.mask, self.places = found.mask, (found.document, found.column)

    @property
    def source(self) -> Tensor:
        """What is read ``[N, L, ...]``."""
        source = self.ids if self.embeddings is None else self.embeddings
        assert source is not None
        return source

    def find(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Row and column of positions ``[n]``, which count through the caller's rows one after the other."""
        if self.places is None:
            return positions // self.columns, positions % self.columns
        return self.places[0][positions], self.places[1][positions]


class _Selection:
    """Some positions ``[n]`` of a text, to be found in segments: each knows which number it has among them."""

    def __init__(self, given: Rows, positions: Tensor) -> None:
        rows, columns = given.find(positions)
        self.columns, self.numbers = columns.sort(stable=True)
        self.rows = rows[self.numbers]

    def of(self, hidden: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Of a segment ``[N, S, d]`` from column `start` on: the vectors ``[m, d]`` and their numbers ``[m]``."""
        ends = torch.tensor([start, start + hidden.shape[1]], device=self.columns.device)
        first, last = torch.searchsorted(self.columns, ends).tolist()
        own = slice(first, last)
        return hidden[self.rows[own], self.columns[own] - start], self.numbers[own]


class _LastColumns:
    """The last columns of every row, which are neighbours in a segment: nothing is looked up, and nobody waits."""

    def __init__(self, given: Rows, count: int) -> None:
        self.first = given.columns - count

    def of(self, hidden: Tensor, start: int) -> tuple[Tensor, slice]:
        """As `_Selection.of`, the vectors ``[N, m, d]``: a row's numbers are those of its columns that are kept."""
        first = max(0, self.first - start)
        begin = start + first - self.first
        return hidden[:, first:], slice(begin, begin + max(0, hidden.shape[1] - first))


def _read(model: RecurrentLM, given: Rows, plan: Plan, wanted: Wanted) -> Read | None:
    rows, columns, device, keep = given.rows, given.columns, given.source.device, wanted.logits_to_keep
    loss = _Loss(model, given, wanted) if wanted.labels is not None and wanted.loss_only else None
    chosen: _Selection | _LastColumns | None = None
    kept = 0
    if loss is None and isinstance(keep, int) and given.places is None:
        kept = min(keep or columns, columns)
        chosen = _LastColumns(given, kept)
    elif loss is None:
        every = torch.arange(columns, device=device)[slice(-keep, None) if isinstance(keep, int) else keep]
        kept = len(every)
        chosen = _Selection(given, (torch.arange(rows, device=device)[:, None] * columns + every).flatten())
    whole = _Selection(given, torch.arange(rows * columns, device=device)) if wanted.hidden_states else None
    logits: Tensor | None = None
    streams: list[Tensor] = []
    state = given.state
    for start in range(0, given.source.shape[1], plan.length):
        found = plan.segment(model, given, state, slice(start, start + plan.length), wanted.hidden_states)
        if found is None:
            return None
        hidden, state, pieces = found
        if loss is not None:
            loss.add(hidden, start)
        if chosen is not None:
            vectors, numbers = chosen.of(hidden, start)
            if vectors.numel():
                logits = _put(logits, model.logit_scale(model.lm_head(vectors)), numbers, (rows, kept))
        if whole is not None:
            streams = streams or [piece.new_empty((rows * columns, piece.shape[2])) for piece in pieces]
            for stream, piece in zip(streams, pieces, strict=True):
                vectors, own = whole.of(piece, start)
                stream[own] = vectors
    assert state is not None
    logits = None if logits is None else logits.view(rows, kept, -1)
    value = None if wanted.labels is None else _loss_of(logits, wanted, plan.length) if loss is None else loss.value()
    return Read(logits, value, state, [stream.view(rows, columns, -1) for stream in streams])


def _put(logits: Tensor | None, piece: Tensor, own: Tensor | slice, shape: tuple[int, int]) -> Tensor:
    """Write logits of a segment where they belong; all there are need no copy."""
    rows, kept = shape
    if isinstance(own, slice) and own == slice(0, kept):
        return piece
    if logits is None:
        logits = piece.new_empty((rows * kept, piece.shape[-1]))
    if isinstance(own, slice):
        logits.view(rows, kept, -1)[:, own] = piece
    else:
        logits[own] = piece
    return logits


def _segment(
    model: RecurrentLM, given: Rows, state: RecurrentState | None, own: slice, keep_hidden: bool
) -> tuple[Tensor, RecurrentState, list[Tensor]] | None:
    """`Pass`: the layers of the model, as ever."""
    ids = None if given.ids is None else given.ids[:, own]
    x = embedded(cast(Tensor, ids), model.model.embeddings) if given.embeddings is None else given.embeddings[:, own]
    mask = None if given.mask is None else given.mask[:, own]
    if mask is not None and bool(mask.all()):
        mask = None
    last = own.stop >= given.source.shape[1]
    with nullcontext() if last else states_are_wanted():
        hidden, after, streams, losses = model.model(x, state, mask, keep_hidden, ids)
    return None if losses else (hidden, after, streams)


class _Loss:
    """The loss of labels, from hidden states as they come."""

    def __init__(self, model: RecurrentLM, given: Rows, wanted: Wanted) -> None:
        assert wanted.labels is not None
        self.model, self.labels, self.items = model, wanted.labels, wanted.items
        targets = torch.nn.functional.pad(wanted.labels[:, 1:], (0, 1), value=-100).flatten()
        positions = (targets != -100).nonzero()[:, 0]
        self.targets, self.selection = targets[positions], _Selection(given, positions)
        self.total = torch.zeros((), dtype=torch.float64, device=targets.device)
        self.dtype = torch.float32

    def add(self, hidden: Tensor, start: int) -> None:
        """Add the losses that a segment ``[N, S, d]`` predicts."""
        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        states, numbers = self.selection.of(hidden, start)
        if not len(states):
            return
        # A row in which each vector predicts the next label.
        labels, states = torch.nn.functional.pad(self.targets[numbers], (1, 0), value=-100)[None], states[None]
        scale, head = self.model.logit_scale, self.model.lm_head
        alone = None
        if scale.soft_cap is None:
            alone = loss_without_logits(head, states * scale.multiplier, labels, 1)
        self.total += next_token_loss(scale(head(states)), labels, 1) if alone is None else alone

    def value(self) -> Tensor:
        """Their mean, as the caller counts."""
        return mean_loss(self.total.to(self.dtype), self.labels, self.items)


def _loss_of(logits: Tensor | None, wanted: Wanted, length: int) -> Tensor:
    """The loss of all logits ``[B, T, vocab]``, whose wide copies are made of some columns at a time."""
    assert logits is not None and wanted.labels is not None
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    for start in range(0, logits.shape[1] - 1, length):
        own = slice(start, start + length + 1)
        total += next_token_loss(logits[:, own], wanted.labels[:, own], 1)
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return mean_loss(total.to(wide), wanted.labels, wanted.items)


RecurrentLM.text_reader = SegmentReader()
