"""What the harness measured, as result entries of ours."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from longrecall.evaluation.harness.task import PREFIX
from longrecall.evaluation.outcomes import pack_answers, pack_scores
from longrecall.evaluation.statistics import Interval, bootstrap_ratio_interval, wilson_interval

_STDERR = "_stderr"
_Z = 1.959963984540054
"""Half of a 95% interval, in standard errors."""


@contextlib.contextmanager
def single_process() -> Iterator[None]:
    """Let the harness resample in this process: forking one that holds a model, or a GPU, is not safe."""
    name = "DISABLE_MULTIPROC"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def result_entries(found: Mapping[str, Any], diverged: Mapping[str, int] | None = None) -> list[dict[str, Any]]:
    """Return entries ``{"task": "lm_eval:<name>", "cell", "metric", "value", "count", "low", "high", ...}``.

    `found`: what ``lm_eval.evaluator.evaluate`` returns with samples; `diverged`: documents of a task with logits that
    were not finite. The metric has the name of its filter added where
    there is one. RULER's metrics, which are lengths, become cells ``{"length"}``; lengths without documents are left
    out. The interval is Wilson's for shares of right documents, the bootstrap's for ratios (perplexities), else 1.96
    standard errors of the harness to both sides; None where it gives none. ``stderr``: the harness's. ``available``:
    documents that the task has. A number that is not finite is None.
    """
    entries = []
    for name, numbers in found["results"].items():
        sizes = found.get("n-samples", {}).get(name, {})
        for key, value in numbers.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith(_STDERR) or isinstance(value, str):
                continue
            if metric.isdecimal() and value == -1:
                continue
            each = _of_documents(found.get("samples", {}).get(name, []), metric, filter_name)
            entry = _entry(name, metric, filter_name, value, numbers, each, sizes)
            marks = {"diverged": (diverged or {}).get(name, 0), "version": str(found["versions"].get(name))}
            entries.append(entry | marks)
    return entries


def _of_documents(samples: Sequence[Mapping[str, Any]], metric: str, filter_name: str) -> list[Any]:
    """Return the metric of every document that has it; -1 is RULER's mark for those of another length."""
    mine = [sample[metric] for sample in samples if sample["filter"] == filter_name and metric in sample]
    return [value for value in mine if value != -1] if metric.isdecimal() else mine


def _entry(
    name: str,
    metric: str,
    filter_name: str,
    value: float,
    numbers: Mapping[str, Any],
    each: Sequence[Any],
    sizes: Mapping[str, int],
) -> dict[str, Any]:
    stderr = numbers.get(f"{metric}{_STDERR},{filter_name}")
    stderr = float(stderr) if isinstance(stderr, int | float) and math.isfinite(stderr) else None
    count = len(each) or int(numbers.get("sample_len", sizes.get("effective", 0)))
    value = float(value)
    interval, outcomes = _judged(value, metric, each, stderr)
    suffix = "" if filter_name == "none" else f" ({filter_name})"
    entry = {
        "task": f"{PREFIX}{name}",
        "cell": {"length": int(metric)} if metric.isdecimal() else {},
        "metric": ("contains" if metric.isdecimal() else metric) + suffix,
        "value": value if math.isfinite(value) else None,
        "count": count,
        "low": None if interval is None else interval[0],
        "high": None if interval is None else interval[1],
        "sequences": count,
        "stderr": stderr,
        "available": int(sizes.get("original", count)),
    }
    return entry if outcomes is None else entry | {"outcomes": outcomes}


def _judged(
    value: float, metric: str, each: Sequence[Any], stderr: float | None
) -> tuple[Interval | None, dict[str, Any] | None]:
    """Return (interval, outcomes) of a metric from what it is on every document."""
    if not math.isfinite(value):
        return None, None
    if each and all(isinstance(number, bool | int | float | np.number) for number in each):
        numbers = np.array(each, dtype=np.float64)
        # Only of a mean are the documents' numbers what the metric is made of.
        if math.isclose(float(numbers.mean()), value, rel_tol=1e-9, abs_tol=1e-12):
            if np.isin(numbers, (0.0, 1.0)).all():
                right = numbers.astype(np.int64)
                return wilson_interval(int(right.sum()), len(right)), pack_answers(right, np.ones_like(right))
            return _around(value, stderr), pack_scores(numbers)
    ratio = _ratio_interval(value, each)
    return (ratio or _around(value, stderr)), None


def _ratio_interval(value: float, each: Sequence[Any]) -> Interval | None:
    """Return the interval of ``f(sum of logs / sum of weights)``: the harness's perplexities and bits per byte."""
    if not each or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in each):
        return None
    logs, weights = np.array(each, dtype=np.float64).T
    if not np.isfinite(logs).all() or not weights.sum() > 0:
        return None
    ends = bootstrap_ratio_interval(logs, weights)
    if ends is None:
        return None
    mean = float(logs.sum() / weights.sum())
    for spell in (lambda x: math.exp(-x), lambda x: -x / math.log(2), lambda x: x):
        if math.isclose(spell(mean), value, rel_tol=1e-6):
            low, high = sorted(map(spell, ends))
            return low, high
    return None


def _around(value: float, stderr: float | None) -> Interval | None:
    return None if stderr is None else (value - _Z * stderr, value + _Z * stderr)
