"""Diagnosis files, checked when read (docs/diagnostics.md, "The result file"); `longrecall.files` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longrecall.errors import UserError
from longrecall.evaluation.journal import Kind
from longrecall.evaluation.results import SCHEMA, read_json

_SECTIONS: dict[str, type] = {
    "checkpoint": dict,
    "environment": dict,
    "settings": dict,
    "perplexity": list,
    "state": dict,
    "remembrance": dict,
    "recall": dict,
    "verdict": list,
}
_LISTS = {"state": ("positions", "layers"), "remembrance": ("points",), "recall": ("points",)}


def read_diagnosis(path: str | Path) -> dict[str, Any]:
    """Return a checked diagnosis; raise `UserError` that names what is wrong with the file."""
    data = read_json(path)
    check_diagnosis(data, str(path))
    return data


DIAGNOSIS = Kind("diagnose", "partial diagnosis", read_diagnosis)
"""What a journal of a diagnosis that is not finished calls itself."""


def check_diagnosis(data: dict[str, Any], source: str) -> None:
    """Raise `UserError` unless `data` is a diagnosis of this schema; `source` names it in the message."""
    if data.get("schema") != SCHEMA:
        raise UserError(f"{source}: schema {data.get('schema')!r} is not {SCHEMA}; it was written by another version")
    if data.get("kind") != "diagnosis":
        raise UserError(f'{source}: kind {data.get("kind")!r} is not "diagnosis"; give a file that diagnose wrote')
    for key, kind in _SECTIONS.items():
        if not isinstance(data.get(key), kind):
            raise UserError(f'{source}: "{key}" is missing or not a {kind.__name__}; run diagnose again')
    for key, names in _LISTS.items():
        for name in names:
            if not isinstance(data[key].get(name), list):
                raise UserError(f'{source}: "{key}" has no list "{name}"; run diagnose again')
