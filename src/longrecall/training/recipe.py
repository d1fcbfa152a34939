"""A training run as data: one YAML file, checked whole before anything heavy starts."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from longrecall.errors import UserError
from longrecall.training.recipe_evaluation import EvaluationRecipe
from longrecall.training.recipe_leash import LeashRecipe
from longrecall.training.recipe_sources import SOURCES, AnySource
from longrecall.training.recipe_states import (
    INITIAL_STATES,
    AnyInitialState,
    LearnedRecipe,
    TruncatedBpttRecipe,
    ZeroState,
)
from longrecall.training.strict_yaml import Tagged, apply_override, build, read_yaml
from longrecall.units import parse_length
from longrecall.value_rules import one_of, positive, share

Length = Annotated[int, parse_length]
"""Tokens: 512, 4k, 1m."""

MAX_CONTEXT = 1 << 24
"""Tokens of the longest context that is taken as meant (16m)."""
MAX_WORKERS = 256
"""Data workers of one process; more are a mistake."""


@dataclass(frozen=True)
class ModelRecipe:
    """Where the run starts from."""

    checkpoint: str
    """Folder (or hub id) of the checkpoint, in any format that longrecall reads."""
    dtype: str = "float32"
    """Type of the weights while they train; float32 keeps master weights under bf16 or fp16 autocast."""

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, ("float32", "bfloat16", "float16"))


@dataclass(frozen=True)
class DataRecipe:
    """The stream of training sequences."""

    sources: tuple[Annotated[AnySource, Tagged(SOURCES)], ...]
    """Where sequences come from; each sequence is drawn from one of them by weight."""
    context_length: Length = 512
    """Tokens of a sequence; 4k = 4096."""
    seed: int = 0
    """Seed of the order of the documents, of the mixture and of generated tasks."""
    reset_documents: bool = False
    """Every document starts from a fresh state, also inside a sequence; otherwise a sequence is read as one text."""
    workers: int | None = None
    """Processes that read and tokenise ahead, per process of the run; none = 0 on a CPU, up to 4 with a GPU. With 0 the
    training process does it between the steps. The number changes no batch."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise UserError("sources is empty; name at least one")
        if not 2 <= self.context_length <= MAX_CONTEXT:
            raise UserError(f"context_length must be between 2 and {MAX_CONTEXT} tokens, got {self.context_length}")
        if self.seed < 0:
            raise UserError(f"seed must be 0 or more, got {self.seed}")
        if self.workers is not None and not 0 <= self.workers <= MAX_WORKERS:
            raise UserError(f"workers must be 0 to {MAX_WORKERS}, got {self.workers}")


@dataclass(frozen=True)
class RateRecipe:
    """Peak learning rate and weight decay of the parameters that a pattern names."""

    match: str
    """Pattern of parameter names, with * for anything: layers.3.*, *.k_proj.weight."""
    learning_rate: str | float | None = None
    """Peak: a multiple of optimizer.learning_rate like 10x, or a rate like 0.01; none = as without the pattern."""
    weight_decay: float | None = None
    """Weight decay of all that the pattern matches, norms and biases too; none = as without the pattern."""

    def __post_init__(self) -> None:
        _check_patterns("match", (self.match,))
        if self.learning_rate is None and self.weight_decay is None:
            raise UserError("give learning_rate or weight_decay: what the pattern changes")
        if self.weight_decay is not None and not 0.0 <= self.weight_decay < math.inf:
            raise UserError(f"weight_decay must be 0 or more, got {self.weight_decay}")


@dataclass(frozen=True)
class OptimizerRecipe:
    """AdamW and its learning-rate schedule."""

    learning_rate: float = 1e-3
    """Peak learning rate of everything that surgery did not touch."""
    touched: str | float = "1x"
    """Peak learning rate of what surgery touched (surgery.json): a multiple of learning_rate like 10x, or a rate like
    0.01."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decays of AdamW's two moments."""
    epsilon: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """Decoupled; only matrices have it, not norms, biases, convolutions, embeddings, A_log, D, dt_bias, mixing."""
    clip: float = 1.0
    """Largest gradient norm; 0 = no clipping."""
    warmup: float = 0.05
    """Linear warm-up: below 1 a share of the steps, else a number of steps."""
    schedule: str = "cosine"
    """From peak to minimum: cosine, linear or constant."""
    hold: float = 0.0
    """The peak is kept until this share of the steps; linear with hold 0.8 is warm-up, stable, decay."""
    minimum: float = 0.0
    """What the schedule ends at, as a share of the peak."""
    rates: tuple[RateRecipe, ...] = ()
    """Own peaks for parameters by pattern; the first pattern that matches counts, before `touched`."""
    train: tuple[str, ...] = ()
    """Patterns of the parameters that are trained; none = all."""
    freeze: tuple[str, ...] = ()
    """Patterns of parameters that stay as they are, also where `train` names them."""

    def __post_init__(self) -> None:
        positive(self, "learning_rate", "epsilon")
        share(self, "hold", "minimum")
        one_of("schedule", self.schedule, ("cosine", "linear", "constant"))
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise UserError(f"betas must lie in [0, 1), got {list(self.betas)}")
        for name in ("weight_decay", "clip", "warmup"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} must be 0 or more, got {getattr(self, name)}")
        self._peak("touched", self.touched)
        for index, rule in enumerate(self.rates):
            if rule.learning_rate is not None:
                self._peak(f"rates.{index}.learning_rate", rule.learning_rate)
        _check_patterns("train", self.train)
        _check_patterns("freeze", self.freeze)

    @property
    def touched_rate(self) -> float:
        """Peak learning rate of what surgery touched."""
        return self._peak("touched", self.touched)

    def rate_of(self, rule: RateRecipe) -> float | None:
        """Return the peak learning rate that a rule of `rates` gives; None where it gives none."""
        return None if rule.learning_rate is None else self._peak("learning_rate", rule.learning_rate)

    def _peak(self, name: str, given: str | float) -> float:
        """Return a peak that is a multiple of `learning_rate` or a rate; UserError with the key's `name`."""
        text = str(given).strip()
        try:
            peak = self.learning_rate * float(text[:-1]) if text.lower().endswith("x") else float(text)
        except ValueError:
            raise UserError(f'{name} "{text}" is neither a multiple like 10x nor a learning rate like 0.01') from None
        if not peak > 0 or not math.isfinite(peak):
            raise UserError(f"{name} must be above 0, got {given}")
        return peak


