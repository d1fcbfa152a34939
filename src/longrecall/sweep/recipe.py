"""A sweep as data: one YAML file that says which models are trained on which tasks, checked whole before it starts."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from longrecall.errors import UserError, did_you_mean
from longrecall.layers.descriptions.block import NORMS, RMS
from longrecall.sweep.mixers import CYCLE, label
from longrecall.training.recipe import OptimizerRecipe
from longrecall.training.strict_yaml import apply_override, build, read_yaml
from longrecall.value_rules import one_of, positive

METRICS = ("accuracy", "whole_accuracy", "macro_accuracy", "mad_accuracy")
MATMUL_PRECISIONS = ("highest", "high", "medium")
"""What `torch.set_float32_matmul_precision` takes."""
TRAIN = "train"
"""A setting of a cell that is none of the task's: how many training examples there are."""
ROWS = "rows"
"""The same of one of several sets that are trained on together, or that are tested on."""
OTHERS = "others"
"""In a mapping from mixers to what they have: all that are not named."""

Settings = dict[str, Any]


def _mapping(value: Any) -> Settings:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise UserError(f"must be a mapping of names to values, got {value!r}")
    return dict(value)


def _lists(value: Any) -> dict[str, list[Any]]:
    found = _mapping(value)
    for key, items in found.items():
        if not isinstance(items, list) or not items:
            raise UserError(f"{key} must be a list of values, got {items!r}")
    return found


def _whole_numbers(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list | tuple) else [value]
    if not values or any(isinstance(item, bool) or not isinstance(item, int) or item < 1 for item in values):
        raise UserError(f"must be a whole number of at least 1, or a list of them, got {value!r}")
    return tuple(values)


def _rates(value: Any) -> tuple[float, ...]:
    """A list of rates, or ``{logspace: [low, high, count]}``: powers of ten with evenly spaced exponents."""
    if isinstance(value, Mapping):
        low, high, count = build(tuple[float, float, int], value.get("logspace", ()), "logspace")
        if list(value) != ["logspace"] or count < 2:
            raise UserError(f"write {{logspace: [low, high, count]}} with a count of at least 2, got {dict(value)}")
        return tuple(10 ** (low + (high - low) * index / (count - 1)) for index in range(count))
    rates: tuple[float, ...] = build(tuple[float, ...], value, "rates")
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise UserError(f"must be a list of rates above 0, got {value!r}")
    return rates


def _batch_size(value: Any) -> int | dict[int, int]:
    """A number, or sequence length -> number."""
    if not isinstance(value, Mapping):
        return _whole_numbers(value)[0] if not isinstance(value, list) else _batch_size(None)
    pairs = {_whole_numbers(key)[0]: _whole_numbers(size)[0] for key, size in value.items()}
    if not pairs:
        raise UserError("is an empty mapping; write {length: sequences, ...} or a number")
    return dict(sorted(pairs.items()))


def _mixers(value: Any) -> tuple[str | Settings, ...]:
    if not isinstance(value, list) or not value:
        raise UserError(f"must be a list of mixers, names or descriptions, got {value!r}")
    for item in value:
        if isinstance(item, Mapping) and CYCLE in item and set(item) <= {CYCLE, "label"}:
            _mixers(item[CYCLE])
        elif not isinstance(item, str) and not (isinstance(item, Mapping) and isinstance(item.get("type"), str)):
            raise UserError(f'a mixer is a name, a mapping with a "type" or {{cycle: [mixers]}}, got {item!r}')
    return tuple(item if isinstance(item, str) else dict(item) for item in value)


def _retrievals(value: Any) -> tuple[Settings | None, ...]:
    values = value if isinstance(value, list) else [value]
    for item in values:
        if item is not None and not (isinstance(item, Mapping) and "layer" in item):
            raise UserError(f"an entry is null, or a mapping such as {{layer: 0, chunk: 2, top_k: 1}}, got {item!r}")
        if item is not None:
            _layers_of(item)
    if not values:
        raise UserError("is an empty list; write null for models without retrieval")
    return tuple(None if item is None else dict(item) for item in values)


