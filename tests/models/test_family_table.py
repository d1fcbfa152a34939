"""The page of formats (docs/reference/families.md) against the registry, and against what is found by trying."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from longrecall.models.formats import FORMATS
from longrecall.surgery.registry import METHODS
from tests.models.family_table import HEAD, OPTIONS, PAGE, checkpoints, formats, page, try_all, try_format


def rows() -> dict[str, list[str]]:
    """Format -> the other cells of its row on the page."""
    text = PAGE.read_text(encoding="utf-8").removeprefix(HEAD)
    lines = [line.strip("| ").split(" | ") for line in text.strip().splitlines()[2:]]
    return {cells[0].strip("`"): cells[1:] for cells in lines}


def test_every_format_has_its_row_and_its_proof() -> None:
    found = rows()
    assert list(found) == sorted(formats()), "run python -m tests.models.family_table"
    for name, cells in found.items():
        assert checkpoints(name), f"format {name} has no tiny checkpoint: add a file to tests/models/families/"
        assert tuple(re.findall(r"`(\w+)`", cells[0])) == FORMATS[name].model_types
        assert set(re.findall(r"`(\w+)`", cells[3])) <= set(METHODS)
    assert set(OPTIONS) == set(METHODS)


# A family of experts; all of them are tried by the slow test.
@pytest.mark.parametrize("name", ["nemotron_h"])
def test_the_row_of_a_format_is_what_is_found(name: str, tmp_path: Path) -> None:
    assert try_format(name, tmp_path).cells()[1:] == rows()[name]


@pytest.mark.slow
def test_the_page_is_what_is_found() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(try_all()), "run python -m tests.models.family_table"
