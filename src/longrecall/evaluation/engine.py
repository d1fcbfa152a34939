"""Running tasks on a model: every (task, cell) once, resumable, into one result."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tqdm import tqdm

from longrecall import __version__
from longrecall.errors import UserError
from longrecall.evaluation.position_loss import PositionLoss
from longrecall.evaluation.recall import measure_cell, sequences_needed
from longrecall.evaluation.results import (
    SCHEMA,
    environment,
    now,
    read_json,
    read_result,
    summarise,
)
from longrecall.files import check_writable, write_json
from longrecall.tasks.bits_per_byte import BitsPerByte
from longrecall.tasks.encoding import Cell, PieceEncoder, cell_key
from longrecall.tasks.registry import RecallTask, Task, create_task
from longrecall.units import parse_length

# Logits of one segment in float32: 2**28 numbers are 1 GiB.
_LOGIT_BUDGET = 2**28
_TEXT_OPTIONS = {"bits_per_byte": "text", "phonebook": "distractor", "babilong": "haystack"}


@dataclass(frozen=True)
class _Job:
    """A unit that is done or not done: one cell of a recall task, or all ranges of one text at once."""

    key: str
    tokens: int
    run: Callable[[Callable[[int], object]], list[dict[str, Any]]]


def evaluate(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str | Task],
    lengths: Sequence[int | str],
    samples: int,
    seed: int = 0,
    *,
    text: str | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    batch_tokens: int = 16384,
    segment_tokens: int = 2048,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    checkpoint: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure `model` on `tasks` and return a result as docs/architecture.md describes it.

    Args:
        model: a `RecurrentLM` (or any causal model of transformers that takes and returns `past_key_values`).
        tokenizer: of transformers, or anything with the parts that the tasks use.
        tasks: names (``phonebook``, ``passkey``, ``bits_per_byte``, ``copying``, ``babilong``) or task objects.
        lengths: tokens (512, "4k"): the prompt lengths of passkey and babilong; the longest is the window of
            bits_per_byte. For copying: letters of the string.
        samples: answers per cell of a recall task (rounded up to whole sequences), windows of text at most.
        seed: of samples and bootstraps; a sample depends on (seed, task, cell, index) only.
        text: for bits_per_byte, as the distractor of phonebook and the haystack of babilong.
        options: per task name the fields of its class, e.g. ``{"phonebook": {"pairs": (2, 4)}}``.
        batch_tokens: tokens that one forward pass reads at most.
        segment_tokens: columns read at once; longer sequences carry their state, so memory stays flat.
        out: result file. While it is not complete, finished cells are kept in ``<out>.partial``.
        resume: skip what an earlier run with the same settings finished.
        progress: show a bar with the time left on stderr, where that is a terminal.
        checkpoint: recorded as "checkpoint"; made from the model when None.

    Raises:
        UserError: bad settings, text too short, a partial result of other settings, an unwritable `out`.
    """
    sizes = _check_numbers(lengths, samples, batch_tokens, segment_tokens)
    chosen = create_tasks(tasks, text, options)
    about = dict(checkpoint) if checkpoint is not None else describe_model(model)
    settings = _settings(chosen, sizes, samples, seed, model)
    store = _Store(out, settings, about.get("fingerprint"), resume)
    if store.complete is not None:
        return store.complete

    batch_tokens = max(1, min(batch_tokens, _LOGIT_BUDGET // int(model.config.vocab_size)))
    segment = min(segment_tokens, batch_tokens)
    jobs = _jobs(model, tokenizer, chosen, sizes, samples, seed, batch_tokens, segment)
    training = bool(getattr(model, "training", False))
    model.eval()
    try:
        _run(jobs, store, progress)
    finally:
        model.train(training)
    entries = [entry for job in jobs for entry in store.done[job.key]]
    result = _result(entries, about, settings, str(model.device))
    store.finish(result)
    return result


def _run(jobs: Sequence[_Job], store: _Store, progress: bool) -> None:
    open_jobs = [job for job in jobs if job.key not in store.done]
    total = sum(job.tokens for job in open_jobs)
    with tqdm(
        total=total, unit="tok", unit_scale=True, desc="eval", disable=None if progress else True, leave=False
    ) as bar:
        for job in open_jobs:
            bar.set_description(job.key)
            started = time.perf_counter()
            entries = job.run(bar.update)
            seconds = round(time.perf_counter() - started, 3)
            store.add(job.key, [entry | {"seconds": seconds} for entry in entries])


def _jobs(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[Task],
    lengths: list[int],
    samples: int,
    seed: int,
    batch_tokens: int,
    segment_tokens: int,
) -> list[_Job]:
    """Return what is to do. Draws the first sample of each cell, so impossible cells fail before anything runs."""
    encode = PieceEncoder(tokenizer)

    def text_job(task: BitsPerByte) -> _Job:
        loss = PositionLoss(task, tokenizer, lengths, samples)
        key = cell_key(task.name, {"length": max(lengths)})
        return _Job(key, loss.tokens, lambda advance: loss.run(model, batch_tokens, segment_tokens, seed, advance))

    def cell_job(task: RecallTask, cell: Cell) -> _Job:
        tokens = len(task.sample(encode, cell, 0, seed).input_ids) * sequences_needed(task, cell, samples)
        return _Job(
            cell_key(task.name, cell),
            tokens,
            lambda advance: measure_cell(
                model, tokenizer, encode, task, cell, samples, seed, batch_tokens, segment_tokens, advance
            ),
        )

    jobs: list[_Job] = []
    for task in tasks:
        if isinstance(task, BitsPerByte):
            jobs.append(text_job(task))
        else:
            jobs.extend(cell_job(task, cell) for cell in task.cells(lengths))
    return jobs


class _Store:
    """Finished cells, on disk after each one when there is an `out`."""

    def __init__(self, out: str | Path | None, settings: dict[str, Any], fingerprint: Any, resume: bool) -> None:
        self.done: dict[str, list[dict[str, Any]]] = {}
        self.complete: dict[str, Any] | None = None
        self._out = None if out is None else Path(out)
        self._head = {"schema": SCHEMA, "kind": "partial evaluation", "fingerprint": fingerprint, "settings": settings}
        if self._out is None:
            if resume:
                raise UserError("resume needs an output file (--out): that is where finished cells are kept")
            return
        check_writable(self._out)
        self._partial = self._out.with_name(self._out.name + ".partial")
        if resume and self._partial.exists():
            data = read_json(self._partial)
            self._refuse_other(self._partial, data.get("settings"), data.get("fingerprint"))
            self.done = dict(data.get("done", {}))
        elif resume and self._out.exists():
            result = read_result(self._out)
            self._refuse_other(self._out, result["settings"], result["checkpoint"].get("fingerprint"))
            self.complete = result

    def _refuse_other(self, path: Path, settings: Any, fingerprint: Any) -> None:
        old = {"fingerprint": fingerprint, **(settings if isinstance(settings, dict) else {})}
        new = {"fingerprint": self._head["fingerprint"], **dict(self._head["settings"])}
        different = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
        if different:
            raise UserError(
                f"cannot resume {path}: it was made with other settings ({', '.join(different)}); "
                "repeat the same call, or leave out --resume to start over"
            )

    def add(self, key: str, entries: list[dict[str, Any]]) -> None:
        self.done[key] = entries
        if self._out is not None:
            write_json(self._partial, {**self._head, "done": self.done})

    def finish(self, result: dict[str, Any]) -> None:
        if self._out is not None:
            write_json(self._out, result)
            self._partial.unlink(missing_ok=True)


def describe_model(model: Any, path: str = "", surgery: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the "checkpoint" part of a result: path, fingerprint, parameters, state size, trained length, surgery."""
    return {
        "path": path,
        "fingerprint": model.fingerprint() if hasattr(model, "fingerprint") else None,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state_size": model.state_size() if hasattr(model, "state_size") else None,
        "context_length": getattr(model.config, "context_length", None),
        "surgery": list(surgery),
    }


def _result(
    entries: list[dict[str, Any]], about: dict[str, Any], settings: dict[str, Any], device: str
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "kind": "evaluation",
        "created": now(),
        "longrecall": __version__,
        "environment": environment(device),
        "checkpoint": about,
        "settings": settings,
        "results": entries,
        "summary": summarise(entries),
    }


def _check_numbers(lengths: Sequence[int | str], samples: int, batch_tokens: int, segment_tokens: int) -> list[int]:
    sizes = sorted({parse_length(length) for length in lengths})
    if not sizes:
        raise UserError("give at least one length, for example --lengths 512,4k")
    for name, value in (("samples", samples), ("batch-tokens", batch_tokens), ("segment-tokens", segment_tokens)):
        if value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    return sizes


def create_tasks(
    tasks: Sequence[str | Task], text: str | None = None, options: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Task]:
    """Return tasks for names, with their options and the text where a task uses one; task objects stay as they are.

    Raises `UserError` for unknown or repeated tasks, unknown or bad options, and options of a task not listed.
    """
    options = options or {}
    chosen: list[Task] = []
    for task in tasks:
        if isinstance(task, str):
            given = dict(options.get(task, {}))
            if text is not None and task in _TEXT_OPTIONS:
                given.setdefault(_TEXT_OPTIONS[task], text)
            chosen.append(create_task(task, **given))
        else:
            chosen.append(task)
    names = [task.name for task in chosen]
    if not names:
        raise UserError("give at least one task, for example --tasks phonebook")
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"task {name} is listed {names.count(name)} times; list it once")
    for name in options:
        if name not in names:
            raise UserError(f"there are options for {name}, but it is not among the tasks {', '.join(names)}")
    return chosen


def _settings(tasks: Sequence[Task], lengths: list[int], samples: int, seed: int, model: Any) -> dict[str, Any]:
    """Return everything that decides the numbers, as plain JSON; long texts as their hash."""
    return {
        "tasks": [task.name for task in tasks],
        "lengths": lengths,
        "samples": samples,
        "seed": seed,
        "dtype": str(getattr(model, "dtype", "unknown")).removeprefix("torch."),
        "options": {task.name: _plain_options(task) for task in tasks},
    }


def _plain_options(task: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for field in fields(task):
        value = getattr(task, field.name)
        if isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, str) and field.name in _TEXT_OPTIONS.values():
            value = {"sha256": hashlib.sha256(value.encode("utf-8")).hexdigest(), "characters": len(value)}
        plain[field.name] = value
    return plain
