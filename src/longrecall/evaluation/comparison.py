"""Comparing two result files example by example: only where both were asked the same questions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from longrecall.errors import UserError, did_you_mean
from longrecall.evaluation.outcomes import Outcomes, unpack
from longrecall.evaluation.paired import holm, paired_interval, paired_test
from longrecall.evaluation.results import SCHEMA, now, read_result
from longrecall.tasks.encoding import cell_key
from longrecall.tasks.registry import declaration_of
from longrecall.version import __version__

_LESS_IS_BETTER = frozenset({"bits_per_byte", "perplexity"})
_Entries = dict[tuple[str, str], dict[str, Any]]


@dataclass(frozen=True)
class _File:
    """A result file: where it lies, what it holds, and its entries by (task and cell, metric)."""

    source: str
    data: Mapping[str, Any]
    entries: _Entries


def less_is_better(metric: str) -> bool:
    """Return whether a smaller value of `metric` is the better one."""
    return metric in _LESS_IS_BETTER


def asked_alike(first: Mapping[str, Any], second: Mapping[str, Any], task: str) -> bool:
    """Return whether two checked results were asked the same questions of `task`, as their settings say."""
    pair = []
    for data in (first, second):
        entries = [entry for entry in data["results"] if entry["task"] == task]
        pair.append(_File("", data, {(cell_key(task, e["cell"]), e["metric"]): e for e in entries}))
    try:
        _refuse_different(pair[0], pair[1])
    except UserError:
        return False
    return True


def compare_files(
    first: str | Path,
    second: str | Path,
    *,
    tasks: Sequence[str] | None = None,
    metrics: Sequence[str] | None = None,
    alpha: float = 0.05,
) -> dict[str, Any]:
    """Test in every cell that both files hold whether the second checkpoint does better or worse than the first.

    Args:
        first, second: result files of eval, with the same task definitions, seed and number of samples.
        tasks, metrics: names; others are left out, and not corrected for. None means all tasks, and of each its first
            metric that has outcomes: the others judge the same answers again.
        alpha: the chance of one or more false verdicts, over all cells tested together.

    Returns:
        ``{"schema", "kind": "comparison", "created", "longrecall", "first", "second", "settings", "results",
        "left_out"}``. A result has ``task``, ``cell``, ``metric``, ``first``, ``second`` (values), ``difference``
        (second - first) with its 95% interval ``low`` and ``high`` (None where `paired_interval` has none), ``units``,
        ``gained`` and ``lost`` (units on which the second scores higher and lower), ``p`` and ``method``
        (`paired_test`), ``adjusted`` (p by `holm` over all results) and ``verdict`` (``better``, ``worse``,
        ``no clear change``). ``left_out`` lists what only one file has, what has no outcomes, and what a file does not
        define, with the reason.

    Raises:
        UserError: a file that cannot be read or has no outcomes, different definitions (the key is named), seeds or
            counts, an unknown task or metric, nothing in common, an alpha outside of 0 to 1.
    """
    if not 0 < alpha < 1:
        raise UserError(f"alpha must lie between 0 and 1, got {alpha:g}")
    pair = [_read(path) for path in (first, second)]
    _select(pair, tasks, "task")
    if metrics is None:
        _keep_first_metrics(pair)
    else:
        _select(pair, metrics, "metric")
    _refuse_different(pair[0], pair[1])
    results, left_out = _compared(pair[0], pair[1])
    if not results:
        reasons = "; ".join(dict.fromkeys(str(item["reason"]) for item in left_out))
        raise UserError(f"{first} and {second} have no cell to compare ({reasons or 'one of them is empty'})")
    for result, adjusted in zip(results, holm([result["p"] for result in results]), strict=True):
        result["adjusted"] = adjusted
        result["verdict"] = _verdict(result, alpha)
    return {
        "schema": SCHEMA,
        "kind": "comparison",
        "created": now(),
        "longrecall": __version__,
        "first": _about(pair[0]),
        "second": _about(pair[1]),
        "settings": {"alpha": alpha, "correction": "holm", "tests": len(results), "seed": 0},
        "results": results,
        "left_out": left_out,
    }


def _read(path: str | Path) -> _File:
    data = read_result(path)
    entries: _Entries = {}
    for index, entry in enumerate(data["results"]):
        key = (cell_key(entry["task"], entry["cell"]), entry["metric"])
        if key in entries:
            raise UserError(f"{path}: results[{index}] repeats {key[1]} of {key[0]}; run eval again")
        entries[key] = entry
    if all(entry.get("outcomes") is None for entry in entries.values()):
        raise UserError(f"{path} holds no outcomes of single examples (an older version wrote it); run eval again")
    return _File(str(path), data, entries)


def _select(pair: Sequence[_File], names: Sequence[str] | None, what: str) -> None:
    """Drop entries of other tasks or metrics; refuse names that neither file has."""
    if names is None:
        return
    known = sorted({entry[what] for file in pair for entry in file.entries.values()})
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise UserError(f'neither file has the {what} "{name}"; they have {", ".join(known)}.{hint}')
    for file in pair:
        for key in [key for key, entry in file.entries.items() if entry[what] not in names]:
            del file.entries[key]


def _keep_first_metrics(pair: Sequence[_File]) -> None:
    first: dict[str, str] = {}
    entries = [entry for file in pair for entry in file.entries.values()]
    # A perplexity, say, is no mean over examples: the task's next metric can be tested.
    for entry in sorted(entries, key=lambda entry: entry.get("outcomes") is None):
        first.setdefault(entry["task"], entry["metric"])
    for file in pair:
        for key in [key for key, entry in file.entries.items() if entry["metric"] != first[entry["task"]]]:
            del file.entries[key]


def _refuse_different(first: _File, second: _File) -> None:
    """Raise `UserError` that names the key by which the two files' questions differ."""
    pair = (first, second)
    _refuse_unequal(first, second, "generator", [file.data.get("generator") for file in pair])
    tasks = [{entry["task"]: _asked_as(entry) for entry in file.entries.values()} for file in pair]
    for task in sorted(tasks[0].keys() & tasks[1].keys()):
        asked = [found[task] for found in tasks]
        for key in ("samples", "seed"):
            _refuse_unequal(first, second, f"settings.{key}", [_setting(file, task, key) for file in pair])
        hashes = [_definition(file, name) for file, name in zip(pair, asked, strict=True)]
        if None in hashes:
            continue  # left out: what such a file asked is not known
        if hashes[0] != hashes[1]:
            recorded = [_mapping(file.data["settings"].get("options")) for file in pair]
            options = [_mapping(fields.get(name)) for fields, name in zip(recorded, asked, strict=True)]
            for key in sorted(options[0].keys() | options[1].keys()):
                values = [mapping.get(key) for mapping in options]
                _refuse_unequal(first, second, f"settings.options.{task}.{key}", values)
            _refuse_unequal(first, second, f"task_definition.{task}", hashes)
        if declaration_of(task).reads_longest:
            # Its windows are as long as the longest length, so they begin at other places for another one.
            longest = [_longest(file, task) for file in pair]
            _refuse_unequal(first, second, "settings.lengths", longest, f"or leave {task} out with --tasks")


