"""Reading a prompt in captured segments: a CUDA graph for so many tokens, replayed until the prompt is read.

A forward pass of a few thousand tokens is hundreds of short launches, which a GPU ends sooner than Python sends them.
With a state of fixed shape a segment is the same work every time, as a decoding step is (inference/step.py). What is
left of a prompt fills a part of a last segment; the other tokens there are padding, which no mixer's state notices.
Retrieval layers, whose state grows, write into a memory for the whole prompt (layers/retrieval/prompt_memory.py), and
attention layers into caches with room for it: there is a graph for every place in the prompt then.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from longrecall.inference.as_built import check_whole
from longrecall.layers.mixers.base import LayerState
from longrecall.layers.recording import record, recording_stream
from longrecall.layers.retrieval.module import Retrieval
from longrecall.layers.retrieval.prompt_memory import PromptMemory
from longrecall.models.recurrent_lm import RecurrentLayer, RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.ops.execution import columns_in_order, padding_at_the_end

LENGTHS = (512, 1024, 2048, 4096)
"""Tokens of segments. Fewer than the first take a GPU nearly as long, as it then waits for weights and launches."""

SEGMENT = LENGTHS[-1]
"""A prompt is read in segments of this length; what is left, in one of the shortest that holds it."""

EAGER_FIRST = 1
"""Rests that are read eagerly before segments are captured for them, which takes as long as a few eager passes."""


class Kind(NamedTuple):
    """What there is one graph for: so many tokens, the last of which are padding or not, from column `start` on."""

    length: int
    padded: bool
    start: int = 0
    """Of a model with caches; 0 for all others, which read the same way everywhere."""


class StateBlocks:
    """The tensors of a state in one block of memory for each shape and dtype, so that few launches copy all of them.

    `layers` are views of the blocks: written by `write` and `clear`, changed by nobody else.
    """

    def __init__(self, state: RecurrentState) -> None:
        self.places: dict[Any, list[tuple[int, str]]] = {}
        for index, layer in enumerate(state.layers):
            for name, tensor in layer.items():
                if _is_cache(layer, name):
                    continue
                self.places.setdefault((tensor.shape, tensor.dtype), []).append((index, name))
        self.blocks = {
            (shape, dtype): torch.zeros((len(places), *shape), dtype=dtype, device=state.position.device)
            for (shape, dtype), places in self.places.items()
        }
        self.position = torch.zeros_like(state.position)
        self.layers = self._views(self.blocks, len(state.layers))

    def _views(self, blocks: dict[Any, Tensor], count: int) -> tuple[LayerState, ...]:
        layers: tuple[LayerState, ...] = tuple({} for _ in range(count))
        for key, places in self.places.items():
            for (index, name), tensor in zip(places, blocks[key], strict=True):
                layers[index][name] = tensor
        return layers

    def clear(self) -> None:
        """Go back to the state before the first token."""
        for tensor in (*self.blocks.values(), self.position):
            tensor.zero_()

    def write(self, layers: tuple[LayerState, ...], position: Tensor) -> None:
        """Copy a state of the same shapes; its tensors may be those of `layers`."""
        for key, places in self.places.items():
            block = self.blocks[key]
            memory = block.untyped_storage().data_ptr()
            parts = [layers[index][name] for index, name in places]
            # What a mixer hands on as it was lies where it is to be written.
            parts = [part.clone() if part.untyped_storage().data_ptr() == memory else part for part in parts]
            torch.cat(parts, out=block.flatten(0, 1))
        self.position.copy_(position)

    def export(self, length: int) -> RecurrentState:
        """A copy as a state that has seen `length` columns."""
        copies = {key: block.clone() for key, block in self.blocks.items()}
        return RecurrentState(self._views(copies, len(self.layers)), self.position.clone(), length)


def _is_cache(layer: LayerState, name: str) -> bool:
    """Whether a tensor of a layer's state before the first token has a column for every token, with its position."""
    return layer[name].dim() > 1 and not layer[name].shape[1] and f"{name[: name.rfind('.') + 1]}position" in layer