def _layers_of(retrieval: Mapping[str, Any]) -> tuple[int, ...]:
    layers = retrieval["layer"] if isinstance(retrieval["layer"], list) else [retrieval["layer"]]
    if not layers or any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in layers):
        raise UserError(f"layer must be a layer's index from 0, or a list of them, got {retrieval['layer']!r}")
    return tuple(layers)


def _widths(value: Any) -> Any:
    def check(item: Any) -> None:
        if isinstance(item, bool) or not isinstance(item, int | str) or (isinstance(item, int) and item < 0):
            raise UserError(f"must be a width, a number or like 3*width, or {{mixer: width}}; got {item!r}")

    return _by_mixer(value, check)


def _norms(value: Any) -> Any:
    return _by_mixer(value, lambda item: one_of("a norm", str(item), NORMS))


def _flags(value: Any) -> Any:
    def check(item: Any) -> None:
        if not isinstance(item, bool):
            raise UserError(f"must be true or false, got {item!r}")

    return _by_mixer(value, check)


def _by_mixer(value: Any, check: Callable[[Any], None]) -> Any:
    """One value for all mixers, or mixer -> value."""
    for item in value.values() if isinstance(value, Mapping) else [value]:
        check(item)
    return _mapping(value) if isinstance(value, Mapping) else value


@dataclass(frozen=True)
class TaskRecipe:
    """A task and the cells of its settings; ``train`` among them is the number of training examples.

    A cell is trained and tested on rows of one distribution. With `train` there is one cell instead, which is trained
    on several sets of rows, and `test` says on which other ones.
    """

    name: str
    settings: Annotated[Settings, _mapping] = field(default_factory=dict)
    """What all cells share, and the baseline of `vary`."""
    cells: tuple[Annotated[Settings, _mapping], ...] = ()
    """Cells one by one."""
    grid: Annotated[dict[str, list[Any]], _lists] = field(default_factory=dict)
    """Every combination of these values."""
    vary: Annotated[dict[str, list[Any]], _lists] = field(default_factory=dict)
    """Change one setting at a time; the others stay at the baseline, which is a cell too."""
    train: tuple[Annotated[Settings, _mapping], ...] = ()
    """Sets that are trained on together: settings, and ``rows``, their number of examples."""
    test: tuple[Annotated[Settings, _mapping], ...] = ()
    """Sets that every model is tested on, each by itself: settings, and ``rows``; without it those of the cell."""

    def __post_init__(self) -> None:
        if sum(map(bool, (self.cells, self.grid, self.vary, self.train))) > 1:
            raise UserError(f'"{self.name}" has more than one of cells, grid, vary and train; give one of them')
        if self.train and not self.test:
            raise UserError(f'"{self.name}" is trained on several sets; say in test on which ones it is tested')

    def all_cells(self) -> tuple[Settings, ...]:
        """Return the settings of every cell, `settings` included."""
        if self.cells:
            return tuple({**self.settings, **cell} for cell in self.cells)
        if self.grid:
            combinations = itertools.product(*self.grid.values())
            return tuple({**self.settings, **dict(zip(self.grid, values, strict=True))} for values in combinations)
        varied = [{**self.settings, key: value} for key, values in self.vary.items() for value in values]
        return (dict(self.settings), *varied)


@dataclass(frozen=True)
class DataRecipe:
    """The examples, the same for every model."""

    train: int = 20000
    """Training examples per cell."""
    test: int = 1000
    """Test examples per cell."""
    seed: int = 0
    """Seed of the examples."""

    def __post_init__(self) -> None:
        positive(self, "train", "test")
        if self.seed < 0:
            raise UserError(f"seed must be 0 or more, got {self.seed}")


