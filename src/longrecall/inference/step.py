"""A decoding step of the whole model that owns its memory: captured once as a CUDA graph, then replayed for each token.

A recurrent state has a fixed shape, so the step of a given batch size is the same work on the same memory every time.
This is the one place where a state is written in place: the buffers belong to the step, states are copied in and out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from longrecall.inference.as_built import check_whole
from longrecall.inference.eligibility import why_not_fixed
from longrecall.inference.layer_step import LayerStep
from longrecall.layers.passed import EMBEDDED
from longrecall.layers.recording import record, recording_stream
from longrecall.layers.retrieval.step import form_tables
from longrecall.layers.stepping.step import Buffers, Progress, StepSettings
from longrecall.layers.stepping.stream import FEW_ROWS, FewRowsStream, FusedStream, Stream
from longrecall.layers.tokens import NO_TOKEN
from longrecall.models.recurrent_lm import RecurrentLayer, RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.ops.backends import why_no_kernels
from longrecall.ops.execution import prefetching


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
        check_whole(model, "a decoding step")
        # Not the model itself, which keeps its steps: they would keep it alive, and their memory with it.
        self.config, self.body, self.lm_head, self.batch = model.config, model.model, model.lm_head, batch
        self.logit_scale = model.logit_scale
        self.ids = torch.zeros(batch, dtype=torch.long, device=model.device)
        self.position = torch.zeros(batch, dtype=torch.long, device=model.device)
        self.logits = torch.zeros(0, device=model.device)
        self.room, self.columns = room, 0
        # Of the room: columns of caches; tokens of the context. Read since a state was loaded.
        self.taken, self.width, self.read = 0, 0, 0
        if not room and why_not_fixed(model) is not None:
            raise ValueError("a model with retrieval or attention layers needs room for its context; got none")
        looks_up, shape = model.config.reads_tokens(), (batch, room)
        self.tokens = torch.full(shape, NO_TOKEN, dtype=torch.int32, device=model.device) if looks_up else None
        self.fused = model.device.type == "cuda" and why_no_kernels() is None if fused is None else fused
        wide = state_dtype or torch.float32
        self.settings = StepSettings(batch, room, self.fused, model.dtype, wide, self.body.embeddings, self.tokens)
        self.steps = [LayerStep(cast(RecurrentLayer, layer), self.settings) for layer in model.model.layers]
        self.buffers = tuple(step.allocate() for step in self.steps)
        # Memory tokens come before every text.
        self.start = model.zero_state(batch) if model.config.memory_tokens else None
        self.clear()
        self._form_tables()
        self.graph: torch.cuda.CUDAGraph | None = None
        # Of inference/captured_choice.py: what was captured for these logits and ids.
        self.choices: dict[Any, Any] = {}

    def _form_tables(self) -> None:
        form_tables([table for step in self.steps for table in step.tables()])

    @torch.no_grad()
    def load(self, state: RecurrentState) -> None:
        """Copy a state of this batch size into the buffers; what is formed of weights beforehand is formed anew."""
        self._form_tables()
        self.columns, self.taken, self.width, self.read = state.length, 0, 0, 0
        if self.tokens is not None and state.context is not None:
            self.width = state.context.shape[1]
            if self.width > self.room:
                raise ValueError(f"the state's context has {self.width} tokens, the step room for {self.room}")
            self.tokens.fill_(NO_TOKEN)[:, : self.width] = state.context
        for step, buffers, layer in zip(self.steps, self.buffers, state.layers, strict=True):
            self.taken = max(self.taken, step.load(buffers, layer, state.position))
        self.position.copy_(state.position)

    def export(self) -> RecurrentState:
        """Return a copy of the buffers as a state, recurrent states in float32."""
        progress = Progress(self.read, self.width, self.position)
        layers = [step.export(buffers, progress) for step, buffers in zip(self.steps, self.buffers, strict=True)]
        state = RecurrentState(tuple(layers), self.position, self.columns)
        context = None if self.tokens is None else self.tokens[:, : self.width].clone()
        return RecurrentState(state.map(Tensor.clone).layers, self.position.clone(), self.columns, context)

    def clear(self) -> None:
        """Go back to the state before the first token; only that of memory tokens is read already."""
        self.position.zero_()
        if self.tokens is not None:
            self.tokens.fill_(NO_TOKEN)
        for step, buffers in zip(self.steps, self.buffers, strict=True):
            step.clear(buffers)
        if self.start is not None:
            for step, buffers, layer in zip(self.steps, self.buffers, self.start.layers, strict=True):
                step.load(buffers, layer, self.position)

    def __call__(self) -> Tensor:
        """Read `ids` ``[B]``, advance the buffers, return logits ``[B, vocab]``, overwritten by the next call.

        Raises:
            ValueError: no room for one more token of context.
        """
        self.count_one()
        if self.graph is None:
            self.logits = self._run()
        else:
            self.graph.replay()
        return self.logits

    def count_one(self) -> None:
        """Note on the host that one more token is read, by a call or by a graph that has the step in it.

        Raises:
            ValueError: as a call.
        """
        if self.room and max(self.taken, self.width) >= self.room:
            raise ValueError(f"the step has room for {self.room} tokens of context, all of them read")
        self.taken, self.width, self.read = self.taken + 1, self.width + 1, self.read + 1
        self.columns += 1

    def capture(self) -> None:
        """Record the step; the buffers are left as they were after construction (zeros)."""
        self.graph = record(self._keep_logits, 2, recording_stream(self.ids.device))
        self.clear()

    def _keep_logits(self) -> None:
        self.logits = self._run()

    def read_into_logits(self) -> None:
        """The work of a call, for a graph of somebody else: `logits` keep their memory."""
        self.logits.copy_(self._run())

    @torch.no_grad()
    def _run(self) -> Tensor:
        # A layer's state is written by one of its own kernels, with others before the next step; weights by none. What
        # `load` has written is safe after the first kernel of a step, an ordinary one: the embedding.
        with prefetching():
            return self._forward(self.ids, self.position, self.buffers)

    def _forward(self, ids: Tensor, position: Tensor, layers: Sequence[Buffers]) -> Tensor:
        """Ids and positions ``[rows]`` and those rows of the buffers -> logits ``[rows, vocab]``."""
        model = self.body
        embedded = model.embeddings(ids)
        if self.tokens is not None:
            self.tokens.scatter_(1, position[:, None], ids[:, None].int())
        x, dtype = model.stream_of(embedded), embedded.dtype
        kind = Stream if not self.fused else FewRowsStream if len(ids) <= FEW_ROWS else FusedStream
        stream = kind(x, dtype)
        if model.passes_on:
            # A copy: the stream itself is added to in place.
            stream.carried[EMBEDDED] = x.to(dtype, copy=True)[:, None]
        for step, buffers in zip(self.steps, layers, strict=True):
            step(stream, buffers, position)
        logits = self.logit_scale(stream.head(model.norm, self.lm_head))
        position += 1
        return logits
