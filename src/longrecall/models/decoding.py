"""A decoding step of the whole model that owns its memory: captured once as a CUDA graph, then replayed for each token.

A recurrent state has a fixed shape, so the step of a given batch size is the same work on the same memory every time.
This is the one place where a state is written in place: the buffers belong to the step, states are copied in and out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from longrecall.layers import decoding_room
from longrecall.layers.aside import HymbaStep
from longrecall.layers.attention_decoding import AttentionStep
from longrecall.layers.decoding import (
    FEW_ROWS,
    FewRowsStream,
    FusedStream,
    Step,
    Stream,
    fused_step,
    plain_step,
)
from longrecall.layers.decoding_room import grows, with_room, without_room
from longrecall.layers.mixers.attention import Attention
from longrecall.layers.mixers.base import LayerState, MixerConfig
from longrecall.layers.mixers.hymba import Hymba
from longrecall.layers.recording import record, recording_stream
from longrecall.layers.retrieval import Retrieval, RetrievalConfig
from longrecall.layers.retrieval_decoding import RetrievalStep, remember
from longrecall.layers.tokens import NO_TOKEN
from longrecall.models.as_built import why_not_as_built
from longrecall.models.captured_steps import kept
from longrecall.models.prefill import LENGTHS, CapturedSegments, read_prompt, why_no_segments
from longrecall.models.recurrent_lm import RecurrentLayer, RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.ops.ahead import reading_ahead
from longrecall.ops.kernels import backend as triton

LEAST_ROOM = 4096
"""Tokens of context that captured work on a growing state has room for at least; larger rooms are multiples of it."""

MOST_ROOM = 131072
"""Tokens of a prompt that is read in segments by a model with retrieval: their keys and values stay in memory."""


def why_no_graph(model: RecurrentLM) -> str | None:
    """Return why the model's decoding step cannot be captured, in plain words; None when it can."""
    if not model.decoding.graphs:
        return "model.decoding.graphs is off"
    if model.device.type != "cuda":
        return f"the model is on {model.device.type}; CUDA graphs need a GPU"
    if model.dtype == torch.float64:
        return "float64 weights are for reference only"
    if model.training:
        return "the model is in training mode"
    return why_not_as_built(model) or why_no_step(model)


def mixers_of(model: RecurrentLM) -> list[MixerConfig]:
    """What every layer's mixer was built from, without reading (and checking) the model's config again."""
    return [cast(RecurrentLayer, layer).mixer_config for layer in model.model.layers]


def why_no_step(model: RecurrentLM) -> str | None:
    """Return which layer's state grows and cannot be given room beforehand; None when there is none.

    The caches of attention can, and what retrieval keeps of a context whose largest length is known.
    """
    mixers = mixers_of(model)
    for described in dict.fromkeys(mixers):
        mixer = without_room(described)
        if mixer is not None:
            return f"layer {mixers.index(described)} ({mixer.type}) keeps a cache that grows with the context"
    return None


def why_not_fixed(model: RecurrentLM) -> str | None:
    """Return which layer has a state that grows with the context; None when none has."""
    mixers = mixers_of(model)
    for mixer in dict.fromkeys(mixers):
        if grows(mixer):
            return f"layer {mixers.index(mixer)} ({mixer.type}) keeps a cache that grows with the context"
    return None


def why_no_room(model: RecurrentLM, columns: int) -> str | None:
    """Return why a prompt of so many tokens is not read in segments; None where the state has or gets a fixed shape."""
    if why_not_fixed(model) is None:
        return None
    if columns > MOST_ROOM:
        return f"retrieval layers get room for {MOST_ROOM} tokens at most"
    mixers = mixers_of(model)
    for mixer in dict.fromkeys(mixers):
        index = mixers.index(mixer)
        if isinstance(mixer, RetrievalConfig):
            if LENGTHS[0] % mixer.chunk:
                return f"layer {index}: chunks of {mixer.chunk} tokens do not fill segments of {LENGTHS[0]}"
            mixer = mixer.base
        if grows(mixer):
            return f"layer {index} ({mixer.type}) keeps a cache that grows with the context"
    return None


def room_for(model: RecurrentLM, state: RecurrentState, more: int) -> int:
    """Tokens for which a step from this state on needs room, to read `more` of them; 0 where it needs none."""
    if why_not_fixed(model) is None:
        return 0
    return max(state.length, 0 if state.context is None else state.context.shape[1]) + more


