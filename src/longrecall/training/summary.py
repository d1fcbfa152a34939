"""What a run will do, from the recipe and the config alone, and what it did."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longrecall.models.checkpoint import Checkpoint
from longrecall.training.data import BatchStream
from longrecall.training.initial_states import learned_shapes
from longrecall.training.optimizer import ParameterGroup, parameter_groups, touched_names, trained_names
from longrecall.training.parallel.place import replicas
from longrecall.training.recipe import Recipe
from longrecall.training.recipe_states import LearnedRecipe

BUFFERS = (".progress", ".correction_bias")
"""Ends of names in a checkpoint that no optimizer sees: where a handover stands, what balances the load of experts."""


@dataclass(frozen=True)
class GroupSummary:
    """Parameters with one learning rate and weight decay."""

    name: str
    tensors: int
    parameters: int
    learning_rate: float
    weight_decay: float


@dataclass(frozen=True)
class TrainingSummary:
    """What a run did, or with `dry_run` would do."""

    output: str
    checkpoint: str
    """The trained checkpoint (of a dry run: where it would go)."""
    dry_run: bool
    steps: int
    tokens: int
    processes: int
    """All of them: those that share the rows of a batch too."""
    mesh: dict[str, int]
    """How the processes share the work: `replicate`, `shard`, `context`; their product is `processes`."""
    groups: tuple[GroupSummary, ...]
    frozen: GroupSummary | None
    """What is not trained, with rate and decay 0; None = nothing."""
    batch_shapes: dict[str, tuple[int, ...]]
    labels_in_batch: int
    """Positions of the first batch that have a loss."""
    resumed_from: int = 0
    """Steps that an earlier run had done already."""
    first_loss: float | None = None
    last_loss: float | None = None
    seconds: float = 0.0
    initial_state: str | None = None
    """The file of a learned initial state."""
    evaluation: str | None = None
    """What is measured while the model trains, in words."""
    leash: str | None = None
    """What keeps the model close to a teacher, in words."""
    best: dict[str, Any] | None = None
    """The best value so far of the metric that the evaluation goes by: `metric`, `value`, `step`."""
    stopped_early: bool = False
    """The evaluation has ended the run after `steps`."""
    why_eager: str | None = None
    """Why steps on a GPU were launched one by one, in words; None = they were recorded, or there was no GPU."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def table(self) -> str:
        """Lines for people."""
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in self.batch_shapes.items())
        mesh = ": " + " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        lines = [
            f"steps            {self.steps:,} on "
            + (f"{self.processes} processes{mesh}" if self.processes > 1 else "1 process"),
            f"tokens           {self.tokens:,}",
            f"first batch      {shapes}; {self.labels_in_batch:,} labels",
            f"output           {self.checkpoint}",
            *([f"initial state    {self.initial_state}"] if self.initial_state else []),
            *([f"evaluation       {self.evaluation}"] if self.evaluation else []),
            *([f"leash            {self.leash}"] if self.leash else []),
            *([f"recorded steps   none: {self.why_eager}"] if self.why_eager else []),
            "",
        ]
        groups = [*self.groups, *([self.frozen] if self.frozen else [])]
        width = max(20, 2 + max(len(group.name) for group in groups))
        lines.append(f"{'parameters':<{width}}{'tensors':>8}{'numbers':>14}{'peak rate':>12}{'decay':>8}")
        lines += [
            f"{group.name:<{width}}{group.tensors:>8}{group.parameters:>14,}{group.learning_rate:>12.3g}"
            f"{group.weight_decay:>8g}"
            for group in groups
        ]
        if self.last_loss is not None:
            # A run of no more steps than a line of the log stands for has one mean: nothing to compare.
            one = self.first_loss == self.last_loss
            change = (
                f"{self.last_loss:.4f}, the mean of the steps,"
                if one
                else f"{self.first_loss:.4f} -> {self.last_loss:.4f}"
            )
            lines += ["", f"loss {change} in {self.seconds:.0f} s"]
        if self.best is not None:
            end = f"; stopped early after step {self.steps:,}" if self.stopped_early else ""
            lines.append("best {metric} {value:.4f} at step {step:,}".format(**self.best) + end)
        return "\n".join(lines)


def plan(
    recipe: Recipe, source: Checkpoint, processes: int, stream: BatchStream, final: Path, *, dry_run: bool
) -> TrainingSummary:
    """Return what a run of so many processes would do.

    It draws the first batch of `stream`, puts it back, and reads no weights.

    Raises:
        UserError: the recipe's mesh is for another number of processes; a pattern that matches no parameter.
    """
    mesh = recipe.parallel
    copies = replicas(mesh, processes)
    readers = copies * mesh.shard
    shapes = trained_shapes(recipe, source)
    groups = recipe_groups(recipe, source, list(shapes))
    every = parameter_shapes(source)
    still = tuple(name for name in every if name not in shapes)
    before = stream.position()
    batch = stream.next_batch()
    stream.restore(before)
    steps = recipe.steps(readers)
    return TrainingSummary(
        output=recipe.run.output,
        checkpoint=str(final),
        dry_run=dry_run,
        steps=steps,
        tokens=steps * recipe.tokens_per_step(readers),
        processes=processes,
        mesh={"replicate": copies, "shard": mesh.shard, "context": mesh.context},
        groups=tuple(_group(group, shapes) for group in groups),
        frozen=_group(ParameterGroup("frozen", still, 0.0, 0.0), every) if still else None,
        batch_shapes={name: tuple(batch[name].shape) for name in ("input_ids", "labels")},
        labels_in_batch=int((batch["labels"][:, 1:] != -100).sum()),
        leash=None if recipe.leash is None else recipe.leash.in_words(),
    )


def trained_shapes(recipe: Recipe, source: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every parameter that the run changes, from the config alone."""
    shapes = parameter_shapes(source)
    if isinstance(recipe.initial_state, LearnedRecipe):
        learned = learned_shapes(recipe.initial_state, source.config)
        shapes = learned if recipe.initial_state.freeze else shapes | learned
    return {name: shapes[name] for name in trained_names(list(shapes), recipe.optimizer)}


def parameter_shapes(source: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every parameter of the model, from the config alone."""
    return {name: shape for name, shape in source.config.tensor_shapes().items() if not name.endswith(BUFFERS)}


def recipe_groups(recipe: Recipe, source: Checkpoint, names: list[str]) -> tuple[ParameterGroup, ...]:
    """Return the parameter groups of the recipe for these names."""
    rate = recipe.initial_state.learning_rate if isinstance(recipe.initial_state, LearnedRecipe) else 0.0
    return parameter_groups(names, touched_names(source.surgery), recipe.optimizer, rate)


def _group(group: ParameterGroup, shapes: dict[str, tuple[int, ...]]) -> GroupSummary:
    numbers = sum(math.prod(shapes[name]) for name in group.names)
    return GroupSummary(group.name, len(group.names), numbers, group.learning_rate, group.weight_decay)