@dataclass(frozen=True)
class ModelsRecipe:
    """The models: every mixer at every width and depth, with every kind of retrieval."""

    mixers: Annotated[tuple[str | Settings, ...], _mixers]
    """Names (sizes of sweep/mixers.py) or descriptions, whose sizes may be relative (``width/2``); {cycle: [A, B]}
    alternates from layer to layer."""
    hidden_sizes: Annotated[tuple[int, ...], _whole_numbers] = (64,)
    """Widths of the residual stream."""
    layers: Annotated[tuple[int, ...], _whole_numbers] = (2,)
    """Depths."""
    retrieval: Annotated[tuple[Settings | None, ...], _retrievals] = (None,)
    """null, or {layer: index or indices, ...options of the mixer type "retrieval"}."""
    mlp: Annotated[str | int | Settings, _widths] = 0
    """Inner width of a SwiGLU MLP behind every mixer, a number or like 3*width; 0 = none; or {mixer: width, ...}."""
    tie_embeddings: bool = True
    """The output head is the embedding."""
    norm: Annotated[str | Settings, _norms] = RMS
    """Norm of the residual stream: rms or layer; or {mixer: kind, others: kind}."""
    second_norm: Annotated[bool | Settings, _flags] = False
    """After a mixer without an MLP, add another block that adds the stream's norm, as zoology does; or {mixer: ...}."""
    final_norm: str | None = None
    """Norm before the head: rms or layer; null = as `norm`."""

    def __post_init__(self) -> None:
        labels = [label(mixer) for mixer in self.mixers]
        for name in ("mlp", "norm", "second_norm"):
            given = getattr(self, name)
            for key in given if isinstance(given, Mapping) else ():
                if key not in (*labels, OTHERS):
                    known = (*labels, OTHERS)
                    hint = did_you_mean(key, known)
                    raise UserError(f'{name} names "{key}"; there are {", ".join(known)}.{hint}')
            for mixer in labels:
                self.block_of(name, mixer)
        if self.final_norm is not None:
            one_of("final_norm", self.final_norm, NORMS)
        if any(self.block_of("mlp", mixer) and self.block_of("second_norm", mixer) for mixer in labels):
            raise UserError("second_norm is for models without an MLP: before an MLP there is a norm anyway")

    def block_of(self, name: str, mixer: str) -> Any:
        """Return `mlp`, `norm` or `second_norm` of the mixer with this label; UserError when a mapping lacks it."""
        given = getattr(self, name)
        if not isinstance(given, Mapping):
            return given
        if mixer not in given and OTHERS not in given:
            raise UserError(f'{name} has no entry for {mixer}; add one, or "{OTHERS}"')
        return given.get(mixer, given.get(OTHERS))