class DecodingStep:
    """One token for every sequence of a batch: `load` a state, set `ids`, call it, read `logits`.

    Until `capture` the same work runs eagerly. `fused` layers run in Triton kernels; None = on a GPU. `room`: tokens
    of context, those yet to come included, for a model with retrieval or attention layers; others need none.
    """

    # Made in inference mode, the buffers could not be written outside of it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(
        self,
        model: RecurrentLM,
        batch: int,
        state_dtype: torch.dtype | None = None,
        fused: bool | None = None,
        room: int = 0,
    ) -> None:
        # Not the model itself, which keeps its steps: they would keep it alive, and their memory with it.
        self.config, self.body, self.lm_head, self.batch = model.config, model.model, model.lm_head, batch
        self.state_dtype = state_dtype or torch.float32
        self.ids = torch.zeros(batch, dtype=torch.long, device=model.device)
        self.position = torch.zeros(batch, dtype=torch.long, device=model.device)
        self.logits = torch.zeros(0, device=model.device)
        self.room, self.columns = room, 0
        # Of the room: columns of caches; tokens of the context. Read since a state was loaded.
        self.taken, self.width, self.read = 0, 0, 0
        if not room and why_not_fixed(model) is not None:
            raise ValueError("a model with retrieval or attention layers needs room for its context; got none")
        looks_up = model.config.reads_tokens()
        shape = (batch, room)
        self.tokens = torch.full(shape, NO_TOKEN, dtype=torch.int32, device=model.device) if looks_up else None
        layers = [layer.mixer for layer in model.config.layer_configs()]
        states = (mixer.zero_state(batch, model.device, model.dtype) for mixer in layers)
        self.buffers = tuple(
            self._buffers(with_room(mixer, state, room)) for mixer, state in zip(layers, states, strict=True)
        )
        fused = model.device.type == "cuda" and triton.unavailable() is None if fused is None else fused
        mixers = [cast(RecurrentLayer, layer).mixer for layer in model.model.layers]
        self.fused = fused
        self.steps = [self._step(mixer) for mixer in mixers]
        self._clear()
        remember(self.steps)
        self.graph: torch.cuda.CUDAGraph | None = None

    def _step(self, mixer: torch.nn.Module) -> Step:
        if isinstance(mixer, Retrieval):
            assert self.tokens is not None
            return RetrievalStep(mixer, self._step(mixer.base), self.tokens, self.body.embeddings, self.fused)
        if isinstance(mixer, Attention):
            return AttentionStep(mixer, self.fused)
        if isinstance(mixer, Hymba):
            return HymbaStep(mixer, {path: self._step(mixer.get_submodule(path)) for path in mixer.paths})
        return (fused_step(mixer) if self.fused else None) or plain_step(mixer)

    def _buffers(self, state: LayerState) -> dict[str, Tensor]:
        owned = {}
        for name, tensor in state.items():
            if name.endswith("recurrent"):
                owned[name] = torch.zeros_like(tensor, dtype=self.state_dtype)
            elif name.endswith("conv"):
                # Neighbouring channels side by side: a step reads every tap of all channels.
                owned[name] = torch.zeros_like(tensor.transpose(1, 2).contiguous()).transpose(1, 2)
            else:
                # Zeros of nobody else already: another copy would take the room of a cache twice.
                owned[name] = tensor.contiguous()
        return owned

    @torch.no_grad()
    def load(self, state: RecurrentState) -> None:
        """Copy a state of this batch size into the buffers; what is formed of weights beforehand is formed anew."""
        remember(self.steps)
        self.columns, self.taken, self.width, self.read = state.length, 0, 0, 0
        if self.tokens is not None and state.context is not None:
            self.width = state.context.shape[1]
            if self.width > self.room:
                raise ValueError(f"the state's context has {self.width} tokens, the step room for {self.room}")
            self.tokens.fill_(NO_TOKEN)[:, : self.width] = state.context
        for step, buffers, layer in zip(self.steps, self.buffers, state.layers, strict=True):
            self.taken = max(self.taken, decoding_room.load(step, buffers, layer, state.position))
        self.position.copy_(state.position)

    def export(self) -> RecurrentState:
        """Return a copy of the buffers as a state, recurrent states in float32."""
        layers = []
        for step, mixer, buffers in zip(self.steps, self.config.layer_configs(), self.buffers, strict=True):
            layer = decoding_room.export(step, buffers, self.read, self.position)
            if isinstance(mixer.mixer, RetrievalConfig):
                layer["chunk"] = layer["chunk"][:, : self.width // mixer.mixer.chunk]
            layers.append(layer)
        state = RecurrentState(tuple(layers), self.position, self.columns)
        context = None if self.tokens is None else self.tokens[:, : self.width].clone()
        return RecurrentState(state.map(Tensor.clone).layers, self.position.clone(), self.columns, context)

    def _clear(self) -> None:
        self.position.zero_()
        if self.tokens is not None:
            self.tokens.fill_(NO_TOKEN)
        for step, buffers in zip(self.steps, self.buffers, strict=True):
            decoding_room.clear(step, buffers)

    def __call__(self) -> Tensor:
        """Read `ids` ``[B]``, advance the buffers, return logits ``[B, vocab]``, overwritten by the next call.

        Raises:
            ValueError: no room for one more token of context.
        """
        if self.room and max(self.taken, self.width) >= self.room:
            raise ValueError(f"the step has room for {self.room} tokens of context, all of them read")
        self.taken, self.width, self.read = self.taken + 1, self.width + 1, self.read + 1
        if self.graph is None:
            self.logits = self._run()
        else:
            self.graph.replay()
        self.columns += 1
        return self.logits

    def capture(self) -> None:
        """Record the step; the buffers are left as they were after construction (zeros)."""
        self.graph = record(self._keep_logits, 2, recording_stream(self.ids.device))
        self._clear()

    def _keep_logits(self) -> None:
        self.logits = self._run()

    @torch.no_grad()
    def _run(self) -> Tensor:
        # A layer's state is written by one of its own kernels, with others before the next step; weights by none. What
        # `load` has written is safe after the first kernel of a step, an ordinary one: the embedding.
        with reading_ahead():
            return self._forward()

    def _forward(self) -> Tensor:
        model = self.body
        x = model.embeddings(self.ids)
        if self.tokens is not None:
            self.tokens.scatter_(1, self.position[:, None], self.ids[:, None].int())
        dtype = x.dtype
        if self.config.residual_in_fp32:
            x = x.float()
        kind = Stream if not self.fused else FewRowsStream if self.batch <= FEW_ROWS else FusedStream
        stream = kind(x, dtype)
        for module, step, buffers in zip(model.layers, self.steps, self.buffers, strict=True):
            layer = cast(RecurrentLayer, module)
            step(stream, layer.mixer_norm, buffers, self.position)
            if layer.mlp is not None and layer.mlp_norm is not None:
                stream.add_mlp(layer.mlp_norm, layer.mlp)
        logits: Tensor = self.lm_head(stream.normed(model.norm))
        self.position += 1
        return logits


def _room_for(tokens: int) -> int:
    """Room for so many tokens: few sizes, so that what was captured serves other contexts too, at most 1/4 too much."""
    unit = max(LEAST_ROOM, (1 << (tokens - 1).bit_length()) // 8)
    return -(-tokens // unit) * unit


Where = tuple[Any, ...] | None
"""`addresses` of the model, for who has just looked them up; None = look them up."""


def captured_step(model: RecurrentLM, batch: int, room: int = 0, where: Where = None) -> DecodingStep:
    """Return the model's captured step for this batch size, made on first use and kept for the next calls.

    `room`: the tokens that a context will have at most, for a model with retrieval or attention layers.
    """
    model.decoding.check()
    room = _room_for(room) if room else 0

    def make() -> DecodingStep:
        step = DecodingStep(model, batch, model.decoding.state_dtype, room=room)
        step.capture()
        return step

    key = ("step", batch, model.decoding.state_dtype, *([room] if room else []))
    return kept(model.captured_steps, model, key, make, where)


def captured_segments(model: RecurrentLM, batch: int, columns: int = 0, where: Where = None) -> CapturedSegments:
    """Return the model's segments for reading prompts of `batch` rows, each captured when it is first needed.

    `columns`: tokens of the prompt, for which a model with retrieval layers must have room; others need none.
    """
    room = 0 if why_not_fixed(model) is None else _room_for(columns)
    key = ("segments", batch, *([room] if room else []))
    return kept(model.captured_steps, model, key, lambda: CapturedSegments(model, batch, room=room), where)


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


Sampler = Callable[[Tensor, Tensor], Tensor]
"""ids read so far ``[B, n]``, logits ``[B, vocab]`` -> the next ids ``[B]``."""


@torch.no_grad()
def decode(
    step: DecodingStep,
    ids: Tensor,
    logits: Tensor,
    sample: Sampler,
    *,
    most: int,
    end: Tensor | None,
    pad: int,
    shown: Callable[[Tensor], None] | None = None,
    check_every: int = 16,
) -> Tensor:
    """Extend ids ``[B, n]`` to at most `most` columns; `logits` ``[B, vocab]`` are those of the last column.

    A row ends with a token of `end` and is filled up with `pad`. Whether all rows have ended is looked at every
    `check_every` tokens only, since that waits for the GPU; what was written too much is cut off. `shown` gets the new
    ids of every step (on the CPU), for streaming.
    """
    rows, start = ids.shape
    written = torch.empty(rows, most, dtype=ids.dtype, device=ids.device)
    written[:, :start] = ids
    running = torch.ones(rows, dtype=torch.bool, device=ids.device)
    column = start
    while column < most:
        token = sample(written[:, :column], logits)
        if end is not None:
            token = torch.where(running, token, pad)
            running = running & ~torch.isin(token, end)
        written[:, column] = token
        column += 1
        if shown is not None:
            shown(token.cpu())
        look = shown is not None or (column - start) % check_every == 0
        if end is not None and look and not bool(running.any()):
            break
        if column < most:
            step.ids.copy_(token)
            logits = step()
    if end is not None:
        ended = torch.isin(written[:, start:column], end).int()
        first = torch.where(ended.any(1), ended.argmax(1) + 1, column - start)
        column = start + int(first.max())
    return written[:, :column]
