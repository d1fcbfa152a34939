"""Maximum recall length: how long a text may be before a model no longer finds what is hidden in it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from longrecall.errors import UserError
from longrecall.evaluation.engine import create_tasks, describe_model, evaluate
from longrecall.evaluation.results import read_result, summarise, summary_intervals
from longrecall.files import write_json
from longrecall.models.checkpoint import open_checkpoint
from longrecall.models.checkpoint_tokenizer import load_tokenizer
from longrecall.models.loading import load, preferred_device
from longrecall.outputs import claim_file, unfinished_work
from longrecall.tasks.encoding import PieceEncoder
from longrecall.tasks.registry import RecallTask, Task
from longrecall.units import parse_length

THRESHOLDS = (0.5, 0.6, 0.7, 0.8)
"""The head-wise expansion paper's: the maximum recall length for t is the longest whose accuracy stays above t."""

STEP = 512
"""Tokens from one length to the next, as in the paper."""

_PARTS = r"\.[0-9]+(\.partial)?"
"""What follows the name of the result file in those of its parts, finished and not."""


def maximum_lengths(
    points: Sequence[Mapping[str, Any]], thresholds: Sequence[float] = THRESHOLDS
) -> dict[str, int | None]:
    """Return threshold -> the longest length such that it and all shorter ones are above it; None where none is.

    `points`: mappings with "length" and "value". Lengths whose accuracy is unknown (None) count as failures.
    """
    best: dict[str, int | None] = {}
    for threshold in thresholds:
        best[str(threshold)] = None
        for point in sorted(points, key=lambda point: int(point["length"])):
            if point["value"] is None or point["value"] <= threshold:
                break
            best[str(threshold)] = int(point["length"])
    return best


def holds(task: RecallTask, encode: PieceEncoder, length: int) -> bool:
    """Return whether a sample of `task` can have `length` tokens."""
    try:
        task.sample(encode, task.cells([length])[0], 0, 0)
    except UserError:
        return False
    return True


