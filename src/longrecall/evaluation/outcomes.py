"""What became of every example, kept small in a result file, so that two files can be compared pair by pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longrecall.errors import UserError

_DIGITS = 6
"""Decimals of a number that is no count: far finer than any interval."""


@dataclass(frozen=True)
class Outcomes:
    """Score and weight of each unit, float64 [units] each; the metric is sum(scores) / sum(weights).

    A unit is what is independent of the others: a sequence, or all questions about one document. `counted` says that
    scores are right answers out of `weights` answers, whole numbers both.
    """

    scores: NDArray[np.float64]
    weights: NDArray[np.float64]
    counted: bool

    @property
    def value(self) -> float:
        """The metric over all units."""
        return float(self.scores.sum() / self.weights.sum())


def pack_answers(right: ArrayLike, asked: ArrayLike) -> dict[str, Any]:
    """Return the "outcomes" of a result entry from right answers and answers of each unit, int [units] each.

    ``{"form": "bits", "units", "right"}``: one answer each, a bit each; ``{"form": "counts", "units", "bits", "right",
    "asked"}``: `bits` bits a number. Both are hexadecimal, the most significant bit first, zeros at the end to a whole
    byte; `asked` is a plain number where all units have as many. Raises ValueError for counts that cannot be.
    """
    some, all_of = np.asarray(right, dtype=np.int64), np.asarray(asked, dtype=np.int64)
    if some.ndim != 1 or some.shape != all_of.shape or not len(some):
        raise ValueError(f"right {some.shape} and asked {all_of.shape} must be one number for each unit")
    if bool(((some < 0) | (some > all_of)).any()) or not all_of.any():
        raise ValueError("right answers must lie between none and all of those asked")
    if bool((all_of == 1).all()):
        return {"form": "bits", "units": len(some), "right": _to_hex(some, 1)}
    bits = int(all_of.max()).bit_length()
    same = bool((all_of == all_of[0]).all())
    return {
        "form": "counts",
        "units": len(some),
        "bits": bits,
        "right": _to_hex(some, bits),
        "asked": int(all_of[0]) if same else _to_hex(all_of, bits),
    }


def pack_scores(scores: ArrayLike, weights: ArrayLike | None = None) -> dict[str, Any] | None:
    """Return the "outcomes" of a metric that is a mean or a ratio of sums, from float [units]; None if not all finite.

    ``{"form": "scores", "scores", "weights"}``, texts of numbers with spaces between, where a list would take a
    line for each; without weights every unit counts once.
    """
    top = np.asarray(scores, dtype=np.float64)
    bottom = np.ones_like(top) if weights is None else np.asarray(weights, dtype=np.float64)
    if top.ndim != 1 or top.shape != bottom.shape or not len(top):
        raise ValueError(f"scores {top.shape} and weights {bottom.shape} must be one number for each unit")
    if not (np.isfinite(top).all() and np.isfinite(bottom).all() and (bottom >= 0).all() and bottom.sum() > 0):
        return None
    packed = {"form": "scores", "scores": _to_text(top)}
    return packed if weights is None else packed | {"weights": _to_text(bottom)}


def unpack(data: Any, where: str) -> Outcomes:
    """Return what `pack_answers` or `pack_scores` packed; raise `UserError`, beginning with `where`, for all else."""
    try:
        return _unpacked(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{where}: its outcomes are damaged ({reason}); run eval again") from error


def _unpacked(data: Mapping[str, Any]) -> Outcomes:
    form = data["form"]
    if form == "scores":
        scores = _from_text(data["scores"])
        weights = _from_text(data["weights"]) if "weights" in data else np.ones_like(scores)
        if not len(scores) or scores.shape != weights.shape:
            raise ValueError("scores and weights differ in number")
        if not np.isfinite(scores).all() or not np.isfinite(weights).all():
            raise ValueError("a score or a weight is not finite")
        if (weights < 0).any() or weights.sum() <= 0:
            raise ValueError("weights must not be negative, nor all zero")
        return Outcomes(scores, weights, counted=False)
    if form not in ("bits", "counts"):
        raise ValueError(f"unknown form {form!r}")
    units, bits = int(data["units"]), 1 if form == "bits" else int(data["bits"])
    if units < 1 or not 1 <= bits <= 32:
        raise ValueError(f"{units} units of {bits} bits")
    right = _from_hex(data["right"], units, bits)
    given = 1 if form == "bits" else data["asked"]
    asked = np.full(units, int(given)) if isinstance(given, int) else _from_hex(given, units, bits)
    if (right > asked).any() or not asked.any():
        raise ValueError("more right answers than answers")
    return Outcomes(right.astype(np.float64), asked.astype(np.float64), counted=True)


def _to_hex(numbers: NDArray[np.int64], bits: int) -> str:
    places = np.arange(bits - 1, -1, -1)
    return np.packbits(((numbers[:, None] >> places) & 1).astype(np.uint8)).tobytes().hex()


def _from_hex(text: str, units: int, bits: int) -> NDArray[np.int64]:
    raw = bytes.fromhex(text)
    if len(raw) != -(-units * bits // 8):
        raise ValueError(f"{len(raw)} bytes do not hold {units} numbers of {bits} bits")
    flat = np.unpackbits(np.frombuffer(raw, dtype=np.uint8), count=units * bits).reshape(units, bits)
    places = np.arange(bits - 1, -1, -1)
    numbers: NDArray[np.int64] = (flat.astype(np.int64) << places).sum(axis=1)
    return numbers


def _to_text(values: NDArray[np.float64]) -> str:
    return " ".join(repr(int(v) if v.is_integer() else round(v, _DIGITS)) for v in values.tolist())


def _from_text(text: str) -> NDArray[np.float64]:
    return np.array([float(word) for word in text.split(" ")], dtype=np.float64)
