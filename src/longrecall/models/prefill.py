"""Reading a long prompt in captured segments: one CUDA graph for so many tokens, replayed until the prompt is read.

A forward pass of a few thousand tokens is hundreds of short launches, which a GPU ends sooner than Python sends them.
With a state of fixed shape a segment is the same work every time, as a decoding step is (models/decoding.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState

SEGMENT = 4096
"""Tokens of a captured segment."""

MOST_ROWS = 4
"""Larger batches keep the GPU busy by themselves."""


class CapturedSegment:
    """`SEGMENT` tokens of every row from a state: the next state and the logits of the last token."""

    def __init__(self, model: RecurrentLM, batch: int, length: int = SEGMENT) -> None:
        self.model, self.length = model, length
        self.ids = torch.zeros(batch, length, dtype=torch.long, device=model.device)
        self.state = model.zero_state(batch)
        self.logits = torch.zeros(0, device=model.device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def _run(self) -> Tensor:
        out = self.model(self.ids, past_key_values=self.state, use_cache=True, logits_to_keep=1)
        for buffers, after in zip(self.state.layers, out.past_key_values.layers, strict=True):
            for name, tensor in after.items():
                buffers[name].copy_(tensor)
        self.state.position.add_(self.length)
        logits: Tensor = out.logits[:, -1]
        return logits

    def capture(self) -> None:
        """Record the work of a segment; the state is unspecified afterwards."""
        stream = torch.cuda.Stream(self.model.device)
        stream.wait_stream(torch.cuda.current_stream(self.model.device))
        with torch.cuda.stream(stream):
            self._run()
        torch.cuda.current_stream(self.model.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.logits = self._run()
        self.graph = graph

    def load(self, state: RecurrentState) -> None:
        """Copy a state of this batch size into the buffers."""
        for buffers, layer in zip(self.state.layers, state.layers, strict=True):
            for name, tensor in layer.items():
                buffers[name].copy_(tensor)
        self.state.position.copy_(state.position)

    def __call__(self, ids: Tensor) -> Tensor:
        """Read ids ``[B, length]``; logits ``[B, vocab]`` of the last one, overwritten by the next call."""
        self.ids.copy_(ids)
        if self.graph is None:
            self.logits = self._run()
        else:
            self.graph.replay()
        return self.logits


def why_no_segments(ids: Tensor, mask: Tensor | None) -> str | None:
    """Return why this prompt ``[B, T]`` is read by a plain forward pass; None when segments are worth it."""
    if ids.shape[0] > MOST_ROWS:
        return f"more than {MOST_ROWS} rows"
    if ids.shape[1] < SEGMENT:
        return f"shorter than {SEGMENT} tokens"
    if mask is not None and not bool(mask.all()):
        return "padded"
    return None


@torch.no_grad()
def read_prompt(
    model: RecurrentLM, segment: CapturedSegment, ids: Tensor, state: RecurrentState | None
) -> tuple[Tensor, RecurrentState]:
    """Read ids ``[B, T]`` from `state` (None = zeros): logits ``[B, vocab]`` of the last token, and the new state."""
    before = model.zero_state(ids.shape[0]) if state is None else state
    segment.load(before)
    whole = ids.shape[1] // segment.length
    for index in range(whole):
        logits = segment(ids[:, index * segment.length : (index + 1) * segment.length])
    read = RecurrentState(
        segment.state.map(Tensor.clone).layers,
        segment.state.position.clone(),
        before.length + whole * segment.length,
    )
    rest = ids[:, whole * segment.length :]
    if rest.shape[1] == 0:
        return logits.clone(), read
    out = model(rest, past_key_values=read, use_cache=True, logits_to_keep=1)
    return out.logits[:, -1], out.past_key_values
