"""The single-token study: its arms, a tiny run that is cut into calls, and what is made of a record."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from experiments.common import intervals
from experiments.state_recall import experiment, pairs_by_state, single_tokens, waves
from experiments.state_recall.arms import arm_name, equal_widths, parts_of
from longrecall.sweep.grid import runs_of, sizes


def test_names_and_equal_widths() -> None:
    assert parts_of(arm_name("gla", 4, equal=True)) == ("gla", 4, True)
    assert parts_of("transformer") == ("transformer", 1, False) and parts_of("gla:16") == ("gla", 16, False)
    # 100 more parameters for each factor, 6 for each unit of width.
    found = equal_widths((1, 2, 4), lambda factor, width: 1000 + 100 * factor + 6 * width, 10)
    assert found == {1: 60, 2: 43, 4: 10}


def test_the_arms_of_the_whole_study() -> None:
    args = single_tokens.arguments(["--out", "x"])
    runs = runs_of(single_tokens.recipe_of(args, 1, 60.0))
    found = {spec.model.label: sizes(spec) for spec in runs}
    assert len(runs) == len(found) == 2 * (5 + 4)
    for mixer in args.mixers:
        assert [found[arm_name(mixer, factor)][1] for factor in args.factors] == [1024 * f for f in args.factors]
        largest = found[arm_name(mixer, 16)][0]
        # A unit of the MLPs' width has 3 x 64 x 2 layers parameters.
        assert all(abs(found[arm_name(mixer, factor, True)][0] - largest) <= 192 for factor in (1, 2, 4, 8))
    assert [part.settings["pairs"] for part in runs[0].tests] == list(args.test_pairs)
    assert all(part.settings["length"] * part.batch_size == args.tokens for part in runs[0].pool)


def test_a_tiny_run_goes_on_from_call_to_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_tokens, "AT_ONCE", 1)
    words = ["--tiny", "--out", str(tmp_path), "--checkpoints", str(tmp_path / "stopped")]
    single_tokens.main([*words, "--seeds", "1"])
    assert "3 of 3 runs with 1 seeds" in capsys.readouterr().out
    single_tokens.main([*words, "--seeds", "2", "--minutes", "0"])
    single_tokens.main([*words, "--seeds", "2"])
    said = capsys.readouterr()
    assert "6 of 6 runs with 2 seeds" in said.out and said.err.count(" of 6: mqar gla") == 3
    assert "| GLA | equal | 2 |" in said.out
    record = json.loads((tmp_path / "single_tokens_summary.json").read_text())
    assert record["complete"] and [model["seeds"] for model in record["models"]] == [2, 2, 2]
    assert len(list(tmp_path.iterdir())) <= 3


def row(mixer: str, factor: int, seed: int, held: float, equal: bool = False, epochs: float = 5.0) -> dict[str, Any]:
    """A run that recalls `held` pairs: all of fewer, that many of more; none at all where it is 0."""
    tests = [
        {"settings": {"pairs": pairs}, "history": [[10, min(1.0, held / pairs) if held else 0.01]]}
        for pairs in (4, 16, 64)
    ]
    known = {"model": {"mixer": arm_name(mixer, factor, equal)}, "state_size": 100 * factor, "parameters": 1000}
    return {**known, "seed": seed, "status": "done", "epochs": epochs, "tests": tests}


def test_what_a_record_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs in proportion to the state, one run of eight on the plateau; with equal parameters by its root."""
    monkeypatch.setattr(intervals, "DRAWS", 100)
    rows = [row("gla", f, seed, 6.0 * f) for f in (1, 2, 4) for seed in range(8)]
    rows[3] = row("gla", 1, 3, 0.0, epochs=40.0)
    rows += [row("gla", f, seed, 12.0 * f**0.5, equal=True) for f in (1, 2) for seed in range(8)]
    mixers = [{"label": f"gla:{factor}"} for factor in (1, 2, 4)]
    recipe = {"training": {"epochs": 40}, "models": {"mixers": mixers}}
    record = {"rows": rows, "recipe": recipe, "complete": True, "runs": 40}
    groups = pairs_by_state.groups_of(record)
    assert [sum(map(pairs_by_state.left_plateau, groups[f"gla:{f}"])) for f in (1, 2, 4)] == [7, 8, 8]
    assert sum(map(pairs_by_state.settled, groups["gla:1"])) == 7
    # A run that diverged is a seed that has learned nothing.
    lost = {**row("gla", 2, 9, 12.0), "status": "diverged"}
    others = pairs_by_state.groups_of({**record, "rows": [*rows, lost, {**lost, "status": "failed"}]})["gla:2"]
    assert len(others) == 9 and sum(map(pairs_by_state.left_plateau, others)) == 8
    assert sum(map(pairs_by_state.settled, others)) == 8
    text = pairs_by_state.tables(record)
    lines = text["pairs by state"].splitlines()
    assert lines[2].startswith("| GLA | plain | 1 | 100 | 1,000 | 7 of 8 | 7 | 6.0 (6.0 to 6.0) | 1.00 | .37 | .09 |")
    assert "| GLA | plain | 23 | 1.00 (1.00 to 1.00) | 4.00 (4.00 to 4.00) |" in text["exponents of pairs"]
    # A beginning of the study: the largest factor is still open, one seed has no interval.
    begun = {**record, "rows": rows[:1]}
    assert "| GLA | plain | 1 | 100 | 1,000 | 1 of 1 | 1 | 6.0 | 1" in pairs_by_state.arms_table(begun)
    assert "equal" not in pairs_by_state.exponents_table(begun).partition("---")[2]
    assert "| GLA | equal | 24 | .50 (.50 to .50) | 2.00 (2.00 to 2.00) |" in text["exponents of pairs"]


