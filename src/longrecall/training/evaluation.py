"""Evaluation while a model trains: held-out loss and recall tasks every N steps, early stopping, the best checkpoint.

What is measured changes nothing of the training: sequences and samples are fixed, random numbers of torch are put back,
and the training's own data and states are not touched. A run with it has the losses of one without, until it stops.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longrecall.errors import UserError
from longrecall.models.losses import label_count
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.tasks.encoding import PieceEncoder
from longrecall.tasks.registry import PositionTask, Task
from longrecall.training.data import BatchStream
from longrecall.training.initial_states import InitialState, Learned
from longrecall.training.recipe import Recipe
from longrecall.training.recipe_evaluation import HELD_OUT, EvaluationRecipe, HeldOutRecipe, TaskRecipe
from longrecall.training.segments import Segments
from longrecall.training.summary import TrainingSummary

ROWS = 64
"""Held-out sequences that are drawn side by side."""
Numbers = dict[str, float | None]
"""Name of what was measured, such as ``held_out.loss`` -> value; None where it is not finite."""


@dataclass(frozen=True)
class Standing:
    """How the chosen metric has done so far; small JSON data that a checkpoint keeps.

    Attributes:
        step: of the last evaluation; -1 = none yet.
        best, best_step: the best value of the metric, and when it was reached.
        waited: evaluations since one that was better by more than the recipe's minimum.
        stopped: training has ended early.
        mark: the value of that one; None = `best`, as older checkpoints have it.
    """

    step: int = -1
    best: float | None = None
    best_step: int | None = None
    waited: int = 0
    stopped: bool = False
    mark: float | None = None

    def after(self, step: int, value: float | None, recipe: EvaluationRecipe) -> Standing:
        """Return the standing with one more value of the metric; a value that is not finite is no better."""
        sign = -1.0 if recipe.lower_is_better else 1.0
        least = recipe.stop.minimum_change if recipe.stop is not None else 0.0
        found, mark = replace(self, step=step), self.best if self.mark is None else self.mark
        if value is not None and (self.best is None or sign * (value - self.best) > 0.0):
            found = replace(found, best=value, best_step=step)
        if value is not None and (mark is None or sign * (value - mark) > least):
            return replace(found, waited=0, mark=value)
        waited = self.waited + 1
        stopped = recipe.stop is not None and waited >= recipe.stop.patience
        return replace(found, waited=waited, stopped=stopped, mark=mark)


@dataclass(frozen=True)
class Share:
    """Which part of the work a process does.

    Attributes:
        rank, world: of all processes.
        sharded: no process has all weights, so that every forward pass needs all processes.
        total: sums a tensor over the processes.
    """

    rank: int
    world: int
    sharded: bool
    total: Callable[[Tensor], Tensor]


class HeldOut:
    """Fixed sequences, tokenised once: int64 ``[N, T]`` ids and labels.

    Raises:
        UserError: as `BatchStream`.
    """

    def __init__(self, held_out: HeldOutRecipe, recipe: Recipe, tokenizer: Any, seed: int) -> None:
        from longrecall.evaluation.token_bytes import bytes_of_tokens

        length = held_out.context_length or recipe.data.context_length
        data = replace(recipe.data, sources=held_out.sources, context_length=length, seed=seed)
        self.batch_size = held_out.batch_size or recipe.run.batch_size
        count = math.ceil(held_out.tokens / length)
        rows = min(count, ROWS)
        stream = BatchStream(data, tokenizer, rows)
        batches = [stream.next_batch() for _ in range(math.ceil(count / rows))]
        self.ids: Tensor = torch.cat([batch["input_ids"] for batch in batches])[:count]
        self.labels: Tensor = torch.cat([batch["labels"] for batch in batches])[:count]
        self.starts: list[Sequence[int]] = [starts for batch in batches for starts in batch["starts"]][:count]
        self.apart = recipe.data.reset_documents
        predicted = self.labels[:, 1:].numpy() != -100
        if not predicted.any():
            raise UserError("the held-out sequences have no labels; take other sources or a longer context_length")
        self.bytes = int((bytes_of_tokens(tokenizer, self.ids[:, 1:].numpy()) * predicted).sum())
        self.label_number = int(predicted.sum())

    @torch.no_grad()
    def measure(self, model: RecurrentLM, initial: InitialState, share: Share) -> Numbers:
        """Return ``held_out.loss`` (nats a label) and ``held_out.bits_per_byte``.

        Every process reads its share of the rows, as many batches as every other one and all of one shape.
        """
        each = self.batch_size
        nats = torch.zeros((), dtype=torch.float64, device=model.device)
        for turn in range(math.ceil(len(self.ids) / (each * share.world))):
            numbers = torch.arange(each) + (turn * share.world + share.rank) * each
            mine = numbers % len(self.ids)
            labels = self.labels[mine].masked_fill((numbers >= len(self.ids))[:, None], -100)
            nats += self._nats(model, initial, mine, labels)
        loss = float(share.total(nats)) / self.label_number
        if not math.isfinite(loss):
            return {f"{HELD_OUT}.loss": None, f"{HELD_OUT}.bits_per_byte": None}
        bits = loss * self.label_number / math.log(2) / self.bytes if self.bytes else None
        return {f"{HELD_OUT}.loss": loss, f"{HELD_OUT}.bits_per_byte": bits}

    def _nats(self, model: RecurrentLM, initial: InitialState, mine: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the losses of some rows, float64."""
        ids, labels = self.ids[mine].to(model.device), labels.to(model.device)
        segments = Segments.of([self.starts[int(row)] for row in mine], ids.shape[1]) if self.apart else None
        arguments = {"input_ids": ids, "labels": labels} if segments is None else segments.inputs(ids, labels)
        before: RecurrentState | None = None
        if isinstance(initial, Learned):
            before = initial.start(len(ids) if segments is None else len(segments.row))
        mean: Tensor = model(**arguments, past_key_values=before, loss_only=True).loss
        return mean.double() * label_count(labels)


