"""What an evaluation is asked to do: tasks and their options, numbers, and the settings that decide the result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import nn

from longrecall.errors import UserError
from longrecall.evaluation.harness import PREFIX, HarnessTask
from longrecall.evaluation.text_metrics import TextMetrics
from longrecall.models.accounting import transformer_cache_size
from longrecall.models.config import RecurrentConfig
from longrecall.models.quantising import quantised_as
from longrecall.tasks.registry import Task, TextMetricTask, create_task, declaration_of, task_names
from longrecall.units import parse_length


def check_numbers(lengths: Sequence[int | str], samples: int, batch_tokens: int, segment_tokens: int) -> list[int]:
    """Return the lengths in tokens, ascending; raise `UserError` for none, and for numbers below 1."""
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
            option = declaration_of(task).text_option
            if text is not None and option:
                given.setdefault(option, text)
            create: Callable[..., Any] = HarnessTask.create if task.startswith(PREFIX) else create_task
            chosen.append(create(task, **given))
        else:
            chosen.append(task)
    names = [task.name for task in chosen]
    if not names:
        raise UserError(f"give at least one task, for example --tasks {task_names()[0]}")
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"task {name} is listed {names.count(name)} times; list it once")
    for name in options:
        if name not in names:
            raise UserError(f"there are options for {name}, but it is not among the tasks {', '.join(names)}")
    for task in chosen:
        if isinstance(task, TextMetricTask):
            # A package or a word list that is missing is better said before the work.
            TextMetrics(task.text_metrics)
    return chosen


def result_settings(tasks: Sequence[Task], lengths: list[int], samples: int, seed: int, model: Any) -> dict[str, Any]:
    """Return everything that decides the numbers, as plain JSON; long texts and files of data as their hash."""
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
        elif isinstance(value, str) and field.name == declaration_of(task).text_option:
            value = {"sha256": hashlib.sha256(value.encode("utf-8")).hexdigest(), "characters": len(value)}
        plain[field.name] = value
    facts = getattr(task, "data_facts", None)
    if facts is not None:
        # Where the rows come from does not decide anything; what they are does.
        plain["data"] = facts()
    return plain


def describe_model(model: Any, path: str = "", surgery: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the "checkpoint" part of a result: path, fingerprint, parameters, state size, trained length, surgery.

    `transformer_cache` is what a Transformer of this width and depth caches a token, in numbers (`models.accounting`);
    None where the model's config does not say its width and depth. With quantised weights it says their dtype, too.
    """
    config = model.config
    kind = quantised_as(model) if isinstance(model, nn.Module) else None
    return {
        "path": path,
        "fingerprint": model.fingerprint() if hasattr(model, "fingerprint") else None,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state_size": model.state_size() if hasattr(model, "state_size") else None,
        "transformer_cache": transformer_cache_size(config, 1) if isinstance(config, RecurrentConfig) else None,
        "context_length": getattr(config, "context_length", None),
        "surgery": list(surgery),
        **({} if kind is None else {"quantized": kind}),
    }
