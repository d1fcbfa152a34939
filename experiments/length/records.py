"""The recorded models of docs/length_generalization.md: which rows an arm has, and what is read off a row."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from experiments.common.intervals import t_interval
from experiments.common.pages import read

Record = dict[str, Any]
Row = dict[str, Any]
RUNS = {
    "first": "length_generalization_healthy.json",
    "second": "length_generalization.json",
    "third": "length_generalization_gla.json",
}
MODELS = {
    "mamba2_n4:6": "second",
    "slow_gla_k32:0": "third",
    "slow_gla_k16:0": "third",
    "gla_k16:1": "second",
    "mamba2_n64": "first",
    "gla_k16": "first",
}
"""The post-trained models and the run that has them."""
ILL = ("mamba2_n4:6", "slow_gla_k32:0", "slow_gla_k16:0")
"""Those that are ill, each with tables of its own."""
ARMS = ("zero", "noise", "fitted_noise", "state_passing", "state_passing_text", "truncated_bptt")
NAMES = {
    "before": "before",
    "zero": "zero (plain)",
    "noise": "noise",
    "fitted_noise": "fitted noise",
    "state_passing": "passing",
    "state_passing_text": "passing, text",
    "truncated_bptt": "truncated BPTT",
}
"""What tables and legends call the arms."""
SPANS = ((0, 512), (512, 2048), (2048, 8192), (8192, 32768), (32768, 65536))
"""Ranges of positions, tokens; each is a union of recorded ranges."""
TRAINED = 512
"""Tokens of a training sequence."""
STORY_LENGTHS = (512, 1024, 2048, 4096, 8192)


def record_of(model: str) -> Record:
    """The run that has a post-trained model."""
    found: Record = read(RUNS[MODELS[model]])
    return found


def rows_of(record: Record, model: str, arm: str) -> list[Row]:
    """The models of an arm in the order of their seeds; `before` is the one model that was not post-trained."""
    if arm == "before":
        return [record["variants"][model]]
    found = [row for row in record["results"] if (row["model"], row["arm"]) == (model, arm)]
    return sorted(found, key=lambda row: row["seed"])


def bits(row: Row, start: int, end: int) -> float:
    """Bits per byte at positions `start` to `end`; a token is a byte, so ranges weigh by their length."""
    inside = [e for e in row["perplexity"] if start <= e["start"] and e["end"] <= end]
    widths = [e["end"] - e["start"] for e in inside]
    if sum(widths) != end - start:
        raise ValueError(f"the recorded ranges do not make up positions {start} to {end}")
    return sum(e["bits_per_byte"] * width for e, width in zip(inside, widths, strict=True)) / sum(widths)


def rise(row: Row) -> float:
    """Loss of the last recorded range (55k to 64k) above the same window's level at 128 to 512, nats per token."""
    return float(row["perplexity"][-1]["rise"])


def growth(row: Row) -> list[list[float]]:
    """Norm of every head's state at the last position over its norm after a training length, layer by layer."""
    at = row["state"]["positions"].index(TRAINED)
    return [[head["norm"][-1] / head["norm"][at] for head in layer["heads"]] for layer in row["state"]["layers"]]


def remembrance(row: Row, start: int) -> dict[str, Any]:
    """The recorded point of EffRem at t = `start`."""
    (point,) = (point for point in row["remembrance"] if point["t"] == start)
    return dict(point)


def stories(row: Row, lengths: tuple[int, ...] = STORY_LENGTHS) -> float:
    """Share of right answers, mean over qa1 to qa5 and `lengths`; every cell has as many questions."""
    return statistics.mean(v for cell, v in row["babilong"].items() if int(cell.split()[1]) in lengths)


def span_name(start: int, end: int) -> str:
    """Name of a range of positions."""
    return "–".join(f"{n // 1024}k" if n >= 1024 else str(n) for n in (start, end))


def letters(length: int) -> Callable[[Row], float]:
    """Share of right letters of strings of `length` letters."""
    return lambda row: row["copying"][str(length)][0]


def key_at(length: int) -> Callable[[Row], float]:
    """Share of pass keys found in `length` tokens."""
    return lambda row: row["passkey"][str(length)]


def bits_at(start: int, end: int) -> Callable[[Row], float]:
    """`bits` of a fixed range."""
    return lambda row: bits(row, start, end)


MEASURES: dict[str, Callable[[Row], float]] = {
    **{f"bits {span_name(*span)}": bits_at(*span) for span in SPANS},
    "rise": rise,
    **{f"key at {n}": key_at(n) for n in (512, 1024, 4096)},
    **{f"{n} letters": letters(n) for n in (20, 40, 64)},
    "strings of 20": lambda row: row["copying"]["20"][1],
    "stories": stories,
}
"""Every column of `levels_table` and `against_table`: a number of one model."""


def differences(record: Record, model: str, arm: str, name: str, other: str = "zero") -> tuple[float, float]:
    """Mean and half interval of `arm` minus `other`, seed by seed."""
    pairs = zip(rows_of(record, model, arm), rows_of(record, model, other), strict=True)
    return t_interval([MEASURES[name](a) - MEASURES[name](b) for a, b in pairs])


def state_size(row: Row) -> int:
    """Numbers in the recurrent state."""
    return sum(layer["key_dim"] * layer["value_dim"] * len(layer["heads"]) for layer in row["state"]["layers"])
