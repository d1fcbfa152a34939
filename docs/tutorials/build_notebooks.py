"""Make the notebooks of this folder from the scripts beside them: python build_notebooks.py.

A script is in the percent format: ``# %%`` begins a cell of code, ``# %% [markdown]`` one of text, whose lines are
comments. ``tags=["parameters"]`` marks the cell whose values a reader (or a test) may change. Notebooks have no
outputs: the plots are for the reader to make.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SCRIPTS = tuple(path for path in sorted(FOLDER.glob("*.py")) if path != Path(__file__))
_CELL = re.compile(r"^# %%(?P<head>.*)\n", flags=re.MULTILINE)


def cells_of(script: str) -> list[dict[str, Any]]:
    """Return the cells of a percent script as a notebook (nbformat 4.5) holds them; ids are their numbers."""
    before, *parts = _CELL.split(script)
    if before.strip():
        raise ValueError("a tutorial begins with a cell: # %% [markdown]")
    return [
        _cell(f"cell-{number}", head, body)
        for number, (head, body) in enumerate(zip(parts[::2], parts[1::2], strict=True))
    ]


def _cell(name: str, head: str, body: str) -> dict[str, Any]:
    text = body.strip("\n")
    if "[markdown]" in head:
        source = "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.split("\n"))
        return {"cell_type": "markdown", "id": name, "metadata": {}, "source": source.splitlines(keepends=True)}
    tags = re.search(r"tags=(\[.*\])", head)
    return {
        "cell_type": "code",
        "execution_count": None,
        "id": name,
        "metadata": {} if tags is None else {"tags": json.loads(tags[1])},
        "outputs": [],
        "source": text.splitlines(keepends=True),
    }


def notebook(script: Path) -> str:
    """Return the text of the .ipynb file that a script becomes."""
    content = {
        "cells": cells_of(script.read_text(encoding="utf-8")),
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write every notebook beside its script."""
    for script in SCRIPTS:
        script.with_suffix(".ipynb").write_text(notebook(script), encoding="utf-8")


if __name__ == "__main__":
    main()
