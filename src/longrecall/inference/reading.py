"""What a model keeps captured, steps and segments, and reading a prompt in segments where that is the faster way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longrecall.inference.eligibility import why_no_room, why_not_fixed
from longrecall.inference.recorded_step import RecordedStep
from longrecall.inference.segments import CapturedSegments
from longrecall.inference.step import DecodingStep
from longrecall.models.captured_steps import kept
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState

LEAST_ROOM = 4096
"""Tokens of context that captured work on a growing state has room for at least; larger rooms are multiples of it."""

MOST_ROWS = 4
"""Larger batches keep the GPU busy by themselves."""

Where = tuple[Any, ...] | None
"""`addresses` of the model, given by a caller that has just looked them up; None = look them up."""


def rounded_room(tokens: int) -> int:
    """Room for so many tokens: few sizes, so that what was captured serves other contexts too, at most 1/4 too much."""
    unit = max(LEAST_ROOM, (1 << (tokens - 1).bit_length()) // 8)
    return -(-tokens // unit) * unit


def captured_step(model: RecurrentLM, batch: int, room: int = 0, where: Where = None) -> DecodingStep:
    """Return the model's captured step for this batch size, made on first use and kept for the next calls.

    `room`: the tokens that a context will have at most, for a model with retrieval or attention layers.
    """
    model.decoding.check()
    room = rounded_room(room) if room else 0

    def make() -> DecodingStep:
        step = DecodingStep(model, batch, model.decoding.state_dtype, room=room)
        step.capture()
        return step

    key = ("step", batch, model.decoding.state_dtype, *([room] if room else []))
    return kept(model.captured_steps, model, key, make, where)


def recorded_step(model: RecurrentLM, batch: int) -> RecordedStep:
    """Return the model's step on a CPU for this batch size, made on first use and kept for the next calls."""
    return kept(model.captured_steps, model, ("recorded", batch), lambda: RecordedStep(model, batch))


def captured_segments(model: RecurrentLM, batch: int, columns: int = 0, where: Where = None) -> CapturedSegments:
    """Return the model's segments for reading prompts of `batch` rows, each captured when it is first needed.

    `columns`: tokens of the prompt, for which a model with growing states must have room; others need none.
    """
    room = 0 if why_not_fixed(model) is None else rounded_room(columns)
    key = ("segments", batch, *([room] if room else []))
    return kept(model.captured_steps, model, key, lambda: CapturedSegments(model, batch, room=room), where)


def why_no_segments(ids: Tensor, mask: Tensor | None) -> str | None:
    """Return why this prompt ``[B, T]`` is read by a plain forward pass; None when segments are worth it."""
    if ids.shape[0] > MOST_ROWS:
        return f"more than {MOST_ROWS} rows"
    if mask is not None and not bool(mask.all()):
        return "padded"
    return None


@torch.no_grad()
def read_prompt(
    model: RecurrentLM, segments: CapturedSegments, ids: Tensor, state: RecurrentState | None
) -> tuple[Tensor, RecurrentState]:
    """Read ids ``[B, T]`` from `state` (None = zeros): logits ``[B, vocab]`` of the last token, and the new state."""
    columns = ids.shape[1]
    if segments.from_the_start and state is not None:
        raise ValueError("segments of a model with growing states begin with the first token; read this in one pass")
    captured = columns - columns % segments.longest
    if captured < columns and segments.reads_rests():
        captured = columns
    if captured:
        segments.prepare(captured)
        if state is None:
            segments.state.clear()
        else:
            segments.state.write(state.layers, state.position)
        logits = segments.read(ids[:, :captured]).clone()
        state = segments.export(ids[:, :captured], captured + (0 if state is None else state.length))
    if captured == columns and state is not None:
        return logits, state
    out = model(ids[:, captured:], past_key_values=state, use_cache=True, logits_to_keep=1)
    return out.logits[:, -1], out.past_key_values


def read_captured(
    model: RecurrentLM, ids: Tensor, mask: Tensor | None, where: Where = None
) -> tuple[Tensor, RecurrentState] | None:
    """Read a prompt ``[B, T]`` in captured segments: its last logits ``[B, vocab]`` and its state.

    None where a plain forward pass is to read it: large batches, padding, states without room.
    """
    if why_no_segments(ids, mask) is not None or why_no_room(model, ids.shape[1]) is not None:
        return None
    rows, columns = ids.shape
    return read_prompt(model, captured_segments(model, rows, columns, where), ids, None)
