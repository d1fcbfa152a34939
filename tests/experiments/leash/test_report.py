"""docs/training/leash.md says what the recorded runs of the leash say, and the experiment's arms are recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.common import pages
from experiments.leash import experiment, records, report

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_has_the_recorded_table() -> None:
    page = (ROOT / "docs" / report.PAGE).read_text(encoding="utf-8")
    assert pages.renewed(page, report.tables()) == page
    assert [found[2] for found in pages.MARKED.finditer(page)] == list(report.tables())


def test_the_page_says_what_the_arms_kept() -> None:
    page = " ".join((ROOT / "docs" / report.PAGE).read_text(encoding="utf-8").split())
    record = pages.read(records.FILE)
    rows = {arm: records.rows_of(record, arm) for arm in records.arms(record)}
    bits = {arm: records.bits(found, "2048-4096")[0] for arm, found in rows.items()}
    kept = [(bits["none"] - bits[arm]) / (bits["none"] - bits["base"]) for arm in bits if arm not in ("base", "none")]
    assert "keeps three quarters of the bits that were lost" in page and all(0.7 < share < 0.8 for share in kept)
    nearest = min(bits[arm] for arm in bits if arm != "base") - bits["base"]
    assert f"bits stay {pages.number(nearest, digits=2)} above the base" in page
    slow = next(arm for arm in rows if "2.5e-4" in arm)
    pairs = [records.share(rows[arm], "pairs:24")[0] for arm in (slow, "none")]
    assert "recall among 24 pairs is what it is without a leash" in page and abs(pairs[0] - pairs[1]) < 0.01


def test_every_arm_is_the_recipe_of_the_demo_with_its_leash(tmp_path: Path) -> None:
    known = records.arms(pages.read(records.FILE))
    assert {"base", "none"} < set(known)
    demo = experiment.recipe_of("none", 0, tmp_path, tmp_path, None).to_dict()
    for arm in known:
        if arm == "base":
            continue
        found = experiment.recipe_of(arm, 0, tmp_path, tmp_path, None).to_dict()
        assert (found["leash"] is None) == (arm == "none")
        names = set() if "@" not in arm else {"optimizer"}
        assert {name for name in demo if found[name] != demo[name]} - names <= {"leash"}
    leash = experiment.recipe_of("text+passkey:4:h0.5:l256:instead", 3, tmp_path, tmp_path, 7)
    assert leash.leash is not None and leash.leash.sources == ("text", "passkey") and leash.leash.instead
    assert (leash.leash.weight, leash.leash.hidden, leash.leash.length) == (4.0, 0.5, 256)
    assert (leash.data.seed, leash.run.seed, leash.run.steps) == (3, 3, 7)


def test_runs_of_an_arm_are_counted_together() -> None:
    def row(seed: int, right: int) -> records.Row:
        cells = {"pairs:24": [right / 100, 0.1, 0.9, 100], "bits:2048-4096": [1.5 + seed, 1.0 + seed, 2.0 + seed, 9]}
        return {"arm": "x", "seed": seed, "cells": cells}

    rows = records.rows_of({"results": [row(1, 60), row(0, 40)]}, "x")
    assert [found["seed"] for found in rows] == [0, 1]
    value, low, high = records.share(rows, "pairs:24")
    # 1.96 * sqrt(.25 / 200) = .069.
    assert value == 0.5 and high - low == pytest.approx(2 * 0.069, abs=0.002)
    assert records.share(rows[:1], "pairs:24") == (0.4, 0.1, 0.9)
    assert records.bits(rows, "2048-4096") == (2.0, 1.5, 2.5)
