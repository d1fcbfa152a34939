"""From a recipe to its runs: one for every cell, model, learning rate, weight decay and seed."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from longrecall.errors import UserError
from longrecall.layers.descriptions.block import LAYER, RMS
from longrecall.models.accounting import account
from longrecall.sweep.mixers import label, sized
from longrecall.sweep.recipe import ROWS, TRAIN, Settings, SweepRecipe, TaskRecipe, retrieval_layers
from longrecall.tasks.sequence_registry import create_sequence_task
from longrecall.tasks.sequences import SequenceTask

if TYPE_CHECKING:
    from longrecall.models.config import RecurrentConfig


ADDED_TO_MODELS: dict[str, Any] = {"norm": RMS, "second_norm": False, "final_norm": RMS}
ADDED_TO_TRAINING: dict[str, Any] = {"patience": 0, "patience_from": 0.0, "improvement": 0.01}
"""Later fields, left out of rows and keys at their defaults: earlier rows stay those of the same runs."""


@dataclass(frozen=True)
class ModelSpec:
    """One model of the grid, as the recipe says it; sizes are those at `hidden_size`."""

    mixer: str | Settings
    hidden_size: int
    layers: int
    retrieval: Settings | None = None
    mlp: str | int = 0
    tie_embeddings: bool = True
    norm: str = RMS
    second_norm: bool = False
    final_norm: str = RMS

    @property
    def label(self) -> str:
        """The mixer's short name, with ``+R0`` where layer 0 has retrieval."""
        return label(self.mixer) + "".join(f"+R{index}" for index in retrieval_layers(self.retrieval))

    def description(self) -> dict[str, Any]:
        """Return the model's part of a row: ``mixer``, ``hidden_size``, ``layers``, ``retrieval``."""
        return _without(asdict(self), ADDED_TO_MODELS) | {"mixer": label(self.mixer)}

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
            layers.append(self._layer(mixer, mlp))
        return RecurrentConfig(
            vocab_size=task.vocab_size,
            hidden_size=self.hidden_size,
            layers=layers,
            # A decoder has an output of its own: the encoder's head would be dead weight.
            tie_word_embeddings=self.tie_embeddings or task.readout == "last_state",
            context_length=length,
            final_norm=LAYER_NORM if self.final_norm == LAYER else None,
        )

    def _layer(self, mixer: Settings, mlp: int) -> Settings:
        if self.norm == RMS and not self.second_norm:
            return {"mixer": mixer, "mlp_size": mlp}
        norm = LAYER_NORM if self.norm == LAYER else {}
        blocks = [{"name": "mixer", "module": mixer, "norm": norm}]
        if mlp:
            blocks.append({"name": "mlp", "module": {"type": "mlp", "inner_size": mlp}, "norm": norm})
        elif self.second_norm:
            blocks.append({"name": "mlp", "module": {"type": "identity"}, "norm": norm})
        return {"blocks": blocks}


LAYER_NORM: dict[str, Any] = {"kind": LAYER, "bias": True}


