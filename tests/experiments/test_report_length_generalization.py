"""docs/length_generalization.md says what the two recorded runs say."""

from __future__ import annotations

import math
import re
import statistics
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "length_generalization.md"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module: its folder is on the path when it runs."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    import report_length_generalization

    return report_length_generalization


@pytest.fixture
def prose() -> str:
    """The page without its tables, as one line."""
    lines = PAGE.read_text(encoding="utf-8").split("\n")
    return " ".join(" ".join(line for line in lines if not line.startswith("|")).split())


def mean(script: ModuleType, model: str, arm: str, name: str) -> float:
    return statistics.mean(script.MEASURES[name](row) for row in script.rows_of(script.record_of(model), model, arm))


def heads(script: ModuleType, row: dict[str, Any]) -> list[float]:
    return [value for layer in script.growth(row) for value in layer]


def test_committed_tables_are_what_the_script_makes(script: ModuleType) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert script.pages.renewed(page, script.tables()) == page, "run python experiments/report_length_generalization.py"


def test_every_table_stands_on_the_page_once(script: ModuleType) -> None:
    found = [match[2] for match in script.pages.MARKED.finditer(PAGE.read_text(encoding="utf-8"))]
    assert sorted(found) == sorted(script.tables())


def test_runs_have_every_arm_and_seed(script: ModuleType) -> None:
    for model, run in script.MODELS.items():
        record = script.read(script.RUNS[run])
        assert model in record["base"].values()
        for arm in script.ARMS:
            assert [row["seed"] for row in script.rows_of(record, model, arm)] == [0, 1, 2]


def test_bits_weigh_ranges_by_length(script: ModuleType) -> None:
    ranges = ((0, 64, 3.0), (64, 512, 2.0), (512, 1024, 9.0))
    row = {"perplexity": [{"start": a, "end": b, "bits_per_byte": v} for a, b, v in ranges]}
    assert script.bits(row, 0, 512) == pytest.approx((64 * 3 + 448 * 2) / 512, rel=1e-12)
    with pytest.raises(ValueError, match="positions 0 to 600"):
        script.bits(row, 0, 600)


def test_growth_is_norm_at_the_end_over_norm_at_the_training_length(script: ModuleType) -> None:
    norms = ([9.0, 2.0, 6.0], [9.0, 4.0, 1.0])
    state = {"positions": [256, 512, 1024], "layers": [{"heads": [{"norm": n} for n in norms]}]}
    assert script.growth({"state": state}) == [[3.0, 0.25]]


def test_a_difference_pairs_the_seeds(script: ModuleType) -> None:
    def model(arm: str, seed: int, share: float) -> dict[str, Any]:
        return {"model": "m", "arm": arm, "seed": seed, "passkey": {"512": share}}

    # Seed by seed the arm is .1 above, give or take .01; the seeds themselves lie far apart and in any order.
    results = [model("noise", s, v) for s, v in ((2, 0.91), (0, 0.2), (1, 0.49))]
    results += [model("zero", s, v) for s, v in ((1, 0.4), (2, 0.8), (0, 0.1))]
    centre, half = script.differences({"results": results}, "m", "noise", "key at 512")
    assert centre == pytest.approx(0.1, abs=1e-12)
    # t of 2 degrees of freedom times the deviation .01 over the root of three.
    assert half == pytest.approx(4.302653 * 0.01 / math.sqrt(3), rel=1e-5)


def test_stories_are_chosen_by_length(script: ModuleType) -> None:
    row = {"babilong": {"qa1 512": 0.2, "qa2 512": 0.4, "qa1 8192": 0.9}}
    assert script.stories(row, (512,)) == pytest.approx(0.3, abs=1e-12)


@pytest.mark.parametrize(
    ("value", "signed", "text"), [(-0.25, False, "-.250"), (10.5, True, "+10.500"), (0.5, True, "+.500")]
)
def test_numbers_lose_only_the_leading_zero(script: ModuleType, value: float, signed: bool, text: str) -> None:
    assert script.number(value, signed) == text


def test_in_short_quotes_the_ill_model(script: ModuleType, prose: str) -> None:
    ill, far = script.ILL, "bits 32k–64k"
    record = script.record_of(ill)

    def level(arm: str, name: str) -> str:
        return script.number(mean(script, ill, arm, name))

    def over(arm: str, name: str) -> str:
        return "{} ± {}".format(*map(script.number, script.differences(record, ill, arm, name)))

    def level_of_rise(arm: str) -> str:
        return script.level(script.rows_of(record, ill, arm), "rise")

    assert f"0–512 at {level('before', 'bits 0–512')} bits per byte and 32k–64k at {level('before', far)}" in prose
    assert f"({level('zero', far)} and {level('noise', far)} at 32k–64k)" in prose
    assert f"({level_of_rise('state_passing_text')} and {level_of_rise('truncated_bptt')})" in prose
    assert f"leaves a rise of {level_of_rise('state_passing')}" in prose
    keys = [over(arm, "key at 4096") for arm in ("state_passing_text", "truncated_bptt")]
    assert f"(+{keys[0]} and +{keys[1]})" in prose
    finds, plain = (level(arm, "key at 512") for arm in ("state_passing", "zero"))
    assert f"finds {finds} of the pass keys in 512 tokens, where plain training finds {plain}" in prose