def _asked_as(entry: Mapping[str, Any]) -> str:
    """The task that was asked for: that of the entry, or the group of harness tasks that it is a part of."""
    return str(entry.get("part_of", entry["task"]))


def _setting(file: _File, task: str, key: str) -> Any:
    """What was set for this task, where a file holds several evaluations (`results.joined`), else for all."""
    settings = file.data["settings"]
    own = _mapping(_mapping(settings.get("by_task")).get(task))
    return own.get(key, settings.get(key))


def _longest(file: _File, task: str) -> int:
    lengths = _setting(file, task, "lengths")
    if not isinstance(lengths, list) or not all(isinstance(length, int) for length in lengths):
        raise UserError(f"{file.source}: settings.lengths is {_short(lengths)}, not a list of lengths; run eval again")
    return max(lengths, default=0)


def _definition(file: _File, task: str) -> str | None:
    found = _mapping(file.data.get("task_definition")).get(task)
    return found if isinstance(found, str) else None


def _refuse_unequal(first: _File, second: _File, key: str, values: Sequence[Any], advice: str = "") -> None:
    if values[0] == values[1]:
        return
    texts = [_short(value) for value in values]
    raise UserError(
        f"{first.source} and {second.source} were not asked the same questions: {key} is {texts[0]} in the first and "
        f"{texts[1]} in the second; run eval with equal options on both{', ' + advice if advice else ''}"
    )


