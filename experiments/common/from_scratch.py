"""What the experiments that train models from nothing share: steps from a zero state, a time budget, the corpus."""

from __future__ import annotations

import argparse
import lzma
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.common.engine import Plan, Run, rate_factor, train
from experiments.common.mixture import END, FORM_FEED
from longrecall.models.recurrent_lm import RecurrentLM

Batch = tuple[Tensor, Tensor]
SETTLING, TIMED, RECENT, SAID = 30, 60, 5, 8
"""Steps before the clock of `budgeted` starts; steps that it times at once; how many such times count, are said."""


class FreshRun(Run):
    """A `Run` whose rows all start from the zero state, which is then not even passed in.

    `cuts`: numbers of pieces that rows may be cut into; each is a recording of its own, over the same buffers.
    `pieces` says which of them the next step takes.
    """

    def __init__(
        self, model: RecurrentLM, plan: Plan, steps: int, ids: Tensor, labels: Tensor, cuts: Sequence[int] = ()
    ) -> None:
        self.pieces = 1
        super().__init__(model, plan, steps, ids, labels)
        self._cut_steps: dict[int, Callable[[], None]] = {}
        for self.pieces in cuts:
            self._cut_steps[self.pieces] = self.captured.also(self._step)
        self.pieces = 1

    def advance(self, step: int) -> None:
        """Enqueue one training step over rows of which each is cut into `pieces`."""
        if self.pieces == 1:
            super().advance(step)
            return
        factor = rate_factor(step, self.steps, self.plan)
        self.captured.run(lambda: self.captured.set_rates(factor), work=self._cut_steps[self.pieces])

    def release(self) -> None:
        """Forget all recordings and their memory; the run cannot go on."""
        self.captured.release()
        self._cut_steps.clear()

    def _step(self) -> None:
        ids, labels = (tensor.view(len(tensor) * self.pieces, -1) for tensor in (self.ids, self.labels))
        with torch.autocast(self.device.type, dtype=torch.bfloat16, cache_enabled=False, enabled=self.on_gpu):
            out = self.model(ids, labels=labels, use_cache=False)
        self.loss.copy_(out.loss.detach())
        out.loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.clip, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def start(
    models: dict[str, Callable[[], RecurrentLM]],
    plans: dict[str, Plan],
    ids: Tensor,
    labels: Tensor,
    cuts: Sequence[int] = (),
) -> list[FreshRun]:
    """Record a training step of every model; one that cannot be built or recorded is reported and left out."""
    runs = []
    for name, make in models.items():
        began = time.time()
        try:
            runs.append(FreshRun(make(), plans[name], 1, ids, labels, cuts))
        except Exception as error:
            print(f"{name}: left out, {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        print(f"{name}: recorded in {time.time() - began:.1f} s, {memory():.1f} GiB taken so far", flush=True)
    return runs


def memory() -> float:
    """GiB of the GPU that all processes hold; 0 without one."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def budgeted(
    runs: list[Run],
    steps: int,
    seconds: float,
    next_batch: Callable[[int], Batch],
    on_step: Callable[[int], None] = lambda step: None,
) -> dict[str, Any]:
    """Train all runs for `steps` steps, or for as many as fit into `seconds`; schedules end with the last one.

    How many fit is estimated anew every `TIMED` steps from the speed of the last ones, as other programs on the same
    GPU come and go; the schedules follow. The first estimate falls into the warm-up of a `Plan`, whose rates do not
    depend on the number of steps. Returns the steps made, the seconds they took, the seconds of one of the last steps
    and ``plans``: [steps made, steps planned then].
    """
    ids, labels = runs[0].ids, runs[0].labels
    began, done, planned, step_seconds = time.time(), 0, steps, 0.0
    recent: deque[tuple[int, float]] = deque(maxlen=RECENT)
    plans: list[list[int]] = []
    set_steps(runs, planned)
    while done < planned:
        stop = min(planned, done + (TIMED if done else SETTLING))
        clock = time.time()
        train(runs, stop, next_batch, ids, labels, on_step, first=done)
        if done:
            recent.append((stop - done, time.time() - clock))
            step_seconds = sum(spent for _, spent in recent) / sum(made for made, _ in recent)
            planned = min(steps, stop + max(0, int((seconds - (time.time() - began)) / step_seconds)))
            set_steps(runs, planned)
            plans.append([stop, planned])
            if len(plans) % SAID == 1:
                print(f"{step_seconds * 1e3:.1f} ms a step: {stop} of {planned} steps", flush=True)
        done = stop
    return {"steps": done, "seconds": time.time() - began, "step_seconds": step_seconds, "plans": plans}


def trained(
    runs: list[FreshRun],
    args: argparse.Namespace,
    began: float,
    next_batch: Callable[[int], Batch],
    on_step: Callable[[int], None] = lambda step: None,
) -> dict[str, Any]:
    """Train within the `steps`, `seconds` and `until` of the command line; the models are left, their recordings not.

    `began`: when the command started, seconds of `time.time`. Returns what `budgeted` does, the memory that was taken
    and ``bytes``, those that each model has read.
    """
    print(f"{len(runs)} models ready after {time.time() - began:.0f} s", flush=True)
    seconds = min(args.seconds, args.until - (time.time() - began))
    done = budgeted(runs, args.steps, seconds, next_batch, on_step) | {"memory_gib": memory()}
    done["bytes"] = done["steps"] * runs[0].ids.numel()
    print(f"trained on {done['bytes'] / 1e6:.1f}M bytes each after {time.time() - began:.0f} s", flush=True)
    for run in runs:
        # Recordings hold the activations of a whole training step.
        run.release()
    return done


def set_steps(runs: list[Run], steps: int) -> None:
    """Let the learning rates of all runs reach zero after `steps` steps."""
    for run in runs:
        run.steps = steps


def tokens_of(path: Path, most: int) -> np.ndarray:
    """The first `most` bytes of a text (``.xz`` or plain) as tokens, int16 ``[T]``; form feeds are the end token."""
    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
        text = np.frombuffer(file.read(most), np.uint8).astype(np.int16)
    return np.where(text == FORM_FEED, END, text).astype(np.int16)


def crops(tokens: np.ndarray, g: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Random excerpts of `tokens`: int64 ``[rows, length]``."""
    at = g.integers(0, len(tokens) - length, size=(rows, 1))
    return tokens[at + np.arange(length)].astype(np.int64)


def moved(arrays: tuple[np.ndarray, np.ndarray], device: str) -> Batch:
    """ids and labels on `device`; the copies do not make the CPU wait."""
    tensors = [torch.from_numpy(array) for array in arrays]
    if device == "cuda":
        tensors = [tensor.pin_memory() for tensor in tensors]
    ids, labels = (tensor.to(device, non_blocking=True) for tensor in tensors)
    return ids, labels