@dataclass(frozen=True)
class TrainingRecipe:
    """How each model is trained; the lists multiply the runs."""

    epochs: int
    """Passes over the training examples at most."""
    learning_rates: Annotated[tuple[float, ...], _rates]
    """Peaks of AdamW: a list, or {logspace: [-4, -2, 4]}."""
    weight_decays: tuple[float, ...] = (0.1,)
    seeds: tuple[int, ...] = (0,)
    """Seeds of a model's first weights, of the order of examples and of dropout."""
    batch_size: Annotated[int | dict[int, int], _batch_size] = 128
    """Sequences of a step; or {length: sequences}: the entry of the smallest length that is not below the task's."""
    shuffle: bool = True
    """A new order in every epoch."""
    stop_at: float | None = None
    """Stop once `metric` is at least this on the test examples, on each set of them; null = train to the end."""
    patience: int = 0
    """Stop once the training loss has not fallen for so many evaluations; 0 = never."""
    patience_from: float = 0.0
    """`metric` on the test examples that must have been reached before: a run that has learned nothing goes on."""
    improvement: float = 0.01
    """The share by which a training loss has to be lower than the lowest before to count as fallen."""
    metric: str = "accuracy"
    """Measured on the test examples: accuracy (of labels), whole_accuracy (of examples), macro_accuracy (mean over
    tokens) or mad_accuracy. The last is macro_accuracy batch by batch, as in MAD's code."""
    evaluate_every: int = 0
    """Steps between evaluations; 0 = once an epoch. The last step is always followed by one."""
    schedule: str = "cosine"
    """From the peak to zero: cosine or linear; or constant."""
    schedule_unit: str = "step"
    """step, or epoch: the rate stays the same within an epoch."""
    warmup: float = 0.0
    """Linear warm-up: below 1 a share of the steps, else a number of steps."""
    dropout: float = 0.0
    """Dropout of the token embeddings, in training."""
    clip: float = 0.0
    """Largest gradient norm; 0 = no clipping."""
    betas: tuple[float, float] = (0.9, 0.999)
    decayed: str = "all"
    """What weight decay acts on: all parameters, or matrices (as `longrecall train` has it)."""
    precision: str = "fp32"
    """fp32, or bf16 autocast over float32 weights."""

    def __post_init__(self) -> None:
        positive(self, "epochs")
        one_of("metric", self.metric, METRICS)
        one_of("schedule_unit", self.schedule_unit, ("step", "epoch"))
        one_of("precision", self.precision, ("fp32", "bf16"))
        one_of("decayed", self.decayed, ("all", "matrices"))
        for name in ("weight_decays", "seeds"):
            values = getattr(self, name)
            if not values or not all(0 <= value < 2**32 for value in values):
                raise UserError(f"{name} must be a list of numbers of at least 0, got {list(values)}")
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"dropout must be at least 0 and below 1, got {self.dropout}")
        if self.stop_at is not None and not 0.0 < self.stop_at <= 1.0:
            raise UserError(f"stop_at must be above 0 and at most 1, got {self.stop_at}")
        for name in ("evaluate_every", "patience"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("patience_from", "improvement"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise UserError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        self.optimizer(self.learning_rates[0], self.weight_decays[0])

    def optimizer(self, learning_rate: float, weight_decay: float) -> OptimizerRecipe:
        """Return the optimizer of one run; UserError when a value cannot be."""
        return OptimizerRecipe(
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            betas=self.betas,
            clip=self.clip,
            warmup=self.warmup,
            schedule=self.schedule,
        )

    def batch_size_at(self, length: int, beyond: bool = False) -> int:
        """Return the sequences of a step at this sequence length; `beyond`: also where it is longer than any entry."""
        if isinstance(self.batch_size, int):
            return self.batch_size
        for longest, size in self.batch_size.items():
            if length <= longest:
                return size
        if beyond:
            return size
        raise UserError(f"training.batch_size has no entry for a length of {length}; its longest is {longest}")


@dataclass(frozen=True)
class RunRecipe:
    """Where results go and what computes them. Nothing here changes which runs there are, though sums may be rounded
    differently.
    """

    output: str
    """The result file."""
    parallel: int = 1
    """Models that train at once: on one GPU each on a stream, on CPUs each in a process."""
    processes: int = 1
    """Processes among which they are shared out on a GPU; on CPUs this plays no part."""
    matmul_precision: str = "highest"
    """Precision of float32 products: highest (float32), high (tensor-float-32 on a GPU) or medium (may be bfloat16)."""
    budget: float | None = None
    """Seconds after which the sweep stops; runs that have not ended are left to --resume."""
    checkpoints: str | None = None
    """A folder for what the budget stops: --resume goes on with these runs where they were; null = from the start."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda, cuda:1, ..."""

    def __post_init__(self) -> None:
        positive(self, "parallel", "processes", *(["budget"] if self.budget is not None else []))
        one_of("matmul_precision", self.matmul_precision, MATMUL_PRECISIONS)
        if not Path(self.output.strip()).name:
            raise UserError(f'output "{self.output}" names no file; write something like runs/sweep.json')


@dataclass(frozen=True)
class SweepRecipe:
    """Everything that decides a sweep."""

    tasks: tuple[TaskRecipe, ...]
    models: ModelsRecipe
    training: TrainingRecipe
    run: RunRecipe
    data: DataRecipe = field(default_factory=DataRecipe)

    def __post_init__(self) -> None:
        if not self.tasks:
            raise UserError("tasks is empty; name at least one")
        for retrieval in self.models.retrieval:
            if retrieval is not None and max(_layers_of(retrieval)) >= max(self.models.layers):
                raise UserError(f"models.retrieval: there is no layer {retrieval['layer']}; the first is 0")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], overrides: Sequence[str] = ()) -> SweepRecipe:
        """Checked construction from plain data with ``a.b=value`` overrides on top; `data` is not changed."""
        plain = copy.deepcopy(dict(data))
        for override in overrides:
            apply_override(plain, override)
        recipe: SweepRecipe = build(cls, plain)
        return recipe

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> SweepRecipe:
        """Read a YAML recipe; UserError with the dotted path of what is wrong."""
        return cls.from_dict(read_yaml(path), overrides)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, every default written out."""
        return dataclasses.asdict(self)


def retrieval_layers(retrieval: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Return the indices of the layers that an entry of ``models.retrieval`` wraps."""
    return () if retrieval is None else _layers_of(retrieval)
