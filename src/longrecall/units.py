"""Lengths as people write them: ``512``, ``4k``, ``1m`` (k = 1024 tokens), and sizes of memory."""

from __future__ import annotations

import re

from longrecall.errors import UserError

_FACTORS = {"": 1, "k": 1024, "m": 1024 * 1024}
_LONGEST = 2**53
"""Whole numbers up to here are exact as doubles too, which JSON readers make of them."""
_LENGTH = re.compile(r"\s*([0-9]{1,4000})\s*([kKmM]?)\s*")


def parse_length(text: str | int) -> int:
    """Return a positive number of tokens from ``512``, ``"512"``, ``"4k"`` (4096) or ``"1m"`` (1048576).

    Raises `UserError` for anything else: fractions, signs, zero, other suffixes.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        value = text
    else:
        match = _LENGTH.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise UserError(f"length {text!r} is not a number of tokens; write it like 512, 4k or 1m (k = 1024)")
        value = int(match[1]) * _FACTORS[match[2].lower()]
    if value < 1:
        raise UserError(f"length {text!r} must be at least 1 token")
    if value > _LONGEST:
        raise UserError(f"length {text!r} is too long; it must be at most {_LONGEST:,} tokens")
    return value


def format_length(length: int) -> str:
    """Return the shortest exact spelling of a length: 512, ``4k``, ``1m``; the inverse of `parse_length`."""
    for suffix in ("m", "k"):
        if length and length % _FACTORS[suffix] == 0:
            return f"{length // _FACTORS[suffix]}{suffix}"
    return str(length)


def format_bytes(count: int) -> str:
    """Return a number of bytes with a binary unit, e.g. `96.0 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