@dataclass(frozen=True)
class HandoverRecipe:
    """When the output of handover layers moves from the old path to the new one; without such layers it has no
    effect.
    """

    start: float = 0.0
    """Share of the steps at which it begins."""
    end: float = 0.5
    """Share of the steps from which on only the new path counts."""

    def __post_init__(self) -> None:
        share(self, "start", "end")
        if self.start >= self.end:
            raise UserError(f"start ({self.start}) must be below end ({self.end})")


@dataclass(frozen=True)
class RunRecipe:
    """How long and how large the run is, and where its results go."""

    output: str
    """Folder for checkpoints and logs."""
    steps: int | None = None
    """Optimizer steps; give this or tokens."""
    tokens: Length | None = None
    """Tokens to train on, rounded up to whole steps; 1m = 1048576."""
    batch_size: int = 32
    """Sequences of one forward pass of one process (of one context group, where processes share a row)."""
    gradient_accumulation: int = 1
    """Forward passes in one step."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    compile: bool = False
    """Run the layers through torch.compile: the first steps take long, the others less; on a CPU it needs g++."""
    cuda_graphs: bool = True
    """On a GPU: record the forward and backward pass of a micro-batch once and replay it, where that is possible."""
    seed: int = 0
    """Seed of everything that is random outside the data."""
    save_every: int = 0
    """Steps between resumable checkpoints; 0 = only at the end."""
    keep: int = 2
    """Resumable checkpoints that are kept, the newest ones."""
    log_every: int = 10
    """Steps between lines of the log."""
    precision: str = "fp32"
    """fp32, or bf16 / fp16 autocast."""
    threads: int | None = None
    """CPU threads of torch; none = torch's choice."""
    report_to: str = "auto"
    """auto (TensorBoard when installed), none, tensorboard or wandb."""

    def __post_init__(self) -> None:
        positive(self, "batch_size", "gradient_accumulation", "keep", "log_every")
        one_of("precision", self.precision, ("fp32", "bf16", "fp16"))
        one_of("report_to", self.report_to, ("auto", "none", "tensorboard", "wandb"))
        if not self.output.strip():
            raise UserError("output is empty; name a folder")
        if self.steps is None and self.tokens is None:
            raise UserError("give steps or tokens: how long the run is")
        if self.steps is not None and self.tokens is not None:
            raise UserError(f"give either steps ({self.steps}) or tokens ({self.tokens}), not both")
        if self.steps is not None:
            positive(self, "steps")
        if self.threads is not None:
            positive(self, "threads")
            if self.threads >= 2**31:
                raise UserError(f"threads ({self.threads}) must be below 2**31")
        if self.save_every < 0 or not 0 <= self.seed < 2**32:
            raise UserError(f"save_every ({self.save_every}) must be 0 or more, seed ({self.seed}) in 0..2**32-1")


