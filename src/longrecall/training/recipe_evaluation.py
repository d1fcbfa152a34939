"""The section `evaluation` of a recipe: what is measured while a model trains, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from longrecall.errors import UserError, did_you_mean
from longrecall.tasks.registry import (
    ChoiceTask,
    GradedTask,
    PositionTask,
    QuestionTask,
    Task,
    TextMetricTask,
    declaration_of,
    task_class,
)
from longrecall.tasks.text import read_text
from longrecall.training.recipe_sources import SOURCES, AnySource
from longrecall.training.strict_yaml import Tagged, build
from longrecall.units import parse_length
from longrecall.value_rules import positive

HELD_OUT = "held_out"
"""How the names of the numbers of the held-out sequences begin: ``held_out.loss``, ``held_out.bits_per_byte``."""
LOWER_IS_BETTER = ("loss", "bits_per_byte", "perplexity")
"""Metrics of which less is better; of all others more is."""


def _read_options(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"it must be a mapping of the task's options to values, got {value!r}")
    return dict(value)


@dataclass(frozen=True)
class HeldOutRecipe:
    """Fixed sequences on which the loss is measured."""

    sources: tuple[Annotated[AnySource, Tagged(SOURCES)], ...]
    """Where they come from, as in data.sources: files that training does not read."""
    tokens: Annotated[int, parse_length] = 1 << 17
    """Tokens in all, rounded up to whole sequences."""
    context_length: Annotated[int, parse_length] | None = None
    """Tokens of a sequence; none = data.context_length."""
    batch_size: int | None = None
    """Sequences of one forward pass of one process; none = run.batch_size."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise UserError("sources is empty; name at least one")
        positive(self, "tokens")
        if self.batch_size is not None:
            positive(self, "batch_size")
        if self.context_length is not None and self.context_length < 2:
            raise UserError(f"context_length must be at least 2 tokens, got {self.context_length}")


@dataclass(frozen=True)
class TaskRecipe:
    """A recall task that is asked as `longrecall eval` asks it."""

    kind: str
    """Name of the task: phonebook, passkey, niah_single_1, ..."""
    lengths: tuple[Annotated[int, parse_length], ...] = ()
    """As for eval --lengths; none = data.context_length."""
    samples: int = 64
    """Answers per cell; for bits_per_byte, windows of text."""
    text: str | None = None
    """A text file for tasks that read one: what bits_per_byte predicts, the haystack of needles and stories."""
    options: Annotated[dict[str, Any], _read_options] = field(default_factory=dict)
    """Fields of the task's class, such as pairs or depths."""

    def __post_init__(self) -> None:
        positive(self, "samples")
        known = task_class(self.kind)
        if any(length < 1 for length in self.lengths):
            raise UserError(f"lengths must be above 0, got {list(self.lengths)}")
        unit = declaration_of(known).length_unit
        if not self.lengths and unit != "tokens":
            raise UserError(f"give lengths: {self.kind} counts them in {unit}")
        if self.text is not None and not declaration_of(known).text_option:
            raise UserError(f"{self.kind} reads no text; leave text out")
        if self.text is None and hasattr(known, "window_starts"):
            raise UserError(f"{self.kind} needs a text; give text: FILE")
        self._build(" " if self.text is not None else None)

    def make(self) -> Task:
        """Return the task with its options and its text; UserError for a text that cannot be read."""
        return self._build(None if self.text is None else read_text(self.text))

    def metrics(self) -> tuple[str, ...]:
        """Return the names of what is measured, the foremost first, such as ``passkey.accuracy``."""
        task = self._build(" " if self.text is not None else None)
        found: tuple[str, ...] = ("accuracy",)
        if isinstance(task, PositionTask):
            found = ("bits_per_byte", "perplexity")
        elif isinstance(task, QuestionTask):
            found += ("exact_match",)
            found += tuple(task.highest_grades) if isinstance(task, GradedTask) else ()
            found += task.text_metrics if isinstance(task, TextMetricTask) else ()
        elif not isinstance(task, ChoiceTask):
            own = getattr(task, "token_metric", None)
            found += ((own,) if own else ()) + (("capacity",) if declaration_of(task).capacity else ())
        return tuple(f"{self.kind}.{metric}" for metric in found)

    def _build(self, text: str | None) -> Task:
        given = dict(self.options)
        if text is not None:
            given[declaration_of(self.kind).text_option] = text
        task: Task = build(task_class(self.kind), given, "options")
        return task


@dataclass(frozen=True)
class StopRecipe:
    """When training ends early."""

    patience: int
    """Evaluations in a row that may bring no better metric."""
    minimum_change: float = 0.0
    """How much better than the last one that counted the metric must be to count; what is best does not ask for it."""

    def __post_init__(self) -> None:
        positive(self, "patience")
        if not self.minimum_change >= 0:
            raise UserError(f"minimum_change must be 0 or more, got {self.minimum_change}")


@dataclass(frozen=True)
class EvaluationRecipe:
    """Measurements during training. They change nothing of the training itself, except where it ends."""

    every: int
    """Steps between two of them; there is one after the last step too."""
    held_out: HeldOutRecipe | None = None
    """The loss on fixed sequences."""
    tasks: tuple[TaskRecipe, ...] = ()
    """Recall tasks."""
    at_start: bool = False
    """Measure the untrained model too."""
    seed: int = 0
    """Seed of the held-out sequences and of the samples of tasks."""
    metric: str | None = None
    """The metric of `stop` and `best`: held_out.loss, passkey.accuracy, ...; none = the first there is."""
    stop: StopRecipe | None = None
    """End training when the metric no longer improves."""
    best: bool = False
    """Keep the checkpoint with the best metric in the folder best."""

    def __post_init__(self) -> None:
        positive(self, "every")
        if self.seed < 0:
            raise UserError(f"seed must be 0 or more, got {self.seed}")
        if self.held_out is None and not self.tasks:
            raise UserError("nothing is measured; give held_out or tasks")
        kinds = [task.kind for task in self.tasks]
        for kind in kinds:
            if kinds.count(kind) > 1:
                raise UserError(
                    f"tasks: {kind} is listed {kinds.count(kind)} times; list it once, with all its lengths"
                )
        if self.metric is not None:
            known = self._known_metrics()
            if not any(self.metric == name or self.metric.startswith(f"{name}.") for name in known):
                hint = did_you_mean(self.metric, known)
                raise UserError(f'metric "{self.metric}" is not measured; there are {", ".join(known)}.{hint}')

    @property
    def chosen_metric(self) -> str:
        """What `stop` and `best` go by."""
        return self.metric or self._known_metrics()[0]

    @property
    def lower_is_better(self) -> bool:
        """Whether less of the chosen metric is better."""
        return any(part in LOWER_IS_BETTER for part in self.chosen_metric.split("."))

    def _known_metrics(self) -> list[str]:
        held_out = [f"{HELD_OUT}.loss", f"{HELD_OUT}.bits_per_byte"] if self.held_out is not None else []
        return held_out + [metric for task in self.tasks for metric in task.metrics()]
