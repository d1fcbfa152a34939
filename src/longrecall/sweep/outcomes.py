"""What the evaluations of a run found, on each set of test examples and on all of them together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from longrecall.sweep.recipe import METRICS
from longrecall.tasks.sequence_scores import macro_accuracy, mad_accuracy, token_accuracy, whole_accuracy

MOST_HISTORY = 32
"""Evaluations that a row keeps; of more, every second one is dropped until they fit."""

REACHED = 0.99
"""What `reached_at_step` means where a recipe sets no `stop_at`."""

Entry = tuple[int, float | None, float]
"""Step, mean training loss since the evaluation before (None where it was not finite), metric."""


def scores(answers: Tensor, targets: Tensor) -> dict[str, float]:
    """Return each of `METRICS` for answers and targets, int64 ``[N, M]`` each, -100 where nothing is asked.

    Where every row has as many labels as any other (MQAR), accuracy is also the mean over rows.
    """
    pair = answers.cpu().numpy(), targets.cpu().numpy()
    values = (token_accuracy(*pair), whole_accuracy(*pair), macro_accuracy(*pair), mad_accuracy(*pair))
    return dict(zip(METRICS, values, strict=True))


def mean_scores(found: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of every metric over sets of test examples."""
    return {metric: sum(one[metric] for one in found) / len(found) for metric in found[0]}


def thinned(history: list[Entry]) -> list[Entry]:
    """Return at most `MOST_HISTORY` entries, evenly spread; the last one always stays."""
    while len(history) > MOST_HISTORY:
        history = history[::-2][::-1]
    return history


@dataclass
class Outcome:
    """The evaluations on one set of test examples, or the means over several sets."""

    best: dict[str, float] = field(default_factory=dict)
    """The metrics at the evaluation at which the recipe's metric was highest."""
    best_step: int = 0
    reached_at: int | None = None
    history: list[Entry] = field(default_factory=list)

    def take(self, step: int, loss: float | None, found: dict[str, float], metric: str) -> None:
        """Add an evaluation; one after a loss that was not finite stands in the history alone."""
        self.history.append((step, loss, found[metric]))
        if loss is not None and (not self.best or found[metric] > self.best[metric]):
            self.best, self.best_step = found, step

    def row(self) -> dict[str, Any]:
        """Return its part of a row."""
        return {
            **{metric: self.best.get(metric, 0.0) for metric in METRICS},
            "best_step": self.best_step,
            "reached_at_step": self.reached_at,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Outcome:
        """Return what `dataclasses.asdict` made plain data of."""
        return cls(**{**data, "history": [tuple(entry) for entry in data["history"]]})


@dataclass
class Patience:
    """Whether the training loss still falls."""

    lowest: float | None = None
    waited: int = 0

    def spent(self, loss: float, reached: bool, patience: int, improvement: float) -> bool:
        """Take the loss of an evaluation; return whether it is the `patience`-th in a row that was not lower.

        Args:
            loss: the mean since the evaluation before.
            reached: whether the run has learned enough for the evaluations to count.
            patience: 0 = never.
            improvement: the share by which a loss is lower when it counts as such.
        """
        if self.lowest is None or loss < self.lowest * (1 - improvement):
            self.lowest, self.waited = loss, 0
            return False
        self.waited = self.waited + 1 if reached else 0
        return bool(patience) and self.waited >= patience


def no_outcome() -> dict[str, Any]:
    """Return the part of a row of a run that could not be trained."""
    return {**{metric: None for metric in METRICS}, "best_step": None, "reached_at_step": None}