def test_the_illness_begins_where_the_page_says(script: ModuleType, prose: str) -> None:
    assert "From 8k tokens on its loss is surely more than 0.1 nats above its level" in prose
    ranges = script.record_of(script.ILL)["variants"][script.ILL]["perplexity"]
    past = [(e["start"], e["rise_low"] > 0.1) for e in ranges if e["start"] >= script.TRAINED]
    assert [sure for _, sure in past] == [start >= 8192 for start, _ in past]


def test_healthy_models_gain_no_bits(script: ModuleType, prose: str) -> None:
    assert "improves bits per byte by more than .001 in any range" in prose
    spans = [name for name in script.MEASURES if name.startswith("bits")]
    for model in (m for m in script.MODELS if m != script.ILL):
        record = script.record_of(model)
        for arm in script.ARMS[1:]:
            for name in spans:
                # Rounded as it is written.
                assert round(script.differences(record, model, arm, name)[0], 3) >= -0.001, (model, arm, name)


def test_one_head_forgets_nothing_in_ill_models_alone(script: ModuleType, prose: str) -> None:
    grown = {}
    for run, file in script.RUNS.items():
        grown |= {(run, name): max(heads(script, row)) for name, row in script.read(file)["variants"].items()}
    ill = [grown.pop(("second", name)) for name in ("mamba2_n4:6", "mamba2_n4:8")]
    assert "from 512 to 64k {:.0f} times in `mamba2_n4:6`, {:.0f} times in `mamba2_n4:8`".format(*ill) in prose
    assert len(grown) == 7 and f"no head grows more than {max(grown.values()):.2f} times" in prose


def test_remembrance_falls_as_the_page_says(script: ModuleType, prose: str) -> None:
    record = script.record_of(script.ILL)

    def value(arm: str, start: int) -> float:
        return statistics.mean(script.remembrance(r, start)["value"] for r in script.rows_of(record, script.ILL, arm))

    arms = ("state_passing_text", "truncated_bptt")
    falls = [value("zero", t) / value(arm, t) for arm in arms for t in (64, 512, 1024, 2048)]
    assert "between a quarter and a seventh" in prose and min(falls) > 4 and max(falls) < 7


def test_copying_is_quoted(script: ModuleType, prose: str) -> None:
    def level(arm: str, length: int) -> str:
        return script.number(mean(script, "mamba2_n64", arm, f"{length} letters"))

    zero, passing = ([level(arm, n) for n in (40, 64)] for arm in ("zero", "state_passing"))
    assert f"from {zero[0]} to {passing[0]} of the letters of 40, and from {zero[1]} to {passing[1]} of 64" in prose
    results = [row for run in script.RUNS.values() for row in script.read(run)["results"]]
    assert "no model gets a single string of 40 right" in prose
    assert max(row["copying"]["40"][1] for row in results) == 0


def test_settings_are_those_of_the_records(script: ModuleType) -> None:
    page = PAGE.read_text(encoding="utf-8")
    second, first = (script.read(script.RUNS[run])["settings"] for run in ("second", "first"))
    rows, steps = ([settings[name] for settings in (second, first)] for name in ("rows", "steps"))
    shown = " | ".join(", ".join(map(str, r)) for r in rows)
    assert f"| rows of a batch: books, phone books, pass keys, copying, stories | {shown} |" in page
    assert f"| post-training (2%) | {steps[0] // 50} | {steps[1] // 50} |" in page


def test_figures_stand_on_the_page_and_name_every_arm(script: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import length_figures

    length_figures.draw(tmp_path)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert sorted(drawn) == sorted(re.findall(r"\(figures/(.*?)\)", PAGE.read_text(encoding="utf-8")))
    for name in ("length_bits.svg", "length_copying.svg"):
        assert all(f">{label}<" in drawn[name] for label in script.NAMES.values())
    assert all(f">layer {n}, one line a head<" in drawn["length_state.svg"] for n in (1, 2, 3))
    assert all(f">{script.NAMES[arm]}<" in drawn["length_remembrance.svg"] for arm in ("before", "state_passing_text"))