class TrainingEvaluation:
    """What the section `evaluation` of a recipe asks for, made ready before the run starts.

    Raises:
        UserError: a source or text that cannot be read; a task that does not fit into one of its lengths.
    """

    def __init__(self, recipe: Recipe, evaluation: EvaluationRecipe, tokenizer: Any) -> None:
        self.recipe = evaluation
        self.standing = Standing()
        self._tokenizer, self._compiled = tokenizer, recipe.run.compile
        self._held_out: HeldOut | None = None
        if evaluation.held_out is not None:
            try:
                self._held_out = HeldOut(evaluation.held_out, recipe, tokenizer, evaluation.seed)
            except UserError as error:
                line = str(error).replace("data.sources", "sources", 1)
                raise UserError(f"evaluation.held_out: {line}") from None
        self._tasks: list[tuple[TaskRecipe, Task, Sequence[int]]] = []
        for index, asked in enumerate(evaluation.tasks):
            lengths = asked.lengths or (recipe.data.context_length,)
            try:
                task = asked.make()
                _check_samples(task, lengths, tokenizer, asked.samples, evaluation.seed)
            except UserError as error:
                raise UserError(f"evaluation.tasks.{index} ({asked.kind}): {error}") from None
            self._tasks.append((asked, task, lengths))

    def describe(self) -> str:
        """Say in one line what is measured when."""
        parts = []
        if self._held_out is not None:
            parts.append("held-out {} x {} tokens".format(*self._held_out.ids.shape))
        parts += [asked.kind for asked, _, _ in self._tasks]
        stop = self.recipe.stop
        going = f"; stops after {stop.patience} without a better {self.recipe.chosen_metric}" if stop else ""
        return f"every {self.recipe.every:,} steps: {', '.join(parts)}{going}"

    def due(self, step: int, last: bool) -> bool:
        """Return whether there is an evaluation after `step` (0 = before the first)."""
        if step == 0:
            return self.recipe.at_start
        return step != self.standing.step and (last or step % self.recipe.every == 0)

    def measure(
        self,
        model: RecurrentLM,
        initial: InitialState,
        share: Share,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> Numbers:
        """Return the numbers, the same in every process; every process of the run calls this.

        Args:
            model: as it trains; afterwards it is in training mode again if it was.
            initial: of the run: sequences start from a learned state where there is one, else from zero.
            share: this process's part.
            autocast: of the training; the held-out loss is the loss of training. Tasks are asked without it.
        """
        begun = time.perf_counter()
        numbers: Numbers = {}
        with _untouched(model, self._compiled):
            if self._held_out is not None:
                with autocast():
                    numbers |= self._held_out.measure(model, initial, share)
            for asked, task, lengths in self._tasks:
                numbers |= self._ask(model, asked, task, lengths, share)
        return numbers | {"seconds": round(time.perf_counter() - begun, 3)}

    def _ask(self, model: RecurrentLM, asked: TaskRecipe, task: Task, lengths: Sequence[int], share: Share) -> Numbers:
        from longrecall.evaluation.engine import evaluate
        from longrecall.evaluation.parallel import Ranks

        # Processes that hold parts of the weights pass through every layer together, so all of them ask everything.
        ranks = Ranks() if share.sharded else Ranks(share.rank, share.world)
        found = evaluate(
            model, self._tokenizer, [task], list(lengths), asked.samples, self.recipe.seed,
            progress=False, checkpoint={}, ranks=ranks,
        )  # fmt: skip
        return task_numbers(found)

    def judge(self, step: int, numbers: Mapping[str, float | None], counts: bool) -> bool:
        """Take note of an evaluation; return whether the metric is the best so far.

        `counts`: the model is what it will be; before (a handover is under way) nothing is best and nothing stops.

        Raises:
            UserError: the metric that `stop` and `best` go by was not measured.
        """
        metric = self.recipe.chosen_metric
        if metric not in numbers:
            raise UserError(f'evaluation.metric "{metric}" was not measured; there are {", ".join(numbers)}')
        if not counts:
            self.standing = replace(self.standing, step=step)
            return False
        self.standing = self.standing.after(step, numbers[metric], self.recipe)
        return self.standing.best_step == step

    def best(self) -> dict[str, Any] | None:
        """Return the best value of the metric so far with its step, as JSON data; None before there is one."""
        if self.standing.best_step is None:
            return None
        return {"metric": self.recipe.chosen_metric, "value": self.standing.best, "step": self.standing.best_step}

    def report(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what training.json says: the best evaluation, an early end, and every evaluation of the log."""
        return {
            "best": self.best(),
            "stopped_at": self.standing.step if self.standing.stopped else None,
            "log": [row for row in rows if "evaluation" in row],
        }

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as JSON data."""
        return asdict(self.standing)

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue from `state`."""
        self.standing = Standing(**state) if state else Standing()


def ended(state: Mapping[str, Any], step: int, steps: int) -> bool:
    """Return whether a saved run has come to its end: after `steps`, or stopped early."""
    return step >= steps or bool((state.get("evaluation") or {}).get("stopped"))


def described(summary: TrainingSummary, evaluation: TrainingEvaluation | None) -> TrainingSummary:
    """Return the summary with what the evaluation says of the run."""
    if evaluation is None:
        return summary
    standing = evaluation.standing
    if standing.stopped:
        tokens = summary.tokens // summary.steps * standing.step
        summary = replace(summary, steps=standing.step, tokens=tokens, stopped_early=True)
    return replace(summary, evaluation=evaluation.describe(), best=evaluation.best())


def parted_log(rows: Sequence[Mapping[str, Any]], evaluation: TrainingEvaluation | None) -> dict[str, Any]:
    """Return what training.json says of the log: ``log``, the rows of training, and with one ``evaluation``."""
    training = {"log": [row for row in rows if "loss" in row]}
    return training if evaluation is None else training | {"evaluation": evaluation.report(rows)}


def prepare_evaluation(recipe: Recipe, tokenizer: Any) -> TrainingEvaluation | None:
    """Return what the recipe asks to measure during training; None where it asks for nothing."""
    return None if recipe.evaluation is None else TrainingEvaluation(recipe, recipe.evaluation, tokenizer)


def resumed(evaluation: TrainingEvaluation | None, state: Mapping[str, Any]) -> TrainingEvaluation | None:
    """Return the evaluation as it stood in the state of a saved run (empty = a new run)."""
    if evaluation is not None:
        evaluation.restore(state.get("evaluation"))
    return evaluation


def task_numbers(result: Mapping[str, Any]) -> Numbers:
    """Return a result of `evaluate` as numbers: the mean over cells of every metric, and its summary."""
    values: dict[str, list[float | None]] = {}
    for entry in result["results"]:
        values.setdefault(f"{entry['task']}.{entry['metric']}", []).append(entry["value"])
    means: Numbers = {}
    for name, each in values.items():
        known = [value for value in each if value is not None]
        means[name] = sum(known) / len(known) if len(known) == len(each) else None
    return means | dict(result["summary"])


def _check_samples(task: Task, lengths: Sequence[int], tokenizer: Any, samples: int, seed: int) -> None:
    """Raise UserError where a task cannot be asked at one of its lengths."""
    cells = task.cells(lengths)
    if isinstance(task, PositionTask):
        from longrecall.evaluation.token_bytes import tokenize_with_bytes

        task.window_starts(len(tokenize_with_bytes(tokenizer, task.text)[0]), max(lengths), samples)
        return
    # The passages of a prompt "rag" are chosen by the model, which is not there yet.
    if "rag" not in getattr(task, "prompts", ()):
        encode = PieceEncoder(tokenizer)
        for cell in cells:
            task.sample(encode, cell, 0, seed)


@contextmanager
def _untouched(model: RecurrentLM, compiled: bool) -> Iterator[None]:
    """Leave the model's mode and torch's random numbers as they were, whatever is done inside the block."""
    training = model.training
    devices = [model.device] if model.device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        if compiled:
            # Other shapes than those of training would be compiled for each of them.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        model.eval()
        try:
            yield
        finally:
            model.train(training)
