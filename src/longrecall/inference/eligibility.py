"""What can be captured: why a model's step cannot be, or a prompt not be read in segments, in words.

Every mixer's description answers for itself (`MixerConfig.why_no_room`, `why_not_in_segments`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from longrecall.inference.as_built import why_not_as_built
from longrecall.inference.segments import LENGTHS
from longrecall.layers.descriptions.base import NO_ROOM, MixerConfig
from longrecall.models.recurrent_lm import RecurrentLayer, RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.ops.execution import context

MOST_ROOM = 131072
"""Tokens of a prompt that is read in segments by a model with retrieval or attention, whose keys stay in memory."""


def why_no_graph(model: RecurrentLM) -> str | None:
    """Return why the model's decoding step cannot be captured, in plain words; None when it can."""
    return why_no_graph_by_design(model) or why_not_as_built(model)


def why_no_graph_by_design(model: RecurrentLM) -> str | None:
    """The same for a model into which nobody has put anything: its settings, device, dtype and layers alone."""
    if not model.decoding.graphs:
        return "model.decoding.graphs is off"
    if model.device.type != "cuda":
        return f"the model is on {model.device.type}; CUDA graphs need a GPU"
    if model.dtype == torch.float64:
        return "float64 weights are for reference only"
    if model.training:
        return "the model is in training mode"
    return why_no_step(model)


def why_no_recording(model: RecurrentLM) -> str | None:
    """Return why tokens are not decoded by recorded calls on a CPU, in plain words; None when they are."""
    if not model.decoding.graphs:
        return "model.decoding.graphs is off"
    if model.device.type != "cpu":
        return f"the model is on {model.device.type}"
    if model.training:
        return "the model is in training mode"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    if context() is not None:
        return "its sequences are split over ranks"
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return "a torch mode, such as a profiler, watches the calls"
    if "forward" in vars(model):
        return "the forward method of the model was replaced"
    if any(layer._compiled_call_impl is not None for layer in model.model.layers):
        return "its layers are compiled"
    return why_not_fixed(model) or why_not_as_built(model)


def _first_reason(model: RecurrentLM, reason: Callable[[MixerConfig], str | None]) -> str | None:
    """The first layer that has a reason, named; None when none has."""
    # What every module was built from, without reading (and checking) the model's config again.
    first: dict[MixerConfig, int] = {}
    for index, layer in enumerate(model.model.layers):
        for block in cast(RecurrentLayer, layer).blocks:
            first.setdefault(block.module, index)
    for module, index in first.items():
        found = reason(module)
        if found is not None:
            return f"layer {index} ({module.type}): {found}"
    return None


def why_no_step(model: RecurrentLM) -> str | None:
    """Return which layer's state grows and cannot be given room beforehand; None when there is none.

    The caches of attention can, and what retrieval keeps of a context whose largest length is known.
    """
    return _first_reason(model, lambda mixer: mixer.why_no_room())


def why_not_fixed(model: RecurrentLM) -> str | None:
    """Return which layer has a state that grows with the context; None when none has."""
    return _first_reason(model, lambda mixer: NO_ROOM if mixer.grows else None)


def why_no_room(model: RecurrentLM, columns: int) -> str | None:
    """Return why a prompt of so many tokens is not read in segments; None where the state has or gets a fixed shape."""
    if model.config.memory_tokens:
        return "the model reads its memory tokens first, in one pass"
    if why_not_fixed(model) is None:
        return None
    if columns > MOST_ROOM:
        return f"growing states get room for {MOST_ROOM} tokens at most"
    return _first_reason(model, lambda mixer: mixer.why_not_in_segments(LENGTHS[0]))


def room_for(model: RecurrentLM, state: RecurrentState, more: int) -> int:
    """Tokens for which a step from this state on needs room, to read `more` of them; 0 where it needs none."""
    if why_not_fixed(model) is None:
        return 0
    return max(state.length, 0 if state.context is None else state.context.shape[1]) + more
