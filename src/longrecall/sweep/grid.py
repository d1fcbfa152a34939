"""From a recipe to its runs: one for every cell, model, learning rate, weight decay and seed."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from longrecall.errors import UserError
from longrecall.models.accounting import account
from longrecall.sweep.mixers import label, sized
from longrecall.sweep.recipe import TRAIN, Settings, SweepRecipe, retrieval_layers
from longrecall.tasks.sequence_registry import create_sequence_task
from longrecall.tasks.sequences import SequenceTask

if TYPE_CHECKING:
    from longrecall.models.config import RecurrentConfig


@dataclass(frozen=True)
class ModelSpec:
    """One model of the grid, as the recipe says it; sizes are those at `hidden_size`."""

    mixer: str | Settings
    hidden_size: int
    layers: int
    retrieval: Settings | None = None
    mlp: str | int = 0
    tie_embeddings: bool = True

    @property
    def label(self) -> str:
        """The mixer's short name, with ``+R0`` where layer 0 has retrieval."""
        return label(self.mixer) + "".join(f"+R{index}" for index in retrieval_layers(self.retrieval))

    def description(self) -> dict[str, Any]:
        """Return the model's part of a row: ``mixer``, ``hidden_size``, ``layers``, ``retrieval``."""
        return {"mixer": label(self.mixer)} | {k: v for k, v in asdict(self).items() if k != "mixer"}

    def config(self, task: SequenceTask) -> RecurrentConfig:
        """Return the config for a task's vocabulary; UserError when these sizes cannot be."""
        from longrecall.models.config import RecurrentConfig

        length, chosen = task.sequence_length, retrieval_layers(self.retrieval)
        if any(index >= self.layers for index in chosen):
            raise UserError(f"there is no layer {max(chosen)} in a model of {self.layers}")
        mlp = sized({"mlp": self.mlp}, self.hidden_size, length)["mlp"]
        layers = []
        for index in range(self.layers):
            mixer = sized(self.mixer, self.hidden_size, length, index)
            if index in chosen and self.retrieval is not None:
                options = sized({k: v for k, v in self.retrieval.items() if k != "layer"}, self.hidden_size, length)
                mixer = {"type": "retrieval", "base": mixer, **options}
            layers.append({"mixer": mixer, "mlp_size": mlp})
        return RecurrentConfig(
            vocab_size=task.vocab_size,
            hidden_size=self.hidden_size,
            layers=layers,
            # A decoder has an output of its own: the encoder's head would be dead weight.
            tie_word_embeddings=self.tie_embeddings or task.readout == "last_state",
            context_length=length,
        )


