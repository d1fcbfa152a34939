"""Choosing the next token inside a CUDA graph, so that decoding never waits for the host.

transformers' processors are dozens of short launches a token: a busy host sends them more slowly than a GPU decodes.
Those that look at the scores alone are captured once, with the choice itself and the step that reads what was chosen.
A token is then one launch. Whether all rows have ended is read from a copy that has long arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as processors

from longrecall.inference.step import DecodingStep
from longrecall.layers.recording import record, recording_stream

SERVED = (
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.MinPLogitsWarper,
    processors.TypicalLogitsWarper,
    processors.EpsilonLogitsWarper,
)
"""Processors that look at the scores of this token alone. Others, of penalties for instance, read all ids so far."""

CHECK_EVERY = 16
"""Tokens after which the end of all rows is looked for. It is acted upon as many tokens later, when it has arrived."""

ROOM = 256
"""Written tokens are kept in buffers of a multiple of so many columns, which serve later calls as well."""

KEPT = 4
"""Captured choices that a step keeps, those used last."""


def choice_key(logits_processor: Any, do_sample: bool, end: tuple[int, ...], pad: int) -> tuple[Hashable, ...] | None:
    """What a captured choice depends on; None where a processor is not served."""
    parts: list[Hashable] = [do_sample, end, pad]
    for one in logits_processor:
        settings = tuple(sorted(vars(one).items()))
        if type(one) not in SERVED or not all(isinstance(value, (bool, int, float)) for _, value in settings):
            return None
        parts.append((type(one), settings))
    return tuple(parts)


class CapturedChoice:
    """Chooses from `step.logits`, writes the ids to a buffer of its own, and has the step read them.

    The step's state is unspecified afterwards: a state is to be loaded after this and before `decode`.

    Args:
        step: captured.
        columns: tokens that can be written at most.
        pick: logits ``[B, vocab]`` -> the next ids ``[B]``, without anything that waits for the GPU.
        end: ids that end a row; none = rows do not end.
        pad: what follows in a row that has ended.
    """

    # Made in inference mode, the buffers could not be written outside of it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(
        self, step: DecodingStep, columns: int, pick: Callable[[Tensor], Tensor], end: tuple[int, ...], pad: int
    ) -> None:
        device = step.ids.device
        self._logits, self._pick, self._pad = step.logits, pick, pad
        self._end = torch.tensor(end, device=device) if end else None
        self.columns, self._written = columns, torch.zeros(step.batch, columns, dtype=torch.long, device=device)
        self._column = torch.zeros(1, dtype=torch.long, device=device)
        self._running = torch.ones(step.batch, dtype=torch.bool, device=device)
        # The runs before the recording read on: there must be room, also where the last text has filled it.
        step.clear()
        # They draw numbers, too, which nobody may notice.
        drawn = torch.cuda.get_rng_state(device)
        try:
            self._graph = record(lambda: self._choose(step), 2, recording_stream(device))
        finally:
            torch.cuda.set_rng_state(drawn, device)

    def _choose(self, step: DecodingStep) -> None:
        token = self._pick(self._logits)
        if self._end is not None:
            token = torch.where(self._running, token, self._pad)
            self._running.logical_and_(~torch.isin(token, self._end))
        self._written.index_copy_(1, self._column, token[:, None])
        self._column += 1
        step.ids.copy_(token)
        step.read_into_logits()

    @torch.no_grad()
    def decode(self, step: DecodingStep, logits: Tensor, new: int) -> Tensor:
        """Write at most `new` tokens for every row, from the prompt's last logits ``[B, vocab]`` on: ids ``[B, n]``.

        Once all rows have ended a few columns more may have been written.
        """
        self._logits.copy_(logits)
        self._column.zero_()
        self._running.fill_(True)
        looks: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        count = 0
        while count < new:
            self._graph.replay()
            step.count_one()
            count += 1
            if self._end is not None and count % CHECK_EVERY == 0:
                looks.append(self._look())
                if len(looks) > 1:
                    arrived, running = looks.popleft()
                    arrived.synchronize()
                    if not running:
                        break
        return self._written[:, :count].clone()

    def _look(self) -> tuple[torch.cuda.Event, Tensor]:
        """Whether any row is running, on its way to the host, and when it will have arrived."""
        running = torch.empty((), dtype=torch.bool, pin_memory=True)
        running.copy_(self._running.any(), non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(self._running.device))
        return arrived, running


def captured_choice(
    step: DecodingStep, key: tuple[Hashable, ...], new: int, pick: Callable[[Tensor], Tensor]
) -> CapturedChoice:
    """The step's choice for `key`, with room for `new` tokens: made on first use and kept for the next calls."""
    known: CapturedChoice | None = step.choices.pop(key, None)
    if known is None or known.columns < new:
        end, pad = key[1], key[2]
        known = CapturedChoice(step, -(-new // ROOM) * ROOM, pick, end, pad)  # type: ignore[arg-type]
    while len(step.choices) >= KEPT:
        step.choices.pop(next(iter(step.choices)))
    step.choices[key] = known
    return known
