"""docs/training/leash.md says what the recorded runs of the leash say, and the experiment's arms are recipes."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from experiments.common import pages
from experiments.leash import experiment, join_runs, records, report

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_has_the_recorded_table() -> None:
    page = (ROOT / "docs" / report.PAGE).read_text(encoding="utf-8")
    assert pages.renewed(page, report.tables()) == page
    assert [found[2] for found in pages.MARKED.finditer(page)] == list(report.tables())


def test_the_page_says_what_the_arms_kept() -> None:
    page = " ".join((ROOT / "docs" / report.PAGE).read_text(encoding="utf-8").split())
    record = pages.read(records.FILE)
    rows = {arm: records.rows_of(record, arm) for arm in records.arms(record)}
    leashes = [arm for arm in rows if arm not in (records.BASE, records.NONE)]
    bits = {arm: records.bits(found, "2048-4096")[0] for arm, found in rows.items()}
    kept = {arm: (bits["none"] - bits[arm]) / (bits["none"] - bits["base"]) for arm in leashes}
    assert "between three quarters and nine tenths" in page and 0.73 < min(kept.values()) < max(kept.values()) < 0.92
    # The best arm has three seeds.
    (best,) = report.three_seeds(record)
    assert report.words(best) == "weight 4, rate 2.5e-4, touched 6x" and 0.745 < kept[best] < 0.775
    pairs, more, plain = (
        records.seeds_apart(record, *arms, report.MEASURES[name])
        for name, *arms in (("24 pairs", best, "none"), (report.BITS, best, "base"), (report.BITS, "none", "base"))
    )
    assert f"differs from no leash by {pages.number(pairs[0], signed=True)} ± {pages.number(pairs[1])} (95%" in page
    assert "both are alike to .06" in page and round(abs(pairs[0]) + pairs[1], 2) == 0.06
    ends = [f"{pages.number(mean)} ± {pages.number(half)}" for mean, half in (more, plain)]
    assert f"ends {ends[0]} bits above the model before, no leash {ends[1]}." in page
    assert f"bits stay {pages.number(more[0])} above the model before" in page
    starts = {arm: [row["cells"]["keys:1024:0.0"][0] for row in found] for arm, found in rows.items()}
    assert "({}, {}, {})".format(*map(pages.number, starts[best])) in page
    assert max(value for arm in (*leashes, "none") for value in starts[arm]) < starts["base"][0]
    apart = [value - other for value, other in zip(*(seeds(record, arm) for arm in (TEXT, "none")), strict=False)]
    words = f"is {pages.number(apart[0])} above no leash in recall with one seed and {pages.number(-apart[1])} below"
    assert len(seeds(record, TEXT)) == 2 and f"Weight 4 with text .5 {words} with the other." in page


TEXT = "text+passkey:4:instead@optimizer.learning_rate=2.5e-4,optimizer.touched=6x,data.sources.0.weight=0.5"


def seeds(record: dict[str, Any], arm: str) -> list[float]:
    """Recall among 24 pairs, seed by seed."""
    return [row["cells"]["pairs:24"][0] for row in records.rows_of(record, arm)]


def test_the_page_says_which_wishes_the_arms_meet() -> None:
    page = " ".join((ROOT / "docs" / report.PAGE).read_text(encoding="utf-8").split())
    record = pages.read(records.FILE)
    met = {arm: report.wishes(record, arm) for arm in records.arms(record)[1:]}
    assert "No arm meets all three, so the demo has no leash." in page and not any(
        all(m.values()) for m in met.values()
    )
    assert "leash:" not in (resources.files("longrecall") / "assets" / "demo" / "recipe.yaml").read_text()
    near = [arm for arm, found in met.items() if found["bits"]]
    more = sorted(records.answers_apart(record, arm, "base", report.MEASURES[report.BITS])[0] for arm in near)
    words = f"Six come to {pages.number(more[0])} to {pages.number(more[-1])}, with one run each."
    assert words in page and [len(records.rows_of(record, arm)) for arm in near] == [1] * 6
    long, near = ([arm for arm in near if ("length=1024" in arm) == rows] for rows in (True, False))
    assert len(near) == 4 and all("data.sources.0.weight=0.5" in arm for arm in near)
    assert len(long) == 2 and all(arm.endswith("run.batch_size=3") for arm in long)
    far = sorted(records.share(records.rows_of(record, arm), "keys:1024:0.0")[0] for arm in long)
    less = sorted(-records.answers_apart(record, arm, "none", report.MEASURES["24 pairs"])[0] for arm in long)
    words = "{} and {}, and".format(*(pages.number(value, digits=2) for value in far))
    assert f"{words} {pages.number(less[0])} and {pages.number(less[1])} less among 24 pairs than no leash." in page
    starts = {
        arm: [row["cells"]["keys:1024:0.0"][0] for row in records.rows_of(record, arm)]
        for arm in ("base", "none", *near)
    }
    lost = sorted(value for arm in near for value in starts[arm])
    figures = [pages.number(value, digits=2) for value in (lost[0], lost[-1], *starts["base"], min(starts["none"]))]
    words = "they recall {} to {}, where the model before has {} and no leash {} to".format(*figures)
    assert f"{words} {pages.number(max(starts['none']) + 1e-9, digits=2)}." in page
    (both,) = [arm for arm in near if met[arm]["recall"]]
    assert "640 steps" in report.words(both) and len(records.rows_of(record, both)) == 1
    worse = [
        arm
        for arm in records.arms(record)[2:]
        if records.answers_apart(record, arm, "base", report.MEASURES["keys in 512"])[2] < 0
    ]
    left = [pages.number(report.MEASURES["keys in 512"](records.rows_of(record, arm))[0]) for arm in worse]
    assert "are kept** by all arms but two ({} and {}).".format(*left) in page


def test_every_arm_is_the_recipe_of_the_demo_with_its_leash(tmp_path: Path) -> None:
    known = records.arms(pages.read(records.FILE))
    assert {"base", "none"} < set(known)
    demo = experiment.recipe_of("none", 0, tmp_path, tmp_path, None).to_dict()
    for arm in known:
        if arm == "base":
            continue
        found = experiment.recipe_of(arm, 0, tmp_path, tmp_path, None).to_dict()
        assert (found["leash"] is None) == (arm == "none")
        names = {change.partition(".")[0] for change in arm.partition("@")[2].split(",")}
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


def test_calls_keep_what_they_were_run_on() -> None:
    """Three files of one call each: a run known by its arm and seed is left out, a call that grew is no other one."""

    def call(created: str, *runs: tuple[str, int]) -> dict[str, Any]:
        return {"created": created, "results": [{"arm": arm, "seed": seed} for arm, seed in runs]}

    first, second = call("one", ("base", 0), ("x", 0)), call("two", ("x", 0), ("x", 1))
    found = join_runs.joined(first, [second, call("three", ("x", 1))])
    assert [(one["created"], len(one["results"])) for one in found["calls"]] == [("one", 2), ("two", 1)]
    assert "calls" not in first and len(second["results"]) == 2
    found["calls"][1]["about"] = "another machine"
    grown = join_runs.joined(found, [call("two", ("x", 0), ("x", 1), ("y", 0)), found])
    assert [len(one["results"]) for one in grown["calls"]] == [2, 2]
    assert [row["seed"] for row in records.rows_of(grown, "x")] == [0, 1]
    heads = [join_runs.head(one, "about", "settings") for one in records.calls(pages.read(records.FILE))]
    assert len({json.dumps(head) for head in heads}) == len(heads) and all("torch" in head for head in heads)


def test_a_later_run_of_the_experiment_is_a_call_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, made = tmp_path / "runs.json", list[tuple[str, int]]()
    path.write_text(json.dumps({"created": "earlier", "torch": "another", "results": [{"arm": "none", "seed": 0}]}))

    def run_of(arm: str, seed: int, args: Any) -> dict[str, Any]:
        made.append((arm, seed))
        return {"arm": arm, "seed": seed}

    monkeypatch.setattr(experiment, "run_of", run_of)
    options = ["--arms", "base", "none", "--seeds", "0", "1", "--out", str(path)]
    for _ in range(2):  # a second time there is nothing to do
        monkeypatch.setattr("sys.argv", ["experiment.py", *options])
        experiment.main()
        first, second = json.loads(path.read_text())["calls"]
        assert (first["torch"], len(first["results"])) == ("another", 1)
        assert "torch" in second and second["torch"] != "another"
        assert [(row["arm"], row["seed"]) for row in second["results"]] == made == [("base", 0), ("none", 1)]


def test_differences_are_paired_by_seed() -> None:
    """Shares .5, .6, .7 against .4, .4, .4: mean .2, half of the interval 4.303 * .1 / sqrt 3."""
    shares = {"none": (0.4, 0.4, 0.4), "x": (0.7, 0.6, 0.5), "base": (0.3,)}
    rows = [
        {"arm": arm, "seed": seed, "cells": {"pairs:24": [value, value - 0.1, value + 0.1, 100]}}
        for arm, values in shares.items()
        for seed, value in enumerate(values)
    ]
    record = {"calls": [{"results": rows[:2]}, {"results": rows[2:]}]}
    mean, half = records.seeds_apart(record, "x", "none", report.MEASURES["24 pairs"])
    assert (mean, half) == (pytest.approx(0.2), pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3))
    assert records.seeds_apart(record, "x", "base", report.MEASURES["24 pairs"])[0] == pytest.approx(0.3)
    value, low, high = records.answers_apart(record, "x", "base", report.MEASURES["24 pairs"])
    # 300 answers against the 100 of the base, whose own interval is .2 wide: its part alone is .1.
    assert value == pytest.approx(0.3) and 0.1 < high - value < 0.12 and 0.1 < value - low < 0.12
