"""What each intervention on the initial state costs: training steps beside steps from the zero state, on the CPU.

    python benchmarks/initial_states.py --threads 1 --repeats 21 --out benchmarks/results/initial_states.json

The shipped base models, float32. A step is what a run does for one micro-batch: choose the initial state, forward,
loss, backward, show the final state, AdamW. The kinds run in turn (A B C ... A B C ...), so that a noisy machine hurts
all of them, and a ratio is the median over the turns of zero's time divided by the kind's: 0.95 means 5 % less
throughput. Absolute times of a shared CPU mean nothing and are not kept.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# See cpu_timing.py: a spinning thread holds up the one it waits for on a shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from cpu_timing import OtherPrograms, cpu_parser, recorded
from torch import Tensor

import longrecall
from longrecall.training.initial_states import make_initial_state
from longrecall.training.recipe_states import (
    AnyInitialState,
    FittedNoiseRecipe,
    LearnedRecipe,
    NoiseRecipe,
    StatePassingRecipe,
    TruncatedBpttRecipe,
    ZeroState,
)
from longrecall.training.segments import Segments, read_batch

ASSETS = Path(longrecall.__file__).parent / "assets"
MODELS = ("mamba2-base", "gla-base")
ROWS, LENGTH, SEED = 8, 256, 0


@dataclass(frozen=True)
class Case:
    """One kind of training; `starts`: the columns of every row where documents start, None = rows are one text."""

    name: str
    recipe: AnyInitialState
    starts: tuple[tuple[int, ...], ...] | None = None


GOES_ON = ((),) * ROWS
ONE_END = ((), (LENGTH // 2,)) * (ROWS // 2)
"""Every second row holds the end of a document: twelve pieces instead of eight rows."""

CASES = (
    Case("zero", ZeroState()),
    Case("noise", NoiseRecipe(std=0.1)),
    Case("fitted_noise", FittedNoiseRecipe()),
    Case("state_passing", StatePassingRecipe()),
    Case("state_passing, probability 0.5", StatePassingRecipe(probability=0.5)),
    Case("truncated_bptt, no document ends", TruncatedBpttRecipe(), GOES_ON),
    Case("truncated_bptt, a document ends in every second row", TruncatedBpttRecipe(), ONE_END),
    Case("learned, freeze false", LearnedRecipe(freeze=False)),
    Case("learned, freeze true", LearnedRecipe()),
)


class Runner:
    """One kind of training with a model, an intervention and an optimizer of its own."""

    def __init__(self, case: Case, checkpoint: Path) -> None:
        self.model = longrecall.load(checkpoint, dtype="float32").train()
        self.initial = make_initial_state(case.recipe, self.model, SEED, 0)
        self.segments = None if case.starts is None else Segments.of(case.starts, LENGTH)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        # Too small to change a weight: every kind goes on computing the same function.
        self.optimizer = torch.optim.AdamW(trained, lr=1e-30, weight_decay=0.0, fused=True)

    def step(self, tokens: Tensor) -> float:
        """Seconds of one training step."""
        text = torch.ones(ROWS, dtype=torch.bool)
        start = time.perf_counter()
        loss = read_batch(self.model, tokens, tokens, text, self.initial, self.segments)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def measure(name: str, repeats: int) -> list[dict[str, object]]:
    """Throughput of every kind relative to zero, from steps in turn; the first two turns warm up."""
    runners = [Runner(case, ASSETS / name) for case in CASES]
    generator = torch.Generator().manual_seed(SEED)
    times: list[list[float]] = [[] for _ in CASES]
    for turn in range(repeats + 2):
        tokens = torch.randint(0, 256, (ROWS, LENGTH), generator=generator)
        for place in range(len(runners)):
            # Each turn begins with another kind, so that none always follows the same neighbour.
            index = (place + turn) % len(runners)
            seconds = runners[index].step(tokens)
            if turn >= 2:
                times[index].append(seconds)
    rows: list[dict[str, object]] = []
    for case, own in zip(CASES, times, strict=True):
        ratios = sorted(zero / seconds for zero, seconds in zip(times[0], own, strict=True))
        rows.append(
            {
                "model": name,
                "kind": case.name,
                "throughput": statistics.median(ratios),
                "throughput_low": ratios[len(ratios) // 4],
                "throughput_high": ratios[-1 - len(ratios) // 4],
            }
        )
    return rows


def print_table(rows: list[dict[str, object]]) -> None:
    print(f"{'model':13}{'initial state':54}{'throughput':>11}   middle half")
    for row in rows:
        middle = f"{row['throughput_low']:.3f}-{row['throughput_high']:.3f}"
        print(f"{row['model']:13}{row['kind']:54}{row['throughput']:10.3f}x   {middle}")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = cpu_parser(__doc__, threads=1)
    parser.add_argument("--repeats", type=int, default=21, help="turns")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    others = OtherPrograms()
    rows = [row for name in options.models for row in measure(name, options.repeats)]
    print_table(rows)
    settings = {"batch": ROWS, "length": LENGTH, "seed": SEED, "repeats": options.repeats}
    return recorded(options, settings, rows, cores_busy_elsewhere=others.cores())


if __name__ == "__main__":
    main()
