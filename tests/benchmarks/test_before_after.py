"""Rows of a CPU beside an older commit: both trees in one process, many processes, and how far a ratio can be told."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import before_after
import pytest

import longrecall


def test_rows_of_a_cpu_come_from_processes_with_both_trees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither tree is always the first: not of the calls in a process, and not of the processes that have one each."""
    (tmp_path / "src" / "longrecall").mkdir(parents=True)
    asked: list[str] = []

    def run(tree: Path, site: str = "") -> dict[str, float]:
        asked.append("before" if tree == tmp_path.resolve() else "after")
        return {"reading, MiB": 3.0}

    def run_together(before: Path, first: str) -> dict[str, dict[str, float]]:
        asked.append(f"{first} first")
        n = len(asked)
        return {"rule": {"before": 30.0 + n, "after": 40.0 + n, "ratio": 1 + n / 100}}

    monkeypatch.setattr(before_after, "run", run)
    monkeypatch.setattr(before_after, "run_together", run_together)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["before_after.py", "--before", str(tmp_path), "--rounds", "2", "--out", str(out)])
    before_after.main()
    capsys.readouterr()

    assert asked == ["before first", "after first"] * 5 + ["before", "after", "after", "before"]
    written = json.loads(out.read_text())
    rule, reading = written["rows"]
    assert rule["befores"] == [30.0 + n for n in range(1, 11)] and rule["before_ms"] == 35.5
    assert rule["afters"] == [40.0 + n for n in range(1, 11)] and rule["after_ms"] == 45.5
    # Not the quotient of the times.
    assert rule["ratio"] == pytest.approx(1.055) and len(rule["ratios"]) == 10
    assert 1.01 <= rule["ratio_low"] < rule["ratio"] < rule["ratio_high"] <= 1.10
    assert reading["after_mib"] == 3.0 and reading["ratio"] == 1.0
    assert "neighbouring calls" in written["statistic"]


def test_two_trees_are_imported_beside_each_other(tmp_path: Path) -> None:
    """Also what a call imports comes from its own tree, and this process keeps the longrecall that it has."""
    trees, calls = {}, {}
    for name in ("before", "after"):
        package = tmp_path / name / "src" / "longrecall"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("def late():\n    from longrecall import part\n    return part.name\n")
        (package / "part.py").write_text(f"name = {name!r}\n")
        trees[name] = before_after.Tree(tmp_path / name)
        with trees[name].imported():
            calls[name] = importlib.import_module("longrecall").late
    path = list(sys.path)
    for name in ("before", "after", "before"):
        with trees[name].imported():
            assert calls[name]() == name
            assert sys.modules["longrecall.part"].name == name  # type: ignore[attr-defined]
    assert sys.modules["longrecall"] is longrecall and "longrecall.part" not in sys.modules and sys.path == path


def test_a_machine_that_changes_its_speed_changes_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes twice as long at the end, and one call meets something else; the second work takes 1.5 times as long."""
    clock, calls = 0.0, 0

    def work(cost: float) -> None:
        nonlocal clock, calls
        calls += 1
        # The first two calls take memory.
        clock += 9.0 if calls <= 2 else cost * (1 + calls / 64) * (5 if calls == 20 else 1)

    monkeypatch.setattr(before_after.time, "process_time", lambda: clock)
    first, second = before_after.Tree(Path("first")), before_after.Tree(Path("second"))
    least, ratio = before_after.compare({first: lambda: work(0.002), second: lambda: work(0.003)}, 31)
    assert calls == 2 + 2 * 31
    assert least == [pytest.approx(2 * (1 + 3 / 64)), pytest.approx(3 * (1 + 4 / 64))]
    # Neighbours are one call apart, in turns: 1 / 64 of the time at most, in either direction.
    assert ratio == pytest.approx(1.5, rel=1 / 64)


def test_an_interval_is_as_wide_as_the_processes_differ() -> None:
    same = before_after.interval([1.1] * 10)
    assert same == {"ratio_low": pytest.approx(1.1), "ratio_high": pytest.approx(1.1)}
    few = before_after.interval([0.9, 1.1])
    assert few == {"ratio_low": pytest.approx(0.9), "ratio_high": pytest.approx(1.1)}
    many = before_after.interval([0.98] * 6 + [1.0] * 8 + [1.3])
    assert many == {"ratio_low": pytest.approx(0.98), "ratio_high": pytest.approx(1.0)}
    assert many == before_after.interval([0.98] * 6 + [1.0] * 8 + [1.3])  # the same file gives the same row
