"""Buffers with room for tokens to come: which layers need them, and how states are copied into them and out."""

from __future__ import annotations

from torch import Tensor

from longrecall.layers import attention_decoding
from longrecall.layers.aside import buffers_under, innermost
from longrecall.layers.attention_decoding import AttentionStep
from longrecall.layers.decoding import Buffers, Step
from longrecall.layers.mixers.attention import AttentionConfig
from longrecall.layers.mixers.base import LayerState, MixerConfig, state_under
from longrecall.layers.mixers.hymba import HymbaConfig
from longrecall.layers.retrieval import RetrievalConfig


def grows(mixer: MixerConfig) -> bool:
    """Whether the state of this mixer has no fixed shape: one of its tensors is empty before the first token."""
    return mixer.reads_tokens or any(0 in shape for shape in mixer.state_shapes().values())


def without_room(mixer: MixerConfig) -> MixerConfig | None:
    """The mixer, this one or one inside it, whose state grows and cannot be given room; None when there is none."""
    if isinstance(mixer, AttentionConfig):
        return None
    if isinstance(mixer, RetrievalConfig):
        return without_room(mixer.base)
    if isinstance(mixer, HymbaConfig):
        # Token ids have room around a whole layer only.
        found = [branch if branch.reads_tokens else without_room(branch) for branch in mixer.branches().values()]
        return next((branch for branch in found if branch is not None), None)
    return mixer if grows(mixer) else None


def with_room(mixer: MixerConfig, state: LayerState, room: int) -> LayerState:
    """The state before the first token, with room for so many tokens where it would grow."""
    if isinstance(mixer, AttentionConfig):
        return attention_decoding.with_room(mixer, state, room)
    wide = dict(state)
    for path in mixer.nested:
        inner = getattr(mixer, path)
        own = state_under(state, path)
        if inner is not None and own is not None:
            wide |= {f"{path}.{name}": tensor for name, tensor in with_room(inner, own, room).items()}
    if isinstance(mixer, RetrievalConfig):
        chunk = state["chunk"]
        wide["chunk"] = chunk.new_zeros((chunk.shape[0], room // mixer.chunk, chunk.shape[2]))
    return wide


def attention_steps(step: Step) -> dict[str, AttentionStep]:
    """The attention steps in a layer's step, by the path before the names of their buffers."""
    return {path: inner for path, inner in innermost(step) if isinstance(inner, AttentionStep)}


def clear(step: Step, buffers: Buffers) -> None:
    """Go back to the state before the first token."""
    for tensor in buffers.values():
        tensor.zero_()
    for path, inner in attention_steps(step).items():
        inner.clear(buffers_under(buffers, path))


def load(step: Step, buffers: Buffers, state: LayerState, position: Tensor) -> int:
    """Copy a layer's state after `position` ``[B]`` tokens; return the columns that it takes of the room."""
    taken, inside = 0, set()
    for path, inner in attention_steps(step).items():
        own = buffers_under(buffers, path)
        inside |= {f"{path}.{name}" if path else name for name in own}
        inner.load(own, dict(buffers_under(state, path)), position)
        taken = max(taken, 0 if inner.goes_round(own) else inner.columns)
    for name, tensor in state.items():
        if name not in inside:
            # Only chunk vectors are fewer than there is room for.
            buffers[name][:, : tensor.shape[1]].copy_(tensor)
    return taken


def export(step: Step, buffers: Buffers, read: int, position: Tensor) -> LayerState:
    """A layer's state `read` tokens after `load`, recurrent states in float32; it may share the buffers' memory."""
    layer = {
        name: tensor.float() if name.endswith("recurrent") else tensor.contiguous() for name, tensor in buffers.items()
    }
    for path, inner in attention_steps(step).items():
        own = inner.export(buffers_under(buffers, path), read, position)
        layer |= {f"{path}.{name}" if path else name: tensor for name, tensor in own.items()}
    return layer
