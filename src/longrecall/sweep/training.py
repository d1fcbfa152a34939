"""One run of a sweep: a small model, its buffers and its recorded step, advanced a step at a time.

`ModelRun.work` is a generator, so that one loop can keep many runs going: it enqueues a step, hands back control, and
never waits for the GPU itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.sweep.examples import Examples, epoch_order
from longrecall.sweep.grid import RunSpec, sizes, steps_of
from longrecall.sweep.predictor import Predictor, label_loss
from longrecall.sweep.recipe import METRICS
from longrecall.tasks.sequence_scores import macro_accuracy, token_accuracy, whole_accuracy
from longrecall.training.captured import CapturedStep, capturable_adamw
from longrecall.training.optimizer import parameter_groups
from longrecall.training.recipe import OptimizerRecipe
from longrecall.training.schedule import rate_factor

MOST_HISTORY = 32
"""Evaluations that a row keeps; of more, every second one is dropped until they fit."""

REACHED = 0.99
"""What `reached_at_step` means where a recipe sets no `stop_at`."""


class ModelRun:
    """A model in training on the examples of its cell.

    Args:
        spec: what to train.
        train, test: the examples, on `device`.
        device: where the model lives. On a GPU the step is recorded here, which takes its first memory.

    Raises:
        UserError: sizes that cannot be. torch.OutOfMemoryError: the GPU is full.
    """

    def __init__(self, spec: RunSpec, train: Examples, test: Examples, device: torch.device) -> None:
        self.spec, self._train, self._test, self.device = spec, train, test, device
        self._settings = spec.training
        self._optimizer_recipe = OptimizerRecipe(
            learning_rate=spec.learning_rate,
            weight_decay=spec.weight_decay,
            betas=tuple(self._settings["betas"]),
            clip=self._settings["clip"],
            warmup=self._settings["warmup"],
            schedule=self._settings["schedule"],
        )
        # A recorded step keeps the precision at which it was recorded.
        self.matmul_precision = torch.get_float32_matmul_precision()
        self._generator = torch.Generator(device).manual_seed(spec.seed)
        self.predictor = self._build()
        self._make_buffers()
        self._optimizer = self._make_optimizer()
        dropping = [self._generator] if self._settings["dropout"] else []
        self._captured = CapturedStep(self._step, self._optimizer, device, self._forget, dropping)
        self._predict_once = self._captured.record(self._predict)
        self._generator.manual_seed(spec.seed)
        self.step = 0
        self.history: list[tuple[int, float | None, float]] = []
        self.best: dict[str, float] = {}
        self.best_step = 0
        self.reached_at: int | None = None
        self.status = "running"
        self.seconds = 0.0

    def _build(self) -> Predictor:
        task = self.spec.create_task()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.spec.seed)
            model = RecurrentLM(self.spec.model.config(task))
            predictor = Predictor(model, task.readout, self._settings["dropout"], self._generator)
        return predictor.to(self.device).train()

    def _make_buffers(self) -> None:
        batch, device = self.spec.batch_size, self.device
        self._ids = torch.zeros(batch, self._train.ids.shape[1], dtype=torch.long, device=device)
        asked = self._train.positions.shape[1]
        self._positions = torch.zeros(batch, asked, dtype=torch.long, device=device)
        self._targets = torch.zeros(batch, asked, dtype=torch.long, device=device)
        self._asked_at = torch.zeros(batch, self._test.positions.shape[1], dtype=torch.long, device=device)
        self._loss = torch.zeros((), device=device)
        chunks = math.ceil(self._test.rows / batch)
        self._answers = torch.zeros(chunks, *self._asked_at.shape, dtype=torch.long, device=device)
        self._guess = torch.zeros_like(self._asked_at)

    def _make_optimizer(self) -> torch.optim.AdamW:
        parameters = {name: p for name, p in self.predictor.named_parameters() if p.requires_grad}
        rate, decay = self.spec.learning_rate, self.spec.weight_decay
        groups: dict[tuple[float, float], list[nn.Parameter]] = {(rate, decay): list(parameters.values())}
        if self._settings["decayed"] == "matrices":
            groups = {}
            for group in parameter_groups(list(parameters), frozenset(), self._optimizer_recipe):
                members = [parameters[name] for name in group.names]
                groups.setdefault((group.learning_rate, group.weight_decay), []).extend(members)
        return capturable_adamw(groups, self.device, self._optimizer_recipe.betas)

    def _autocast(self) -> torch.autocast:
        enabled = self._settings["precision"] == "bf16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, cache_enabled=False, enabled=enabled)

    def _step(self) -> None:
        with self._autocast():
            logits, added = self.predictor(self._ids, self._positions)
        loss = label_loss(logits, self._targets)
        self._loss.add_(loss.detach())
        (loss if added is None else loss + added).backward()
        if self._settings["clip"]:
            nn.utils.clip_grad_norm_(self.predictor.parameters(), self._settings["clip"], foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _predict(self) -> None:
        self.predictor.eval()
        with torch.no_grad(), self._autocast():
            logits, _ = self.predictor(self._ids, self._asked_at)
        self._guess.copy_(logits.argmax(-1))
        self.predictor.train()

    def _forget(self) -> None:
        self._loss.zero_()

    def work(self) -> Iterator[bool]:
        """Train to the end; yield after every step, True when something was enqueued, False while the GPU is busy."""
        started = time.perf_counter()
        settings, total = self._settings, steps_of(self.spec)
        per_epoch = total // settings["epochs"]
        every = settings["evaluate_every"] or per_epoch
        for epoch in range(settings["epochs"]):
            order = epoch_order(self._train.rows, self.spec.batch_size, settings["shuffle"], self.spec.seed, epoch)
            with self._captured.on_stream():
                order = order.to(self.device)
            for rows in order:
                at = epoch * per_epoch if settings["schedule_unit"] == "epoch" else self.step
                self._advance(rows, rate_factor(at, total, self._optimizer_recipe))
                self.step += 1
                yield True
                if self.step % every == 0 or self.step == total:
                    yield from self._evaluate()
                    if self.status != "running":
                        self.seconds = time.perf_counter() - started
                        return
        self.status = "done"
        self.seconds = time.perf_counter() - started

    def _advance(self, rows: Tensor, factor: float) -> None:
        def fill() -> None:
            self._captured.set_rates(factor)
            torch.index_select(self._train.ids, 0, rows, out=self._ids)
            torch.index_select(self._train.positions, 0, rows, out=self._positions)
            torch.index_select(self._train.targets, 0, rows, out=self._targets)

        self._captured.run(fill)

    def _evaluate(self) -> Iterator[bool]:
        order = epoch_order(self._test.rows, self.spec.batch_size, False, 0, 0)
        with self._captured.on_stream():
            for chunk, rows in enumerate(order.to(self.device)):
                torch.index_select(self._test.ids, 0, rows, out=self._ids)
                torch.index_select(self._test.positions, 0, rows, out=self._asked_at)
                self._predict_once()
                self._answers[chunk].copy_(self._guess)
            total = self._loss.clone()
            self._loss.zero_()
        yield from self.reached(self.mark())
        since = self.step - (self.history[-1][0] if self.history else 0)
        loss = float(total) / max(1, since)
        found = scores(self._answers.flatten(0, 1)[: self._test.rows], self._test.targets[:-1])
        self._take(loss, found)

    def mark(self) -> torch.cuda.Event | None:
        """Return the event that everything enqueued so far is done; None without a GPU, where it is."""
        if self._captured.stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._captured.stream)
        return event

    def reached(self, event: torch.cuda.Event | None) -> Iterator[bool]:
        """Yield False until the event of a `mark` has come."""
        while event is not None and not event.query():
            yield False

    def _take(self, loss: float, found: dict[str, float]) -> None:
        """Keep an evaluation, and see whether the run is over."""
        settings = self._settings
        value = found[settings["metric"]]
        self.history.append((self.step, loss if math.isfinite(loss) else None, value))
        if not math.isfinite(loss):
            self.status = "diverged"
            return
        if not self.best or value > self.best[settings["metric"]]:
            self.best, self.best_step = found, self.step
        if self.reached_at is None and value >= (settings["stop_at"] or REACHED):
            self.reached_at = self.step
        if settings["stop_at"] is not None and value >= settings["stop_at"]:
            self.status = "done"

    def row(self) -> dict[str, Any]:
        """Return the row of a run that has ended."""
        parameters, state_size = sizes(self.spec)
        total = steps_of(self.spec)
        return {
            **self.spec.row(),
            "parameters": parameters,
            "state_size": state_size,
            "steps": self.step,
            "epochs": round(self.step * self._settings["epochs"] / total, 3),
            **{metric: self.best.get(metric, 0.0) for metric in METRICS},
            "best_step": self.best_step,
            "reached_at_step": self.reached_at,
            # A time on CPUs that other work shares says nothing.
            "seconds": round(self.seconds, 3) if self.device.type == "cuda" else None,
            "matmul_precision": self.matmul_precision,
            "status": self.status,
            "history": [list(entry) for entry in thinned(self.history)],
        }

    def close(self) -> None:
        """Wait for what is enqueued and give the memory back."""
        if self._captured.stream is not None:
            self._captured.stream.synchronize()
        self._captured.release()
        del self._predict_once, self.predictor, self._optimizer


def scores(answers: Tensor, targets: Tensor) -> dict[str, float]:
    """Return each of `METRICS` for answers and targets, int64 ``[N, M]`` each, -100 where nothing is asked.

    Where every row has as many labels as any other (MQAR), accuracy is also the mean over rows.
    """
    pair = answers.cpu().numpy(), targets.cpu().numpy()
    values = (token_accuracy(*pair), whole_accuracy(*pair), macro_accuracy(*pair))
    return dict(zip(METRICS, values, strict=True))


def thinned(history: list[tuple[int, float | None, float]]) -> list[tuple[int, float | None, float]]:
    """Return at most `MOST_HISTORY` entries, evenly spread; the last one always stays."""
    while len(history) > MOST_HISTORY:
        history = history[::-2][::-1]
    return history


def failed_row(spec: RunSpec, error: BaseException) -> dict[str, Any]:
    """Return the row of a run that could not be trained, with the reason in one line."""
    reason = " ".join(str(first_cause(error)).split()) or type(error).__name__
    try:
        parameters, state_size = sizes(spec)
    except ValueError:  # a UserError: there is no such model
        parameters = state_size = 0
    empty = {metric: None for metric in METRICS}
    return {
        **spec.row(),
        **{"parameters": parameters, "state_size": state_size, "steps": 0, "epochs": 0.0},
        **empty,
        **{"best_step": None, "reached_at_step": None, "seconds": None, "matmul_precision": None, "status": "failed"},
        "reason": reason[:300],
        "history": [],
    }


def first_cause(error: BaseException) -> BaseException:
    """Return the error that a failed recording hides: ending it raises another one, which says nothing."""
    if isinstance(error, RuntimeError) and "captur" in str(error) and error.__context__ is not None:
        return first_cause(error.__context__)
    return error
