"""One run of a sweep: a small model, its buffers and its recorded steps, advanced a step at a time.

`ModelRun.work` is a generator, so that one loop can keep many runs going: it enqueues a step, hands back control, and
never waits for the GPU itself.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longrecall.errors import UserError, first_line
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.sweep.buffers import Buffers, Shape, shape_of
from longrecall.sweep.examples import Sets, epoch_order, epoch_steps
from longrecall.sweep.grid import Part, RunSpec, sizes, steps_of
from longrecall.sweep.outcomes import REACHED, Outcome, Patience, mean_scores, no_outcome, scores, thinned
from longrecall.sweep.predictor import Predictor, label_loss
from longrecall.training.captured import CapturedStep, capturable_adamw
from longrecall.training.optimizer import parameter_groups
from longrecall.training.recipe import OptimizerRecipe
from longrecall.training.schedule import rate_factor


class ModelRun:
    """A model in training on the examples of its cell.

    Args:
        spec: what to train.
        train, test: the examples of every set, on `device`.
        device: where the model lives. On a GPU the steps are recorded here, which takes its first memory.

    Raises:
        UserError: sizes that cannot be. torch.OutOfMemoryError: the GPU is full.
    """

    def __init__(self, spec: RunSpec, train: Sets, test: Sets, device: torch.device) -> None:
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
        self._loss = torch.zeros((), device=device)
        self._optimizer = self._make_optimizer()
        self._record()
        self._generator.manual_seed(spec.seed)
        self.step = 0
        self.evaluating = False
        """Whether an evaluation has begun that has not been taken yet."""
        self.stopping = False
        """Whether `work` is to pause after an evaluation, before it enqueues another step."""
        self.outcome = Outcome()
        self.outcomes = [Outcome() for _ in test]
        self.patience = Patience()
        self.status = "running"
        self.seconds = 0.0

    @property
    def history(self) -> list[tuple[int, float | None, float]]:
        """Step, mean training loss since the one before and metric of every evaluation."""
        return self.outcome.history

    def _build(self) -> Predictor:
        task = self.spec.create_task()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.spec.seed)
            model = RecurrentLM(self.spec.model.config(task))
            predictor = Predictor(model, task.readout, self._settings["dropout"], self._generator)
        return predictor.to(self.device).train()

    def _record(self) -> None:
        """Record the training step and the answers, each for every shape that a batch has."""
        self._fed = self._buffers_of(self._train, self.spec.train_parts)
        first, *others = dict.fromkeys(self._fed)
        dropping = [self._generator] if self._settings["dropout"] else []
        step = partial(self._step, first)
        self._captured = CapturedStep(step, self._optimizer, self.device, self._forget, dropping)
        for buffers in others:
            buffers.work = self._captured.also(partial(self._step, buffers))
        self._asked = self._buffers_of(self._test, self.spec.test_parts)
        for buffers in dict.fromkeys(self._asked):
            buffers.work = self._captured.record(partial(self._predict, buffers))
        self._answers = [
            buffers.targets.new_zeros(math.ceil(examples.rows / part.batch_size), *buffers.targets.shape)
            for examples, part, buffers in zip(self._test, self.spec.test_parts, self._asked, strict=True)
        ]

    def _buffers_of(self, sets: Sets, parts: tuple[Part, ...]) -> list[Buffers]:
        """The buffers of each set; sets whose batches have one shape share them."""
        shapes = [shape_of(examples, part.batch_size) for examples, part in zip(sets, parts, strict=True)]
        made: dict[Shape, Buffers] = {shape: Buffers.of(shape, self.device) for shape in dict.fromkeys(shapes)}
        return [made[shape] for shape in shapes]

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

    def _step(self, batch: Buffers) -> None:
        with self._autocast():
            logits, added = self.predictor(batch.ids, batch.positions)
        loss = label_loss(logits, batch.targets)
        self._loss.add_(loss.detach())
        (loss if added is None else loss + added).backward()
        if self._settings["clip"]:
            nn.utils.clip_grad_norm_(self.predictor.parameters(), self._settings["clip"], foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _predict(self, batch: Buffers) -> None:
        self.predictor.eval()
        with torch.no_grad(), self._autocast():
            logits, _ = self.predictor(batch.ids, batch.positions)
        batch.targets.copy_(logits.argmax(-1))
        self.predictor.train()

    def _forget(self) -> None:
        self._loss.zero_()

    def work(self) -> Iterator[bool]:
        """Train to the end; yield after every step, True when something was enqueued, False while the GPU is busy."""
        started = time.perf_counter() - self.seconds
        settings, total = self._settings, steps_of(self.spec)
        per_epoch = total // settings["epochs"]
        every = settings["evaluate_every"] or per_epoch
        while self.status == "running" and self.step < total:
            epoch, done = divmod(self.step, per_epoch)
            for index, rows in self._steps_of(epoch)[done:]:
                at = epoch * per_epoch if settings["schedule_unit"] == "epoch" else self.step
                self._advance(index, rows, rate_factor(at, total, self._optimizer_recipe))
                self.step += 1
                self.evaluating = self.step % every == 0 or self.step == total
                yield True
                if self.evaluating:
                    yield from self._evaluate()
                    self.seconds = time.perf_counter() - started
                    if self.status != "running":
                        return
                    if self.stopping and self.step < total:
                        yield False
        self.status = "done"

    def _steps_of(self, epoch: int) -> list[tuple[int, Tensor]]:
        """The number of the set and the rows of each step of an epoch, on the device."""
        found = zip(self._train, self.spec.train_parts, strict=True)
        counts = [(examples.rows, part.batch_size) for examples, part in found]
        steps = epoch_steps(counts, self._settings["shuffle"], self.spec.seed, epoch)
        with self._captured.on_stream():
            moved = torch.cat([rows for _, rows in steps]).to(self.device).split([len(rows) for _, rows in steps])
        return [(index, rows) for (index, _), rows in zip(steps, moved, strict=True)]

    def _advance(self, index: int, rows: Tensor, factor: float) -> None:
        batch, examples = self._fed[index], self._train[index]

        def fill() -> None:
            self._captured.set_rates(factor)
            batch.fill(examples, rows)

        self._captured.run(fill, work=batch.work)

    def _evaluate(self) -> Iterator[bool]:
        with self._captured.on_stream():
            for index in range(len(self._test)):
                self._answer(index)
            total = self._loss.clone()
            self._loss.zero_()
        yield from self.reached(self.mark())
        since = self.step - (self.history[-1][0] if self.history else 0)
        found = [
            scores(answers.flatten(0, 1)[: examples.rows], examples.targets[:-1])
            for answers, examples in zip(self._answers, self._test, strict=True)
        ]
        self._take(float(total) / max(1, since), found)
        self.evaluating = False

    def _answer(self, index: int) -> None:
        """Enqueue the answers to one set of test examples."""
        examples, batch, answers = self._test[index], self._asked[index], self._answers[index]
        order = epoch_order(examples.rows, self.spec.test_parts[index].batch_size, False, 0, 0)
        for chunk, rows in enumerate(order.to(self.device)):
            batch.fill(examples, rows, targets=False)
            if batch.work is not None:
                batch.work()
            answers[chunk].copy_(batch.targets)

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

    def _take(self, loss: float, found: list[dict[str, float]]) -> None:
        """Keep an evaluation on every set, and see whether the run is over."""
        settings, finite = self._settings, math.isfinite(loss)
        metric, stop = settings["metric"], settings["stop_at"]
        mean, lowest = mean_scores(found), min(one[metric] for one in found)
        for outcome, one, value in (
            (self.outcome, mean, lowest),
            *((outcome, one, one[metric]) for outcome, one in zip(self.outcomes, found, strict=True)),
        ):
            outcome.take(self.step, loss if finite else None, one, metric)
            if finite and outcome.reached_at is None and value >= (stop or REACHED):
                outcome.reached_at = self.step
        learned = mean[metric] >= settings.get("patience_from", 0.0)
        if not finite:
            self.status = "diverged"
        elif (stop is not None and lowest >= stop) or self.patience.spent(
            loss, learned, settings.get("patience", 0), settings.get("improvement", 0.0)
        ):
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
            **self.outcome.row(),
            # A time on CPUs that other work shares says nothing.
            "seconds": round(self.seconds, 3) if self.device.type == "cuda" else None,
            "matmul_precision": self.matmul_precision,
            "status": self.status,
            "history": [list(entry) for entry in thinned(self.history)],
            **self._tests(),
        }

    def _tests(self) -> dict[str, Any]:
        """The part of the row on each set of test examples, where there are several."""
        found = [
            {
                "settings": part.settings,
                "rows": part.rows,
                **outcome.row(),
                "history": [[step, value] for step, _, value in thinned(outcome.history)],
            }
            for part, outcome in zip(self.spec.tests, self.outcomes, strict=False)
        ]
        return {"tests": found} if found else {}

    def save(self, path: Path) -> None:
        """Write all that the run needs to go on; not while an evaluation is under way.

        Raises:
            UserError: it cannot be written. What an earlier call wrote stays.
        """
        if self._captured.stream is not None:
            self._captured.stream.synchronize()
        data = {
            **{"key": self.spec.key, "step": self.step, "seconds": self.seconds},
            **{"outcomes": [asdict(outcome) for outcome in (self.outcome, *self.outcomes)]},
            **{"patience": asdict(self.patience), "loss": self._loss, "generator": self._generator.get_state()},
            "model": self.predictor.state_dict(),
            "optimizer": [self._optimizer.state[p] for p in self._trained()],
        }
        partial_path = path.with_name(f"{path.name}.partial")
        try:
            torch.save(data, partial_path)
            partial_path.replace(path)
        except (OSError, RuntimeError) as error:  # of a full disk torch's writer says it in words of its own
            with contextlib.suppress(OSError):
                partial_path.unlink(missing_ok=True)
            reason = (isinstance(error, OSError) and error.strerror) or first_line(error)
            raise UserError(
                f"run.checkpoints: cannot write {path}: {reason}; make room or name another folder, and --resume"
            ) from error

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Go on from what `save` wrote; before the first step."""
        try:
            data = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch and pickle have many
            raise UserError(f"{path} is not a checkpoint of a sweep; delete it") from error
        self.step, self.seconds = data["step"], data["seconds"]
        self.outcome, *self.outcomes = (Outcome.from_dict(outcome) for outcome in data["outcomes"])
        self.patience = Patience(**data["patience"])
        self._loss.copy_(data["loss"])
        self._generator.set_state(data["generator"])
        self.predictor.load_state_dict(data["model"])
        for parameter, saved in zip(self._trained(), data["optimizer"], strict=True):
            state = self._optimizer.state[parameter]
            for name, tensor in saved.items():
                if name in state:  # a recorded step reads where the tensors lie
                    state[name].copy_(tensor)
                else:
                    state[name] = tensor.to(self.device)

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def close(self) -> None:
        """Wait for what is enqueued and give the memory back."""
        if self._captured.stream is not None:
            self._captured.stream.synchronize()
        self._captured.release()
        for batch in (*self._fed, *self._asked):
            batch.work = None
        del self.predictor, self._optimizer


def failed_row(spec: RunSpec, error: BaseException) -> dict[str, Any]:
    """Return the row of a run that could not be trained, with the reason in one line."""
    reason = " ".join(str(first_cause(error)).split()) or type(error).__name__
    try:
        parameters, state_size = sizes(spec)
    except ValueError:  # a UserError: there is no such model
        parameters = state_size = 0
    empty = no_outcome()
    tests = [{"settings": part.settings, "rows": part.rows, **empty, "history": []} for part in spec.tests]
    return {
        **spec.row(),
        **{"parameters": parameters, "state_size": state_size, "steps": 0, "epochs": 0.0},
        **empty,
        **{"seconds": None, "matmul_precision": None, "status": "failed"},
        "reason": reason[:300],
        "history": [],
        **({"tests": tests} if tests else {}),
    }


def first_cause(error: BaseException) -> BaseException:
    """Return the error that a failed recording hides: ending it raises another one, which says nothing."""
    if isinstance(error, RuntimeError) and "captur" in str(error) and error.__context__ is not None:
        return first_cause(error.__context__)
    return error
