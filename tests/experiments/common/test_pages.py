"""The pages of evidence: every table is on its page once and up to date; how numbers are written."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import pytest

from experiments.common import pages
from experiments.evidence import report as evidence
from experiments.length import report as length
from experiments.number_formats import report as number_formats
from experiments.retrieval import report as retrieval
from experiments.state_recall import report as state_recall

REPORTS = (evidence, length, number_formats, retrieval, state_recall)


@pytest.mark.parametrize("report", REPORTS, ids=lambda module: module.__name__)
def test_committed_tables_are_what_the_report_makes(report: ModuleType) -> None:
    found, tables = [path.read_text(encoding="utf-8") for path in pages.pages_of(report.PAGE)], report.tables()
    assert [pages.renewed(page, tables) for page in found] == found, f"run python -m {report.__name__}"
    assert sorted(match[2] for page in found for match in pages.MARKED.finditer(page)) == sorted(tables)


@pytest.mark.parametrize("report", [evidence, length], ids=lambda module: module.__name__)
def test_every_page_of_a_study_says_in_its_first_lines_what_is_shown_or_what_its_intervals_are(
    report: ModuleType,
) -> None:
    for path in pages.pages_of(report.PAGE):
        first = " ".join(path.read_text(encoding="utf-8").splitlines()[:10])
        assert "±" in first and "seed" in first, path


def test_check_fails_on_a_stale_number_and_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pages, "DOCS", tmp_path)
    (tmp_path / "page").mkdir()
    (tmp_path / "page.md").write_text("no tables\n", encoding="utf-8")
    page, tables = tmp_path / "page" / "tables.md", {"counts": "| new |"}
    for text, code in (("| old |\n", 1), ("\n| new |\n", 0)):
        page.write_text(f"<!-- table: counts -->\n{text}<!-- end -->\n", encoding="utf-8")
        before = page.read_text(encoding="utf-8")
        monkeypatch.setattr("sys.argv", ["report.py", "--check"])
        with pytest.raises(SystemExit) as stopped:
            pages.write_page("about", "page.md", lambda: tables)
        assert (stopped.value.code, page.read_text(encoding="utf-8")) == (code, before)


def test_a_stale_number_is_replaced() -> None:
    stale = "before\n<!-- table: sweep -->\n\n| old |\n\n<!-- end -->\nafter"
    fresh = pages.renewed(stale, {"sweep": "| new |"})
    assert "| old |" not in fresh and "| new |" in fresh
    assert fresh.startswith("before\n") and fresh.endswith("\nafter")


def test_unknown_table_is_an_error() -> None:
    with pytest.raises(KeyError, match="nonsense"):
        pages.renewed("<!-- table: nonsense -->\n<!-- end -->", {})


def test_a_record_that_is_written_anew_is_read_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    for count in (1, 2):
        (tmp_path / "a.json").write_text(f"[{count}]")
        # A file system may count time in steps that are longer than these two writes are apart.
        os.utime(tmp_path / "a.json", ns=(count, count))
        assert pages.read("a.json") == [count] and pages.read("a.json") is pages.read("a.json")


def test_shares_are_cut_off_and_not_rounded_up() -> None:
    shown = [pages.share(value) for value in (1.0, 0.99996875, 0.9995, 0.2053125, 0.0)]
    assert shown == ["1.0000", ".9999", ".9995", ".2053", ".0000"]


def test_what_was_not_evaluated_shows_no_accuracy() -> None:
    runs = [{"epochs": 1.0, "accuracy": value, "history": past} for value, past in ((0.0, []), (0.5, [[9, 2.0, 0.5]]))]
    assert [pages.until_then(run) for run in runs] == ["cut off at 1.0", ".5000, cut off at 1.0"]


@pytest.mark.parametrize(("value", "text"), [(0.5, ".500"), (1.0, "1.000"), (0.0, ".000")])
def test_numbers_drop_the_leading_zero(value: float, text: str) -> None:
    assert pages.number(value) == text
