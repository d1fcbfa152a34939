"""One training step as a CUDA graph on a stream of its own, so that many small models share one GPU.

A model of half a million parameters is bound by kernel launches: alone it leaves a large GPU idle. A step that was
recorded once (forward, backward, clipping, AdamW) is replayed with one launch, and steps of several models overlap on
their streams. Without a GPU the same step runs eagerly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from longrecall.layers.recording import record

WARMUPS = 3
"""Eager passes before recording: libraries choose their kernels and allocate their workspaces in the first ones."""


def capturable_adamw(
    groups: Mapping[tuple[float, float], Sequence[nn.Parameter]],
    device: torch.device,
    betas: tuple[float, float] = (0.9, 0.95),
    epsilon: float = 1e-8,
) -> torch.optim.AdamW:
    """Return AdamW over `groups`, (peak learning rate, weight decay) -> parameters.

    The rates are tensors on `device`: a recorded step reads what `CapturedStep.set_rates` wrote last.
    """
    return torch.optim.AdamW(
        [
            {"params": list(parameters), "lr": torch.tensor(rate, device=device), "weight_decay": decay}
            for (rate, decay), parameters in groups.items()
        ],
        betas=betas,
        eps=epsilon,
        fused=True,
        capturable=device.type == "cuda",
    )


class CapturedStep:
    """A training step that reads and writes fixed buffers; recorded on a GPU, run as it is elsewhere.

    Args:
        work: the whole step, without arguments and without anything that waits for the GPU. Gradients must be set to
            None at its end.
        optimizer: from `capturable_adamw`; its rates of now are the peaks. Its state is zeroed after the recording,
            which runs `work` with learning rate zero.
        device: of all buffers.
        forget: called after the recording, to undo what `work` left in buffers of its own.
        generators: whose numbers `work` draws; each replay goes on where the one before stopped.
    """

    def __init__(
        self,
        work: Callable[[], None],
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        forget: Callable[[], None] | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self._work: Callable[[], None] | None = work
        self._optimizer, self._generators, self._forget = optimizer, generators, forget
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]
        self._pool: Any = None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream is not None:
            self._work = self._record_step(work)

    def _record_step(self, work: Callable[[], None]) -> Callable[[], None]:
        self.set_rates(0.0)
        recorded = self.record(work)
        with self.on_stream():
            for values in self._optimizer.state.values():
                for tensor in values.values():
                    tensor.zero_()
            if self._forget is not None:
                self._forget()
            torch.cuda.synchronize()
        return recorded

    def also(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return another form of the whole step, over other buffers, for `run`: recorded as the first one was.

        Before the first step alone: what the optimizer knows is zeroed again.
        """
        return work if self.stream is None else self._record_step(work)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return `work` in the form that is to be called inside `on_stream`: its recording, or itself without a GPU.

        Recordings of one step share their memory: what one leaves outside of fixed buffers, the next overwrites.
        """
        if self.stream is None:
            return work
        graph = record(work, WARMUPS, self.stream, pool=self._pool, generators=self._generators)
        self._pool = graph.pool()
        replay: Callable[[], None] = graph.replay
        return replay

    def set_rates(self, factor: float) -> None:
        """Set every learning rate to its peak times `factor`."""
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"].fill_(peak * factor)

    def on_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which this step's own work is enqueued."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def run(
        self,
        before: Callable[[], None],
        after: Callable[[], None] | None = None,
        work: Callable[[], None] | None = None,
    ) -> None:
        """Enqueue `before` (fill the buffers), the step and `after`; the stream first waits for the current one.

        `work`: a form of the step from `also`; None = the first one.
        """
        if self._work is None:
            raise RuntimeError("the step was released")
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with self.on_stream():
            before()
            (work or self._work)()
            if after is not None:
                after()

    def release(self) -> None:
        """Forget the recording, whose memory is then free for others; the step cannot run any more."""
        self._work = None