@dataclass(frozen=True)
class ParallelRecipe:
    """How the processes of a run share the work: their number is replicate x shard x context."""

    replicate: int | None = None
    """Copies of the weights, each trained on rows of its own; none = all processes that shard and context leave."""
    shard: int = 1
    """Processes that share one copy of the weights (FSDP2); each reads rows of its own."""
    context: int = 1
    """Processes that share one row: each reads a piece of the sequence. They share the weights too."""

    def __post_init__(self) -> None:
        positive(self, "shard", "context", *(() if self.replicate is None else ("replicate",)))

    def least(self) -> int:
        """Return the smallest number of processes that this describes."""
        return (self.replicate or 1) * self.shard * self.context


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training run."""

    model: ModelRecipe
    data: DataRecipe
    run: RunRecipe
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    initial_state: Annotated[AnyInitialState, Tagged(INITIAL_STATES)] = field(default_factory=ZeroState)
    handover: HandoverRecipe = field(default_factory=HandoverRecipe)
    leash: LeashRecipe | None = None
    evaluation: EvaluationRecipe | None = None
    parallel: ParallelRecipe = field(default_factory=ParallelRecipe)

    def __post_init__(self) -> None:
        if self.model.dtype == "float16":
            raise UserError(
                "model.dtype float16 cannot be trained (updates underflow); use float32, run.precision fp16"
            )
        if self.model.dtype == "bfloat16" and self.run.precision == "fp16":
            raise UserError("model.dtype bfloat16 and run.precision fp16 do not go together; use bf16 or float32")
        if self.evaluation is not None and self.evaluation.tasks and isinstance(self.initial_state, LearnedRecipe):
            raise UserError(
                "evaluation.tasks start from the zero state, which initial_state.kind=learned does not train; use "
                "evaluation.held_out"
            )
        if self.leash is not None:
            self.leash.chosen(self.data.sources)
        if self.run.compile and (self.data.reset_documents or self.continues):
            raise UserError(
                "run.compile needs batches of one shape, but documents that are kept apart (reset_documents, "
                "truncated_bptt) change it from batch to batch; switch one of them off"
            )
        if self.data.context_length % self.parallel.context:
            raise UserError(
                f"parallel.context ({self.parallel.context}) does not divide data.context_length "
                f"({self.data.context_length}): every process reads a piece of the same length"
            )
        if self.parallel.context > 1 and self.run.compile:
            raise UserError("run.compile cannot trace what the processes of parallel.context exchange; switch it off")
        if self.run.precision == "fp16" and self.parallel.shard * self.parallel.context > 1:
            raise UserError(
                "run.precision fp16 scales its loss, which is not supported with sharded weights; use bf16 or fp32 "
                "with "
                "parallel.shard and parallel.context"
            )
        if self.run.steps is not None and self.optimizer.warmup > self.run.steps:
            warmup = f"{self.optimizer.warmup:g} steps"
            raise UserError(f"optimizer.warmup ({warmup}) is longer than run.steps ({self.run.steps})")

    @classmethod
    def from_dict(cls, data: dict[str, Any], overrides: Sequence[str] = ()) -> Recipe:
        """Checked construction from plain data with ``a.b=value`` overrides on top; `data` is not changed.

        An override of run.steps takes the place of the data's run.tokens, and the other way round. One of
        initial_state.kind drops the keys of the data that another kind has and this one lacks.
        """
        data = copy.deepcopy(data)
        for override in overrides:
            apply_override(data, override)
        overridden = {override.partition("=")[0].strip() for override in overrides}
        _settle_length(data.get("run"), overridden)
        _settle_initial_state(data.get("initial_state"), overridden)
        recipe: Recipe = build(cls, data)
        return recipe

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """Read a YAML recipe; UserError with the dotted path of what is wrong. Its paths start where you stand."""
        return cls.from_dict(read_yaml(path), overrides)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back, every default written out."""
        plain: dict[str, Any] = _plain(self)
        return plain

    @property
    def continues(self) -> bool:
        """Whether a row of a batch goes on where the same row of the batch before stopped."""
        return isinstance(self.initial_state, TruncatedBpttRecipe)

    def tokens_per_step(self, processes: int = 1) -> int:
        """Tokens of one optimizer step of so many data-parallel processes."""
        return self.run.batch_size * self.run.gradient_accumulation * self.data.context_length * processes

    def steps(self, processes: int = 1) -> int:
        """Optimizer steps of the whole run."""
        return self.run.steps or math.ceil((self.run.tokens or 0) / self.tokens_per_step(processes))


def _check_patterns(name: str, patterns: Sequence[str]) -> None:
    if not all(pattern.strip() for pattern in patterns):
        raise UserError(f'{name} has an empty pattern; name parameters, with * for anything, like "layers.3.*"')


def _settle_length(run: Any, overridden: set[str]) -> None:
    """Drop the run's length in the recipe where an override gives it in the other unit; two overrides still clash."""
    for name, other in (("steps", "tokens"), ("tokens", "steps")):
        given = isinstance(run, dict) and run.get(name) not in (None, "none")
        if given and f"run.{name}" in overridden and f"run.{other}" not in overridden:
            run.pop(other, None)


def _settle_initial_state(state: Any, overridden: set[str]) -> None:
    """Drop keys of the recipe's kind where an override names a kind that lacks them; overrides of them still fail."""
    known = INITIAL_STATES.get(str(state.get("kind"))) if isinstance(state, dict) else None
    if known is None or "initial_state.kind" not in overridden:
        return
    theirs = {item.name for kind in INITIAL_STATES.values() for item in dataclasses.fields(kind)}
    for key in theirs - {item.name for item in dataclasses.fields(known)}:
        if f"initial_state.{key}" not in overridden:
            state.pop(key, None)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = {"kind": value.kind} if hasattr(value, "kind") else {}
        return kind | {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value
