"""Training steps of the small models of `recipes/sweeps/mqar_table11.yaml` on one GPU, with their kernels and without.

    python benchmarks/gpu_sweep_steps.py --out benchmarks/results/gpu_sweep_steps.json

A step is what a sweep repeats: forward, loss, backward and AdamW, recorded as a CUDA graph, float32 with products in
tf32. "torch_ms" are the same models with the ops of `SWITCHED` left to plain torch; all else (recurrences, norms) is
the same. Every case builds in a process of its own, all at once, since most of that is compiling; then they measure one
after the other, alone on the GPU: the median of `--rounds` rounds of `STEPS` steps. `apart` is the largest relative
difference of the two ways' losses in the first `STEPS` steps: rounding, and what training makes of it.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import multiprocessing

from longrecall.ops.backends import Op
from longrecall.sweep.examples import draw_examples
from longrecall.sweep.grid import RunSpec, runs_of
from longrecall.sweep.recipe import SweepRecipe
from longrecall.sweep.training import ModelRun

sys.path.insert(0, str(Path(__file__).parent))
from gpu_timing import Rows

RECIPE = Path(__file__).parent.parent / "recipes" / "sweeps" / "mqar_table11.yaml"
MIXERS = ("base_conv", "h3", "hyena", "rwkv5", "mamba", "mamba2")
SIZES = ((512, 256), (128, 64))
"""Length and width; the recipe's batch is 128 and 512."""

SWITCHED = frozenset(
    {
        "depthwise_convolution", "gated_convolution", "long_convolution", "diagonal_taps", "head_products",
        "mix_with_previous", "gated_group_norm", "add_bonus", "look_up", "column_sums",
        "stepped_values",
    }
)  # fmt: skip
"""Ops of small models as `ops/backends.py` knows them."""

STEPS = 20


def spec_of(mixer: str, length: int, width: int) -> RunSpec:
    """The run of the recipe at that size, without retrieval, that does not evaluate or end while it is timed."""
    settings = f"{{vocab_size: 8192, length: {length}, pairs: {length // 16}}}"
    overrides = [
        f"tasks=[{{name: mqar, settings: {settings}}}]",
        f"models.mixers=[{mixer}]",
        f"models.hidden_sizes=[{width}]",
        "models.retrieval=[null]",
        "training.learning_rates=[0.001]",
    ]
    (spec,) = runs_of(SweepRecipe.load(RECIPE, overrides))
    training = {**spec.training, "stop_at": None, "epochs": 10_000, "evaluate_every": 10**9}
    return replace(spec, training=training, train=5 * spec.batch_size, test=2)


@contextmanager
def left_to_torch(ops: frozenset[str]) -> Iterator[None]:
    """Calls that may choose take plain torch for these ops; a step recorded inside keeps that."""
    right = Op.on_kernels

    def on_kernels(op: Op, inputs: dict[str, Any], backend: str | None = None, **options: Any) -> bool:
        return op.name not in ops and right(op, inputs, backend, **options)

    with mock.patch.object(Op, "on_kernels", on_kernels):
        yield


def recorded(spec: RunSpec, ops: frozenset[str]) -> ModelRun:
    """A run whose step has been recorded on the GPU, with these ops left to torch."""
    device = torch.device("cuda")
    with left_to_torch(ops):
        return ModelRun(spec, draw_examples(spec, "train", device), draw_examples(spec, "test", device), device)


def losses(run: ModelRun, steps: Iterator[bool]) -> list[float]:
    """The losses of the next `STEPS` steps, nats per label."""
    found, before = [], 0.0
    for _ in range(STEPS):
        next(steps)
        torch.cuda.synchronize()
        total = float(run._loss)
        found.append(total - before)
        before = total
    return found


def milliseconds(steps: Iterator[bool], rounds: int) -> float:
    """Median milliseconds of a step over rounds of `STEPS` steps; the losses before have warmed them up."""
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            next(steps)
        torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - start) / STEPS)
    return statistics.median(found)


def case(mixer: str, length: int, width: int, rounds: int, alone: Callable[[], Any], answers: Any) -> None:
    """Build both ways, wait for `alone` (a lock once all are built), measure, and put the row into `answers`."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    name, values = f"{mixer} L{length} d{width}", {}
    try:
        spec = spec_of(mixer, length, width)
        runs = {"ms": recorded(spec, frozenset()), "torch_ms": recorded(spec, SWITCHED)}
        with alone():
            steps = {way: run.work() for way, run in runs.items()}
            seen = {way: losses(run, steps[way]) for way, run in runs.items()}
            values = {"batch": spec.batch_size, **{way: milliseconds(steps[way], rounds) for way in runs}}
        values["times"] = values["torch_ms"] / values["ms"]
        values["apart"] = max(abs(a - b) / abs(b) for a, b in zip(seen["ms"], seen["torch_ms"], strict=True))
    except Exception as error:
        values = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
    answers.put((name, values))


class Turns:
    """Lets a process measure alone, once `count` of them have built theirs or `patience` seconds are over."""

    def __init__(self, context: Any, count: int, patience: float) -> None:
        self.built, self.lock, self.count = context.Value("i", 0), context.Lock(), count
        self.latest = time.time() + patience

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.built.get_lock():
            self.built.value += 1
        while self.built.value < self.count and time.time() < self.latest:
            time.sleep(0.02)
        with self.lock:
            yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", nargs="+", default=list(MIXERS), choices=MIXERS)
    parser.add_argument("--rounds", type=int, default=5, help="of 20 steps each [%(default)s]")
    parser.add_argument("--seconds", type=float, default=90, help="after these, cases that are not done are ended [90]")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    start, rows = time.time(), Rows("gpu_sweep_steps", args.out)
    names = [(mixer, *size) for size in SIZES for mixer in args.mixers]
    context = multiprocessing.get_context("spawn")
    answers, turns = context.Queue(), Turns(context, len(names), 0.65 * args.seconds)
    children = [context.Process(target=case, args=(*name, args.rounds, turns, answers), daemon=True) for name in names]
    for child in children:
        child.start()
    for _ in children:
        left = start + args.seconds - time.time()
        try:
            name, values = answers.get(timeout=max(0.01, left))
        except queue.Empty:
            break
        rows.add(name, **values)
    for child in children:
        child.kill()


if __name__ == "__main__":
    main()
