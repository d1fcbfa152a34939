"""docs/evidence.md says what the recorded results say."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module: its folder is on the path when it runs."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    import report_evidence

    return report_evidence


def row(right: list[int], asked: int, error: float = 0.0) -> dict[str, Any]:
    return {"phonebook": {str(i): [r, asked, error] for i, r in enumerate(right)}}


def test_committed_tables_are_what_the_script_makes(script: ModuleType) -> None:
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    assert script.renewed(page) == page, "run python experiments/report_evidence.py"


def test_every_table_stands_on_the_page_once(script: ModuleType) -> None:
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    assert sorted(match[2] for match in script.MARKED.finditer(page)) == sorted(script.tables())


def test_a_stale_number_is_replaced(script: ModuleType) -> None:
    stale = "before\n<!-- table: sweep -->\n\n| old |\n\n<!-- end -->\nafter"
    fresh = script.renewed(stale)
    assert "| old |" not in fresh and script.tables()["sweep"] in fresh
    assert fresh.startswith("before\n") and fresh.endswith("\nafter")


def test_unknown_table_is_an_error(script: ModuleType) -> None:
    with pytest.raises(KeyError, match="nonsense"):
        script.renewed("<!-- table: nonsense -->\n<!-- end -->")


def test_share_pools_counts_and_spans_the_seeds(script: ModuleType) -> None:
    value, low, high, asked = script.share([row([r], 1000) for r in (400, 500, 600)], "phonebook", "0")
    assert (value, asked) == (0.5, 3000)
    # Standard deviation of the shares .1, t of 2 degrees of freedom 4.3027: half width .2484, wider than Wilson's .018.
    assert low == pytest.approx(0.5 - 4.30265 * 0.1 / math.sqrt(3), abs=1e-4)
    assert high == pytest.approx(0.5 + 4.30265 * 0.1 / math.sqrt(3), abs=1e-4)


def test_equal_seeds_keep_the_wilson_interval(script: ModuleType) -> None:
    value, low, high, _ = script.share([row([500], 1000)] * 3, "phonebook", "0")
    # 1.96 * sqrt(.25 / 3000) = .0179; Wilson shrinks it by less than .1%.
    assert value == 0.5 and high - value == pytest.approx(value - low)
    assert high - value == pytest.approx(0.0179, abs=1e-4)


def test_books_that_hang_together_widen_the_interval(script: ModuleType) -> None:
    independent = math.sqrt(0.25 / 1000)
    _, narrow, _, _ = script.share([row([500], 1000, independent)], "phonebook", "0")
    _, wide, _, _ = script.share([row([500], 1000, 2 * independent)], "phonebook", "0")
    # Twice the standard error: a quarter of the answers, nearly twice the width.
    assert (0.5 - wide) / (0.5 - narrow) == pytest.approx(2, rel=0.01)


def test_wrong_number_of_seeds_is_refused(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="three seeds"):
        script.t_interval([0.1, 0.2])


@pytest.mark.parametrize(("value", "text"), [(0.5, ".500"), (1.0, "1.000"), (0.0, ".000")])
def test_numbers_drop_the_leading_zero(script: ModuleType, value: float, text: str) -> None:
    assert script.number(value) == text


def test_figures_name_every_arm(script: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import evidence_figures

    evidence_figures.draw(tmp_path)
    recall = (tmp_path / "recall.svg").read_text(encoding="utf-8")
    assert all(arm in recall for arm in ("before", "not enlarged", *script.ARMS[1:]))
    assert "passing off" in (tmp_path / "bits_per_byte.svg").read_text(encoding="utf-8")