@dataclass(frozen=True)
class Part:
    """One set of rows that a run is trained or tested on."""

    settings: Settings
    rows: int
    batch_size: int

    def row(self) -> dict[str, Any]:
        """Return what a row of a result file says of it."""
        return {**self.settings, ROWS: self.rows}


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
    pool: tuple[Part, ...] = ()
    """Sets that are trained on together, `train` rows in all; none = `train` rows of `settings`."""
    tests: tuple[Part, ...] = ()
    """Sets that are tested on, each by itself, `test` rows in all; none = `test` rows of `settings`."""

    @cached_property
    def key(self) -> str:
        """sha256 (hex) of the specification: a row with this key is this run's."""
        plain = _without(asdict(self), {"pool": (), "tests": ()})
        plain["model"] = _without(plain["model"], ADDED_TO_MODELS)
        text = json.dumps(plain, sort_keys=True, allow_nan=False, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def cell(self) -> tuple[str, str]:
        """Identity of task and data: runs of one cell share their examples."""
        parts = [[part.settings, part.rows] for part in (*self.pool, *self.tests)]
        known = [self.settings, self.train, self.test, self.data_seed, len(self.pool), parts]
        return self.task, json.dumps(known, sort_keys=True)

    @property
    def train_parts(self) -> tuple[Part, ...]:
        """What is trained on."""
        return self.pool or (Part(self.settings, self.train, self.batch_size),)

    @property
    def test_parts(self) -> tuple[Part, ...]:
        """What is tested on."""
        return self.tests or (Part(self.settings, self.test, self.batch_size),)

    def task_of(self, part: Part) -> SequenceTask:
        """Return the task with the settings of one set."""
        return create_sequence_task(self.task, **part.settings)

    def create_task(self) -> SequenceTask:
        """Return the task that the model is made for: of all sets the one with the longest rows."""
        tasks = [self.task_of(part) for part in (*self.train_parts, *self.test_parts)]
        return max(tasks, key=lambda task: task.sequence_length)

    def row(self) -> dict[str, Any]:
        """Return the part of the row that is known before the run."""
        pool = {"pool": [part.row() for part in self.pool]} if self.pool else {}
        return {
            "key": self.key,
            "task": self.task,
            "settings": {**self.settings, TRAIN: self.train},
            **pool,
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
    training = _without(asdict(recipe.training), ADDED_TO_TRAINING)
    for varied in ("learning_rates", "weight_decays", "seeds", "batch_size"):
        training.pop(varied)
    found: dict[str, RunSpec] = {}
    for task_recipe in recipe.tasks:
        for cell in _cells(recipe, task_recipe):
            for model, rate, decay, seed in itertools.product(models, *_lists(recipe)):
                spec = RunSpec(
                    task=task_recipe.name,
                    data_seed=recipe.data.seed,
                    model=model,
                    learning_rate=rate,
                    weight_decay=decay,
                    seed=seed,
                    training=training,
                    **cell,
                )
                found.setdefault(spec.key, spec)
    _check_models(models, next(iter(found.values())).create_task())
    return list(found.values())


def _cells(recipe: SweepRecipe, task_recipe: TaskRecipe) -> Iterator[dict[str, Any]]:
    """Yield what each cell of a task decides of its runs: settings, rows, sets and the batch size."""
    tests = tuple(_part(recipe, task_recipe, given, recipe.data.test) for given in task_recipe.test)
    test = sum(part.rows for part in tests) if tests else recipe.data.test
    for settings in [task_recipe.settings] if task_recipe.train else task_recipe.all_cells():
        settings = dict(settings)
        default = settings.pop(TRAIN, recipe.data.train)
        pool = tuple(_part(recipe, task_recipe, given, default) for given in task_recipe.train)
        train = _count(task_recipe.name, TRAIN, sum(part.rows for part in pool) if pool else default)
        if pool:
            size = max(pool, key=lambda part: _length(task_recipe.name, part)).batch_size
        else:
            size = recipe.training.batch_size_at(_checked_task(task_recipe.name, settings).sequence_length)
        if tests:
            mine = () if pool else (Part(settings, train, size),)
            _check_one_vocabulary(task_recipe.name, (*pool, *mine, *tests))
        known = {"settings": settings, "train": train, "test": test, "batch_size": size}
        yield {**known, "pool": pool, "tests": tests}


def _part(recipe: SweepRecipe, task_recipe: TaskRecipe, given: Settings, rows: Any) -> Part:
    settings = {**task_recipe.settings, **given}
    settings.pop(TRAIN, None)
    rows = _count(task_recipe.name, ROWS, settings.pop(ROWS, rows))
    length = _checked_task(task_recipe.name, settings).sequence_length
    return Part(settings, rows, recipe.training.batch_size_at(length, beyond=True))


def _count(task: str, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{task}: {name} must be a whole number of at least 1, got {value!r}")
    return value


def _length(task: str, part: Part) -> int:
    return create_sequence_task(task, **part.settings).sequence_length


def _check_one_vocabulary(task: str, parts: Sequence[Part]) -> None:
    sizes = {create_sequence_task(task, **part.settings).vocab_size for part in parts}
    if len(sizes) > 1:
        found = ", ".join(map(str, sorted(sizes)))
        raise UserError(f"{task}: one model reads all sets, so their vocab_size must be the same, got {found}")


def _without(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` without the entries that are as in `defaults`."""
    return {key: value for key, value in values.items() if key not in defaults or value != defaults[key]}


def _checked_task(name: str, settings: Mapping[str, Any]) -> SequenceTask:
    try:
        return create_sequence_task(name, **settings)
    except TypeError as error:  # a value of a type that the task does not compare with numbers
        raise UserError(f"{name}: the settings {dict(settings)} cannot be used: {error}") from None


def _models(recipe: SweepRecipe) -> list[ModelSpec]:
    models = recipe.models
    return [
        ModelSpec(
            mixer,
            width,
            depth,
            retrieval,
            models.block_of("mlp", label(mixer)),
            models.tie_embeddings,
            models.block_of("norm", label(mixer)),
            models.block_of("second_norm", label(mixer)),
            models.final_norm or models.block_of("norm", label(mixer)),
        )
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
        raise UserError(f'--shard "{text}" is not a shard; write i/n with 1 <= i <= n, e.g. 1/4')
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
    return int(spec.training["epochs"]) * sum(math.ceil(part.rows / part.batch_size) for part in spec.train_parts)