def _compared(first: _File, second: _File) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    results: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    for key in dict.fromkeys([*first.entries, *second.entries]):
        entry = (first if key in first.entries else second).entries[key]
        about = {"task": entry["task"], "cell": entry["cell"], "metric": entry["metric"]}
        reason = _why_not(key, first, second)
        if reason:
            left_out.append(about | {"reason": reason})
            continue
        outcomes = [
            unpack(file.entries[key]["outcomes"], f"{file.source}: {key[1]} of {key[0]}") for file in (first, second)
        ]
        _refuse_other_units(first, second, key, outcomes[0], outcomes[1])
        results.append(about | _tested(outcomes[0], outcomes[1]))
    return results, left_out


def _why_not(key: tuple[str, str], *files: _File) -> str:
    """Return why a cell cannot be compared; an empty string where it can."""
    for file in files:
        if key not in file.entries:
            return f"not in {file.source}"
    for file in files:
        task = _asked_as(file.entries[key])
        if _definition(file, task) is None:
            return (
                f"{file.source} has no task_definition.{task}, which says what was asked (an older version wrote it); "
                "run eval, or demo, again"
            )
    for file in files:
        if file.entries[key].get("outcomes") is None:
            known = file.entries[key].get("value") is not None
            return f"no outcomes in {file.source}" if known else f"diverged in {file.source}"
    return ""


def _refuse_other_units(first: _File, second: _File, key: tuple[str, str], a: Outcomes, b: Outcomes) -> None:
    if len(a.scores) != len(b.scores) or a.counted != b.counted or not np.array_equal(a.weights, b.weights):
        counts = [f"{file.entries[key]['count']} in {len(part.scores)}" for file, part in ((first, a), (second, b))]
        raise UserError(
            f"{first.source} and {second.source} were not asked the same questions: {key[1]} of {key[0]} has "
            f"{counts[0]} sequences in the first and {counts[1]} in the second, or their sizes differ. Compare only "
            "checkpoints with the same tokenizer, text and samples"
        )


def _tested(a: Outcomes, b: Outcomes) -> dict[str, Any]:
    test = paired_test(a.scores, b.scores, a.weights, counted=a.counted)
    interval = paired_interval(a.scores, b.scores, a.weights, counted=a.counted)
    return {
        "first": a.value,
        "second": b.value,
        "difference": b.value - a.value,
        "low": None if interval is None else interval[0],
        "high": None if interval is None else interval[1],
        "units": len(a.scores),
        "gained": int((b.scores > a.scores).sum()),
        "lost": int((b.scores < a.scores).sum()),
        "p": test.p,
        "method": test.method,
    }


def _verdict(result: Mapping[str, Any], alpha: float) -> str:
    if result["adjusted"] > alpha or result["difference"] == 0:
        return "no clear change"
    return "better" if (result["difference"] > 0) != less_is_better(result["metric"]) else "worse"


def _about(file: _File) -> dict[str, Any]:
    checkpoint = file.data["checkpoint"]
    keys: Iterable[str] = ("path", "fingerprint", "parameters", "state_size")
    return {"file": file.source} | {key: checkpoint.get(key) for key in keys}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _short(value: Any) -> str:
    text = "absent" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