@dataclass(frozen=True)
class RunSpec:
    """One training run: everything that decides its numbers."""

    task: str
    settings: Settings
    train: int
    test: int
    data_seed: int
    model: ModelSpec
    learning_rate: float
    weight_decay: float
    seed: int
    batch_size: int
    training: Settings
    """What all runs of the sweep share, as plain data."""

    @cached_property
    def key(self) -> str:
        """sha256 (hex) of the specification: a row with this key is this run's."""
        text = json.dumps(asdict(self), sort_keys=True, allow_nan=False, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def cell(self) -> tuple[str, str]:
        """Identity of task and data: runs of one cell share their examples."""
        return self.task, json.dumps([self.settings, self.train, self.test, self.data_seed], sort_keys=True)

    def create_task(self) -> SequenceTask:
        """Return the task with this run's settings."""
        return create_sequence_task(self.task, **self.settings)

    def row(self) -> dict[str, Any]:
        """Return the part of the row that is known before the run."""
        return {
            "key": self.key,
            "task": self.task,
            "settings": {**self.settings, TRAIN: self.train},
            "model": self.model.description(),
            "learning_rate": self.learning_rate,
            "weight_decay": self.weight_decay,
            "seed": self.seed,
            "batch_size": self.batch_size,
        }


def runs_of(recipe: SweepRecipe) -> list[RunSpec]:
    """Return every run of the recipe, cell by cell in its order; equal runs once.

    Raises:
        UserError: an unknown task, setting or mixer, settings that cannot be, or a mixer that cannot be built at any
            of the widths. A single combination that cannot be built is left to become a row that says so.
    """
    models = _models(recipe)
    training = asdict(recipe.training)
    for varied in ("learning_rates", "weight_decays", "seeds", "batch_size"):
        training.pop(varied)
    found: dict[str, RunSpec] = {}
    for task_recipe in recipe.tasks:
        for settings in task_recipe.all_cells():
            settings = dict(settings)
            train = settings.pop(TRAIN, recipe.data.train)
            if isinstance(train, bool) or not isinstance(train, int) or train < 1:
                raise UserError(f"{task_recipe.name}: train must be a whole number of at least 1, got {train!r}")
            task = _checked_task(task_recipe.name, settings)
            size = recipe.training.batch_size_at(task.sequence_length)
            for model, rate, decay, seed in itertools.product(models, *_lists(recipe)):
                spec = RunSpec(
                    task=task_recipe.name,
                    settings=settings,
                    train=train,
                    test=recipe.data.test,
                    data_seed=recipe.data.seed,
                    model=model,
                    learning_rate=rate,
                    weight_decay=decay,
                    seed=seed,
                    batch_size=size,
                    training=training,
                )
                found.setdefault(spec.key, spec)
    _check_models(models, next(iter(found.values())).create_task())
    return list(found.values())


def _checked_task(name: str, settings: Mapping[str, Any]) -> SequenceTask:
    try:
        return create_sequence_task(name, **settings)
    except TypeError as error:  # a value of a type that the task does not compare with numbers
        raise UserError(f"{name}: the settings {dict(settings)} cannot be used: {error}") from None


def _models(recipe: SweepRecipe) -> list[ModelSpec]:
    models = recipe.models
    return [
        ModelSpec(mixer, width, depth, retrieval, models.mlp, models.tie_embeddings)
        for mixer in models.mixers
        for retrieval in models.retrieval
        for depth in models.layers
        for width in models.hidden_sizes
    ]


def _lists(recipe: SweepRecipe) -> tuple[tuple[float, ...], tuple[float, ...], tuple[int, ...]]:
    return recipe.training.learning_rates, recipe.training.weight_decays, recipe.training.seeds


def _check_models(models: Sequence[ModelSpec], task: SequenceTask) -> None:
    """Refuse a kind of model of which no size can be built: a mistake in the recipe."""
    errors: dict[str, UserError | None] = {}
    for model in models:
        if model.label in errors and errors[model.label] is None:
            continue
        try:
            model.config(task)
            errors[model.label] = None
        except UserError as error:
            errors.setdefault(model.label, error)
    for kind, reason in errors.items():
        if reason is not None:
            raise UserError(f"models: {kind} cannot be built at any width: {reason}")


def shard(runs: Sequence[RunSpec], index: int, count: int) -> list[RunSpec]:
    """Return the runs of shard `index` (1-based) of `count`: every count-th, so that each has long and short ones."""
    return list(runs[index - 1 :: count])


def parse_shard(text: str) -> tuple[int, int]:
    """Return (index, count) of ``2/4``; raises UserError for anything that is no shard."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise UserError(f'--shard "{text}" is no shard; write i/n with 1 <= i <= n, e.g. 1/4')
    return int(index), int(count)


def sizes(spec: RunSpec) -> tuple[int, int]:
    """Return (parameters, numbers in the recurrent state) of a run's model, decoder included.

    Raises UserError when it cannot be built.
    """
    task = spec.create_task()
    from longrecall.sweep.predictor import decoder_parameters

    counted = account(spec.model.config(task))
    decoder = decoder_parameters(spec.model.hidden_size, task.vocab_size) if task.readout == "last_state" else 0
    return counted.parameters + decoder, counted.state_size


def steps_of(spec: RunSpec) -> int:
    """Return the optimizer steps of a run that is not stopped early; the last batch of an epoch may be smaller."""
    return int(spec.training["epochs"]) * math.ceil(spec.train / spec.batch_size)