def test_a_bootstrap_takes_runs_of_every_group() -> None:
    """Means of 0 and 1: of two groups, and of one in which every run is the same."""
    mean = lambda groups: sum(map(sum, groups)) / sum(map(len, groups))  # noqa: E731
    low, high = intervals.bootstrap([[0.0, 1.0] * 10, [0.0, 1.0] * 10], mean) or (0, 0)
    # 40 draws of a coin: .5 +- 1.96 * .079; the interval of 2,000 draws is known to a hundredth or two.
    assert (low, high) == (pytest.approx(0.345, abs=0.03), pytest.approx(0.655, abs=0.03))
    assert intervals.bootstrap([[3.0] * 4], mean) == (3.0, 3.0)
    assert intervals.bootstrap([[3.0], []], mean) is None
    assert intervals.bootstrap([[3.0] * 4], lambda _: None) is None
    # Tables of Student's t.
    assert intervals.t_quantile(2) == intervals.T_QUANTILES[1]
    assert intervals.t_quantile(30) == pytest.approx(2.0423, abs=1e-4)
    assert intervals.t_quantile(120) == pytest.approx(1.9799, abs=1e-4)
    assert [intervals.t_quantile_of_all(n, 1) for n in range(1, 23)] == pytest.approx(intervals.T_QUANTILES, abs=1e-4)
    assert intervals.t_quantile_of_all(22, 10) == pytest.approx(3.1188, abs=1e-4)


@pytest.mark.parametrize("seeds", [2, 8])
def test_a_bootstrap_of_few_seeds_holds_the_truth(seeds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 studies whose mean is 0; drawn as many as there are, two seeds would hold it in half of them."""
    monkeypatch.setattr(intervals, "DRAWS", 200)
    g = random.Random(0)
    studies = [[g.gauss(0.0, 1.0) for _ in range(seeds)] for _ in range(200)]
    ends = [intervals.bootstrap([study], lambda drawn: statistics.mean(drawn[0]), i) for i, study in enumerate(studies)]
    held = sum(found is not None and found[0] <= 0.0 <= found[1] for found in ends) / 200
    # 95% is what it is made for. Two numbers say too little of their spread: there it is 88%; of 200 studies +- 4%.
    assert held >= (0.84 if seeds == 2 else 0.91)


def test_waves_run_once_and_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(words: list[str]) -> None:
        asked.append(words)
        out = Path(words[words.index("--out") + 1])
        if len(asked) == 3:
            raise KeyboardInterrupt
        out.write_text('{"results": [1]}')

    monkeypatch.setattr(experiment, "main", run)
    words = ["--study", "trend", "--out", str(tmp_path), "--seeds", "3", "--equal", "--factors", "1", "16"]
    waves.main([*words, "--minutes", "8", "--train-seconds", "400"])
    assert not asked  # 120 s more would not fit
    waves.main([*words, "--seeds", "2"])
    assert [one[one.index("--first-seed") + 1] for one in asked] == ["0", "1"]
    assert asked[0][-6:] == ["--seconds", "390.0", "--equal", "--factors", "1", "16"]
    with pytest.raises(KeyboardInterrupt):
        waves.main(words)
    assert sorted(path.name for path in tmp_path.glob("*.json")) == [
        "state_recall_trend_seed0.json",
        "state_recall_trend_seed1.json",
    ]
    assert waves.wave_file(waves.arguments([*words, "--name", "x"])[0], 5).name == "x_seed5.json"
    waves.main(words)
    assert asked[-1][asked[-1].index("--first-seed") + 1] == "2" and len(list(tmp_path.glob("*.json"))) == 3
