"""A row of an op beside an older commit: many processes in turns, and how far its ratio can be told."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import before_after
import pytest

OPS = {"gated linear attention, forward + backward", "gated delta rule, forward + backward"}


def test_rows_of_ops_come_from_many_processes_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither tree is always the first of a round: what grows slower with time meets both."""
    (tmp_path / "src" / "longrecall").mkdir(parents=True)
    asked: list[tuple[str, str]] = []

    def run(tree: Path, site: str = "", part: str = "models") -> dict[str, float]:
        asked.append(("before" if tree == tmp_path.resolve() else "after", part))
        return dict.fromkeys(OPS, 30.0 + len(asked)) if part == "ops" else {"reading": 2.0, "reading, MiB": 3.0}

    monkeypatch.setattr(before_after, "run", run)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["before_after.py", "--before", str(tmp_path), "--rounds", "2", "--out", str(out)])
    before_after.main()
    capsys.readouterr()

    turns = ["before", "after", "after", "before"]
    assert asked == [(tree, "ops") for tree in turns * 5] + [(tree, "models") for tree in turns]
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == OPS | {"reading", "reading, MiB"}
    for name in OPS:
        row = rows[name]
        assert len(row["befores"]) == len(row["afters"]) == 10
        assert row["befores"][:4] == [31.0, 34.0, 35.0, 38.0] and row["before_ms"] == row["after_ms"] == 40.5
        assert row["ratio_low"] <= row["ratio"] == 1.0 <= row["ratio_high"]
    assert rows["reading"] == {"name": "reading", "before_ms": 2.0, "after_ms": 2.0, "ratio": 1.0} | {
        "befores": [2.0, 2.0],
        "afters": [2.0, 2.0],
    }
    assert rows["reading, MiB"]["after_mib"] == 3.0


def test_an_interval_is_as_wide_as_the_processes_differ() -> None:
    """Two places in memory, 12% apart: few processes cannot tell the same code from itself, and say so."""
    same = before_after.interval([30.0] * 10, [33.0] * 10)
    assert same == {"ratio_low": pytest.approx(1.1), "ratio_high": pytest.approx(1.1)}
    few = before_after.interval([28.0, 31.4], [31.4, 28.0])
    assert few["ratio_low"] < 0.9 < 1.1 < few["ratio_high"]
    befores, afters = [28.0] * 9 + [31.4], [27.4] * 8 + [30.7] * 2
    many = before_after.interval(befores, afters)
    assert 0.97 < many["ratio_low"] <= 27.4 / 28.0 <= many["ratio_high"] < 1.1
    assert many == before_after.interval(befores, afters)  # the same file gives the same row
