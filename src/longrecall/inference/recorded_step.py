"""A decoding step on a CPU: the forward pass of one token, whose calls of torch are recorded and repeated.

It computes what a plain forward pass computes, to the last bit (inference/recorded_calls.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longrecall.inference.recorded_calls import NotRecordable, RecordedCalls
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState

PLAIN_FIRST = 8
"""Tokens that a step reads by plain forward passes before it records one, which takes as long as about 15 of them."""


class RecordedStep:
    """One token for every sequence of a batch: `load` a state, set `ids`, call it.

    The state must be of a fixed shape. A model whose calls cannot be recorded is read by plain forward passes.
    """

    # Made in inference mode, `ids` could not be written outside of it.
    @torch.inference_mode(False)
    def __init__(self, model: RecurrentLM, batch: int) -> None:
        # Not the model itself, which keeps its steps: they would keep it alive.
        self._pass = one_token(model)
        self.ids = torch.zeros(batch, dtype=torch.long, device=model.device)
        self.state: RecurrentState | None = None
        self.calls: RecordedCalls | None = None
        self.layout: list[tuple[Any, ...]] = []
        self.plain, self.why_plain = 0, ""
        self.repeating = False

    def load(self, state: RecurrentState) -> None:
        """Begin with a state of this batch size; what is formed of weights beforehand is formed anew."""
        self.state, self.repeating = state, False
        if self.calls is not None:
            self.calls.prepare()

    @torch.inference_mode()
    def __call__(self) -> Tensor:
        """Read `ids` ``[B]``, advance the state, return logits ``[B, vocab]``, overwritten by the next call."""
        if not self.repeating:
            logits = self._first()
            if logits is not None:
                return logits
        assert self.calls is not None
        self.calls.given.copy_(self.ids)
        return self.calls()

    def _first(self) -> Tensor | None:
        """The logits of a plain forward pass; None where from now on the recorded calls serve."""
        assert self.state is not None
        tensors = tensors_of(self.state)
        layout = _layout(tensors)
        if self.calls is None and self.plain >= PLAIN_FIRST and not self.why_plain:
            self._record(layout)
        # The state that a prompt leaves may lie otherwise in memory: then the first token is read by a plain pass.
        if self.calls is not None and layout == self.layout:
            for buffer, tensor in zip(self.calls.state, tensors, strict=True):
                buffer.copy_(tensor)
            self.state, self.repeating = None, True
            return None
        self.plain += 1
        logits, self.state = self._pass(self.ids, self.state)
        return logits

    def _record(self, layout: list[tuple[Any, ...]]) -> None:
        assert self.state is not None
        try:
            self.calls = recorded(self._pass, self.ids, self.state)
        except (NotRecordable, RuntimeError) as error:
            self.why_plain = str(error) or type(error).__name__
        self.layout = layout


TokenPass = Callable[[Tensor, RecurrentState], tuple[Tensor, RecurrentState]]
"""Ids ``[B]`` and a state to logits ``[B, vocab]`` and the state after them."""


def one_token(model: RecurrentLM) -> TokenPass:
    """The forward pass of one token, without the model itself."""
    body, lm_head, logit_scale = model.model, model.lm_head, model.logit_scale

    def read(ids: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        hidden, after, _, _ = body(body.embeddings(ids[:, None]), state, None, ids=ids[:, None])
        return logit_scale(lm_head(hidden))[:, -1], after

    return read


def recorded(read: TokenPass, ids: Tensor, state: RecurrentState) -> RecordedCalls:
    """The calls of a token after such a state, with the tensors of `tensors_of` as theirs.

    Raises:
        NotRecordable, RuntimeError: they cannot be recorded.
    """

    def function(ids: Tensor, *tensors: Tensor) -> list[Tensor]:
        logits, after = read(ids, state_of(list(tensors), state))
        return [logits, *tensors_of(after)]

    return RecordedCalls(function, ids, tensors_of(state))


def _layout(tensors: list[Tensor]) -> list[tuple[Any, ...]]:
    """What the calls that are made on such tensors depend on."""
    return [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]


def tensors_of(state: RecurrentState) -> list[Tensor]:
    """Every tensor of a state of fixed shape, the position first."""
    return [state.position, *(tensor for layer in state.layers for tensor in layer.values())]


def state_of(tensors: list[Tensor], like: RecurrentState) -> RecurrentState:
    """A state with the names of `like` of what `tensors_of` gave."""
    position, *rest = tensors
    left = iter(rest)
    layers = tuple({name: next(left) for name in layer} for layer in like.layers)
    return RecurrentState(layers, position, like.length)