def search_recall_length(
    model: Any,
    tokenizer: Any,
    task: str | Task,
    longest: int | str,
    samples: int,
    seed: int = 0,
    *,
    step: int | str = STEP,
    thresholds: Sequence[float] = THRESHOLDS,
    text: str | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    checkpoint: Mapping[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Measure `task` at growing lengths until its accuracy falls to the lowest threshold; return one result.

    The lengths are the multiples of `step` up to `longest` that hold the task's question. The search stops after the
    first that is not above the lowest threshold, since no longer one can count: a model that recalls nothing costs one
    short length.

    Args:
        model: as `evaluate` takes it.
        tokenizer: as `evaluate` takes it.
        task: the name or object of a task whose cells have a "length": ``niah_single_3`` and ``niah_single_2`` are the
            paper's (UUIDs and numbers); ``passkey`` works too.
        longest: tokens of the longest text to try (512, "16k").
        samples: per cell.
        seed: of the samples.
        step: tokens from one length to the next.
        thresholds: accuracies between 0 and 1 that must be exceeded.
        text: as in `evaluate`.
        options: as in `evaluate`.
        out: result file. Until the search ends, each finished length is kept in ``<out>.<length>``.
        resume: skip the lengths that an earlier search with the same settings finished.
        force: start over and replace what is there.
        checkpoint: recorded as "checkpoint"; made from the model when None.
        settings: further arguments of `evaluate`.

    Returns:
        A result as `evaluate` returns it, over all lengths that were measured. Its summary has
        ``<task>.recall_length.threshold=<t>``: tokens, 0 where not even the shortest length is above t; its interval
        goes no further than the last length that was measured. Its settings have "search": what was asked for, and in
        "at_least" the thresholds that even the last length was above.

    Raises:
        UserError: a task without lengths, bad numbers, a `longest` that cannot hold the question, and whatever
            `evaluate` raises.

    Source: the state-recall scaling trend of "Scaling up the State Size of RNN LLMs for Long-Context Scenarios".
    """
    (chosen,) = create_tasks([task], text, options)
    levels = sorted(set(thresholds))
    lengths = _lengths(chosen, PieceEncoder(tokenizer), parse_length(longest), parse_length(step))
    if not levels or not 0 <= levels[0] <= levels[-1] < 1:
        raise UserError(f"search: thresholds must lie between 0 and 1, got {list(thresholds)}")
    about = dict(checkpoint) if checkpoint is not None else describe_model(model)
    asked = {
        "task": chosen.name,
        "options": _digest(chosen),
        "longest": parse_length(longest),
        "step": parse_length(step),
        "thresholds": levels,
        "samples": samples,
        "seed": seed,
    }
    parts: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    with claim_file(out, force=force, resume=resume, unfinished=_PARTS):
        earlier = _earlier(out, asked, about) if resume else None
        if earlier is not None:
            _drop_parts(out)  # a kill may have come before they were
            return earlier
        if force:
            _drop_parts(out)
        for length in lengths:
            kept = None if out is None else _part(out, length)
            again = resume and kept is not None
            part = evaluate(
                model,
                tokenizer,
                [chosen],
                [length],
                samples,
                seed,
                out=kept,
                resume=again,
                checkpoint=about,
                **settings,
            )
            parts.append(part)
            low, high = part["summary_intervals"].get(f"{chosen.name}.accuracy", (None, None))
            points.append({"length": length, "value": _accuracy(part["results"]), "low": low, "high": high})
            if points[-1]["value"] is None or points[-1]["value"] <= levels[0]:
                break
        result = _joined(parts, points, asked, levels, lengths[-1])
        if out is not None:
            write_json(Path(out), result)
            _drop_parts(out)
        return result


def search_checkpoint(
    path: str | Path,
    task: str | Task,
    longest: int | str,
    samples: int,
    seed: int = 0,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    quantize: str | None = None,
    text: str | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Load the checkpoint at `path` (a folder or a hub id) and `search_recall_length`, which explains the rest.

    `device` None means CUDA where there is one, else the CPU; `dtype` None means as stored; `quantize` is that of
    `longrecall.load`. What can be checked without the model is checked before it is loaded.
    """
    (chosen,) = create_tasks([task], text, options)
    with claim_file(out, force=force, resume=resume, unfinished=_PARTS):
        opened = open_checkpoint(path)
        tokenizer = load_tokenizer(opened.path, opened.config.vocab_size)
        model = load(path, dtype=dtype, device=preferred_device(device), quantize=quantize)
        about = describe_model(model, str(path), opened.surgery)
        settings |= {"out": out, "resume": resume, "force": force, "checkpoint": about}
        return search_recall_length(model, tokenizer, chosen, longest, samples, seed, **settings)


def _lengths(task: Any, encode: PieceEncoder, longest: int, step: int) -> list[int]:
    """Return the lengths to try, shortest first; raise `UserError` when there is none."""
    if longest < step:
        raise UserError(f"search: the longest length {longest} is below one step of {step}; raise it or lower the step")
    cells = task.cells([longest])
    if not cells or "length" not in cells[0]:
        raise UserError(f"search: task {task.name} has no length to grow; use niah_single_3, niah_single_2 or passkey")
    last = longest // step * step
    # The reason why the longest does not hold a question is the user's to read.
    task.sample(encode, task.cells([last])[0], 0, 0)
    first = next(length for length in range(step, last + 1, step) if length == last or holds(task, encode, length))
    return list(range(first, last + 1, step))


def _accuracy(entries: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the accuracy over all cells of one length."""
    counted = [entry for entry in entries if entry["metric"] == "accuracy"]
    if not counted or any(entry["value"] is None for entry in counted):
        return None
    total = sum(entry["count"] for entry in counted)
    return float(sum(entry["value"] * entry["count"] for entry in counted) / total)


def _joined(
    parts: Sequence[Mapping[str, Any]],
    points: Sequence[Mapping[str, Any]],
    asked: Mapping[str, Any],
    levels: Sequence[float],
    last: int,
) -> dict[str, Any]:
    entries = [entry for part in parts for entry in part["results"]]
    best = maximum_lengths(points, levels)
    name = f"{asked['task']}.recall_length.threshold="
    found = {f"{name}{level}": length or 0 for level, length in best.items()}
    # As of a capacity: what it would be with every length at its lower, and at its upper, end.
    ends = [
        maximum_lengths([{"length": p["length"], "value": p[end]} for p in points], levels) for end in ("low", "high")
    ]
    intervals = {f"{name}{level}": [end[str(level)] or 0 for end in ends] for level in levels}
    at_least = [level for level in levels if best[str(level)] == last]
    measured = [point["length"] for point in points]
    return {
        **parts[-1],
        "settings": {**parts[-1]["settings"], "lengths": measured, "search": {**asked, "at_least": at_least}},
        "results": entries,
        "summary": summarise(entries) | found,
        "summary_intervals": summary_intervals(entries) | intervals,
    }


def _part(out: str | Path, length: int) -> Path:
    return Path(out).with_name(f"{Path(out).name}.{length}")


def _drop_parts(out: str | Path | None) -> None:
    """Remove the files of finished lengths."""
    if out is not None:
        unfinished_work(Path(out), _PARTS, remove=True)


def _digest(task: Any) -> str:
    """Return a hash of everything that a task was made with."""
    options = {field.name: getattr(task, field.name) for field in fields(task)}
    return hashlib.sha256(repr(sorted(options.items())).encode("utf-8")).hexdigest()


def _earlier(out: str | Path | None, asked: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the finished result in `out`, if there is one; refuse one of another search or checkpoint."""
    if out is None:
        raise UserError("resume needs an output file (--out): that is where finished lengths are kept")
    if not Path(out).exists():
        return None
    result = read_result(out)
    search = dict(result["settings"].get("search", {}))
    search.pop("at_least", None)
    different = sorted(key for key in search.keys() | asked.keys() if search.get(key) != asked.get(key))
    if result["checkpoint"].get("fingerprint") != about.get("fingerprint"):
        different.append("checkpoint")
    if different:
        raise UserError(
            f"cannot resume {out}: it was made with other settings ({', '.join(different)}); repeat the same call, or "
            "start over with --force"
        )
    return result