class Caches:
    """The growing tensors of a state ``[B, S, ...]``, with room for so many columns; empty for a model without any."""

    def __init__(self, state: RecurrentState, room: int) -> None:
        self.layers: list[dict[str, Tensor]] = [
            {
                name: tensor.new_zeros((tensor.shape[0], room, *tensor.shape[2:]))
                for name, tensor in layer.items()
                if _is_cache(layer, name)
            }
            for layer in state.layers
        ]
        self.any = any(self.layers)

    def beside(self, layers: tuple[LayerState, ...], columns: int) -> tuple[LayerState, ...]:
        """Those states, and the first so many columns of the caches: views."""
        if not self.any:
            return layers
        views = ({name: tensor[:, :columns] for name, tensor in cache.items()} for cache in self.layers)
        return tuple({**layer, **cache} for layer, cache in zip(layers, views, strict=True))

    def write(self, layers: tuple[LayerState, ...], start: int, length: int) -> None:
        """Copy the columns from `start` on; what the last segment has too much there is for nobody to read."""
        for cache, layer in zip(self.layers, layers, strict=True):
            for name, tensor in cache.items():
                tensor[:, start : start + length].copy_(layer[name][:, start : start + length])


class CapturedSegments:
    """Segments of one batch size that read on and on into a state of their own, each captured on its first use.

    Off a GPU the same work runs eagerly. `lengths`: tokens of segments, ascending. `room`: tokens of the
    longest prompt, a multiple of the last, for a model with retrieval or attention layers, which reads from the first
    token on only. `pool`: memory that graphs of others use too, where no two of them run at the same time. `stream`:
    where to record; graphs that were recorded on one stream must not run at the same time.
    """

    # Made in inference mode, the state could not be written outside of it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(
        self,
        model: RecurrentLM,
        batch: int,
        lengths: tuple[int, ...] = LENGTHS,
        room: int = 0,
        pool: Any = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        check_whole(model, "reading in captured segments")
        # Not the model itself, which keeps its segments: they would keep it alive, and their memory with it.
        self.body, self.lm_head, self.device = model.model, model.lm_head, model.device
        self.logit_scale = model.logit_scale
        self.lengths, self.longest = lengths, lengths[-1]
        self.ids = {length: torch.zeros(batch, length, dtype=torch.long, device=model.device) for length in lengths}
        self.count = torch.ones(batch, dtype=torch.long, device=model.device)
        zero = model.zero_state(batch)
        self.state, self.caches = StateBlocks(zero), Caches(zero, room)
        self.seen: set[Kind] = set()
        layers = [cast(RecurrentLayer, layer) for layer in model.model.layers]
        self.retrieval = [cast(Retrieval, x.mixer) if x.mixer_config.reads_tokens else None for x in layers]
        looking = [layer for layer in self.retrieval if layer is not None]
        self.memory = PromptMemory(looking, batch, room) if looking else None
        self.room = room if self.memory is None else self.memory.capacity
        self.windows = [
            {f"{path}{inner}": size for path, part in layer.parts() for inner, size in part.windows().items()}
            for layer in model.config.layer_configs()
        ]
        self.logits = torch.zeros(0, device=model.device)
        self.hidden: dict[Kind, Tensor] = {}
        self.graphs: dict[Kind, torch.cuda.CUDAGraph] = {}
        self.pool, self.stream = pool, stream
        self.rests = 0

    @torch.no_grad()
    def _run(self, kind: Kind) -> None:
        ids, mask = self.ids[kind.length], None
        if kind.padded:
            mask = torch.arange(kind.length, device=ids.device) < self.count[:, None]
        before = RecurrentState(self.caches.beside(self.state.layers, kind.start), self.state.position)
        embed = self.body.embeddings
        context = None if self.memory is None else self.memory.segment(ids, before.position, embed)
        promise = columns_in_order() if self.caches.any else nullcontext()
        with promise, nullcontext() if mask is None else padding_at_the_end(mask):
            hidden, after, _, _ = self.body(embed(ids), before, mask, context=context)
        # Kept: its memory is not used for anything else then, until another segment is read.
        self.hidden[kind] = hidden
        last = hidden[:, -1] if mask is None else hidden.take_along_dim((self.count - 1)[:, None, None], 1)[:, 0]
        logits = self.logit_scale(self.lm_head(last))
        if self.logits.shape != logits.shape:
            with torch.inference_mode(False):
                self.logits = torch.empty_like(logits)
        self.logits.copy_(logits)
        self.state.write(after.layers, after.position)
        self.caches.write(after.layers, kind.start, kind.length)

    def _capture(self, kind: Kind) -> None:
        """Record a segment; the state is unspecified afterwards."""
        # Before the recording comes an eager run: the count of a longer segment would be out of range in it.
        self.count.fill_(1)
        # Segments run one after the other, and leave nothing in what they share.
        stream = recording_stream(self.device) if self.stream is None else self.stream
        self.graphs[kind] = record(lambda: self._run(kind), 1, stream, pool=self.pool)
        self.pool = self.graphs[kind].pool()

    def prepare_rows(self) -> None:
        """Capture what `read_rows` needs, for every length; the state is unspecified then."""
        if self.device.type == "cuda":
            # The longest first: the others fit into its memory.
            for length in reversed(self.lengths):
                self._capture(Kind(length, True))

    def prepare(self, columns: int) -> None:
        """Capture what a prompt of so many columns needs and has not been captured; the state is unspecified then."""
        if self.device.type == "cuda":
            for kind in dict.fromkeys(kind for kind, _ in self._pieces(columns)):
                # Far into a prompt a graph serves that one place: it is worth its while from the second time on.
                if kind not in self.graphs and (not kind.start or kind in self.seen):
                    self._capture(kind)
                self.seen.add(kind)

    def export(self, ids: Tensor, length: int) -> RecurrentState:
        """A copy of the state after the prompt ids ``[B, T]`` as one that has seen `length` columns."""
        state = self.state.export(length)
        if self.caches.any:
            state = replace(state, layers=self._with_caches(state, ids.shape[1]))
        if self.memory is None:
            return state
        layers = list(state.layers)
        for index, layer in enumerate(self.retrieval):
            if layer is not None:
                vectors = self.memory.layers[layer].vectors[:, : ids.shape[1] // layer.config.chunk]
                layers[index] = {**layers[index], "chunk": vectors.clone()}
        return replace(state, layers=tuple(layers), context=ids.int())

    def _with_caches(self, state: RecurrentState, columns: int) -> tuple[LayerState, ...]:
        """The layers' states with copies of their caches after so many columns, without what no window reaches."""
        layers = []
        for index, whole in enumerate(self.caches.beside(state.layers, columns)):
            layer, own = dict(whole), self.caches.layers[index]
            for name in own:
                path = name[: name.rfind(".") + 1]
                first = max(0, columns + 1 - self.windows[index][path]) if path in self.windows[index] else 0
                layer[name] = layer[name][:, first:].clone()
            layers.append(layer)
        return tuple(layers)

    def reads_rests(self) -> bool:
        """Whether rests have become common enough for segments of their own; to be asked once for each."""
        self.rests += 1
        return self.rests > EAGER_FIRST

    def _pieces(self, columns: int) -> list[tuple[Kind, int]]:
        """The segments of a prompt of so many columns, and how many of them each reads."""
        if self.from_the_start and columns > self.room:
            raise ValueError(f"the prompt has {columns} tokens, the segments room for {self.room}")
        whole, rest = divmod(columns, self.longest)
        pieces = [(Kind(self.longest, False), self.longest)] * whole
        if rest:
            length = next(length for length in self.lengths if length >= rest)
            pieces.append((Kind(length, length > rest), rest))
        if not self.caches.any:
            return pieces
        return [(kind._replace(start=i * self.longest), columns) for i, (kind, columns) in enumerate(pieces)]

    @property
    def from_the_start(self) -> bool:
        """Whether prompts are read from their first token on only."""
        return self.memory is not None or self.caches.any

    def read(self, ids: Tensor) -> Tensor:
        """Read ids ``[B, T]`` into `state`; the logits ``[B, vocab]`` of the last, overwritten by the next call."""
        start = 0
        while start < ids.shape[1]:
            start += self.read_piece(ids, start).shape[1]
        return self.logits

    @torch.no_grad()
    def read_rows(self, ids: Tensor, count: Tensor) -> Tensor:
        """Read ids ``[B, T]``, of each row the first `count` ``[B]`` (at least one), in one segment.

        T is a segment's length. Returns the logits ``[B, vocab]`` of every row's last token, overwritten by the next
        call. For models whose states have a fixed shape.
        """
        kind = Kind(ids.shape[1], True)
        self.ids[kind.length].copy_(ids, non_blocking=True)
        self.count.copy_(count, non_blocking=True)
        self._repeat(kind)
        return self.logits

    @torch.no_grad()
    def read_piece(self, ids: Tensor, start: int) -> Tensor:
        """Read on in ids ``[B, T]`` from column `start`, where a segment begins: its hidden states ``[B, S, d]``.

        The next call overwrites them.
        """
        kind, columns = self._pieces(ids.shape[1])[start // self.longest]
        self.ids[kind.length][:, :columns].copy_(ids[:, start : start + columns])
        self.count.fill_(columns)
        self._repeat(kind)
        return self.hidden[kind][:, :columns]

    def _repeat(self, kind: Kind) -> None:
        graph = self.graphs.get(kind)
        if graph is None:
            self._run(kind)
        else:
            graph.replay()
