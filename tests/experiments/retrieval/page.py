"""docs/retrieval_evidence.md, the pages of its folder and the scripts that made it, for the tests of the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.common import pages
from experiments.retrieval import report
from longrecall.sweep.grid import RunSpec

ROOT = Path(__file__).resolve().parents[3]


def page_prose() -> str:
    """The pages without their tables, as one line."""
    texts = [path.read_text(encoding="utf-8") for path in pages.pages_of(report.PAGE)]
    lines = "\n".join(texts).split("\n")
    return " ".join(" ".join(line for line in lines if not line.startswith("|")).split()).replace("**", "")


def cell_of(spec: RunSpec) -> tuple[Any, ...]:
    """The cell of table 11 that a run belongs to: mixer, layer with retrieval, length, width."""
    model = spec.model.description()
    layer = None if model["retrieval"] is None else model["retrieval"]["layer"]
    return model["mixer"], layer, spec.settings["length"], model["hidden_size"]
