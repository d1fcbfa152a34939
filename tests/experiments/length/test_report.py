"""docs/length_generalization.md and its folder say what the three recorded runs say."""

from __future__ import annotations

import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from experiments.common import pages
from experiments.length import records, report
from tests.experiments.length.page import mean, over, page_prose, page_text, variants

DECIMAL = re.compile(r"\d*\.\d+(?: ± \.\d+)?")


@pytest.fixture
def prose() -> str:
    return page_prose()


def test_runs_have_every_arm_and_seed() -> None:
    for model, run in records.MODELS.items():
        record = pages.read(records.RUNS[run])
        assert model in record["base"].values()
        for arm in records.ARMS:
            assert [row["seed"] for row in records.rows_of(record, model, arm)] == [0, 1, 2]


def test_bits_weigh_ranges_by_length() -> None:
    ranges = ((0, 64, 3.0), (64, 512, 2.0), (512, 1024, 9.0))
    row = {"perplexity": [{"start": a, "end": b, "bits_per_byte": v} for a, b, v in ranges]}
    assert records.bits(row, 0, 512) == pytest.approx((64 * 3 + 448 * 2) / 512, rel=1e-12)
    with pytest.raises(ValueError, match="positions 0 to 600"):
        records.bits(row, 0, 600)


def test_growth_is_norm_at_the_end_over_norm_at_the_training_length() -> None:
    norms = ([9.0, 2.0, 6.0], [9.0, 4.0, 1.0])
    state = {"positions": [256, 512, 1024], "layers": [{"heads": [{"norm": n} for n in norms]}]}
    assert records.growth({"state": state}) == [[3.0, 0.25]]


def test_a_difference_pairs_the_seeds() -> None:
    def model(arm: str, seed: int, share: float) -> dict[str, Any]:
        return {"model": "m", "arm": arm, "seed": seed, "passkey": {"512": share}}

    # Seed by seed the arm is .1 above, give or take .01; the seeds themselves lie far apart and in any order.
    results = [model("noise", s, v) for s, v in ((2, 0.91), (0, 0.2), (1, 0.49))]
    results += [model("zero", s, v) for s, v in ((1, 0.4), (2, 0.8), (0, 0.1))]
    centre, half = records.differences({"results": results}, "m", "noise", "key at 512")
    assert centre == pytest.approx(0.1, abs=1e-12)
    # t of 2 degrees of freedom times the deviation .01 over the root of three.
    assert half == pytest.approx(4.302653 * 0.01 / math.sqrt(3), rel=1e-5)


def test_stories_are_chosen_by_length() -> None:
    row = {"babilong": {"qa1 512": 0.2, "qa2 512": 0.4, "qa1 8192": 0.9}}
    assert records.stories(row, (512,)) == pytest.approx(0.3, abs=1e-12)


@pytest.mark.parametrize(
    ("value", "signed", "text"), [(-0.25, False, "-.250"), (10.5, True, "+10.500"), (0.5, True, "+.500")]
)
def test_numbers_lose_only_the_leading_zero(value: float, signed: bool, text: str) -> None:
    assert pages.number(value, signed) == text


def test_in_short_quotes_the_ill_model(prose: str) -> None:
    ill, far = records.ILL[0], "bits 32k–64k"
    record = records.record_of(ill)

    def level(arm: str, name: str) -> str:
        return pages.number(mean(ill, arm, name))

    def over(arm: str, name: str) -> str:
        return "{} ± {}".format(*map(pages.number, records.differences(record, ill, arm, name)))

    def level_of_rise(arm: str) -> str:
        return report.level(records.rows_of(record, ill, arm), "rise")

    assert f"0–512 at {level('before', 'bits 0–512')} bits per byte and 32k–64k at {level('before', far)}" in prose
    assert f"({level('zero', far)} and {level('noise', far)} at 32k–64k)" in prose
    assert f"({level_of_rise('state_passing_text')} and {level_of_rise('truncated_bptt')})" in prose
    assert f"leaves a rise of {level_of_rise('state_passing')}" in prose
    keys = [over(arm, "key at 4096") for arm in ("state_passing_text", "truncated_bptt")]
    assert f"(+{keys[0]} and +{keys[1]})" in prose
    finds, plain = (level(arm, "key at 512") for arm in ("state_passing", "zero"))
    assert f"finds {finds} of the pass keys in 512 tokens, where plain training finds {plain}" in prose


def test_the_illness_begins_where_the_page_says(prose: str) -> None:
    assert "From 8k tokens on its loss is surely more than 0.1 nats above its level" in prose
    ranges = records.record_of(records.ILL[0])["variants"][records.ILL[0]]["perplexity"]
    past = [(e["start"], e["rise_low"] > 0.1) for e in ranges if e["start"] >= records.TRAINED]
    assert [sure for _, sure in past] == [start >= 8192 for start, _ in past]


def test_healthy_models_gain_no_bits(prose: str) -> None:
    assert "improves bits per byte by more than .001 in any range" in prose
    spans = [name for name in records.MEASURES if name.startswith("bits")]
    for model in (m for m in records.MODELS if m not in records.ILL):
        record = records.record_of(model)
        for arm in records.ARMS[1:]:
            for name in spans:
                # Rounded as it is written.
                assert round(records.differences(record, model, arm, name)[0], 3) >= -0.001, (model, arm, name)


def test_every_decimal_of_the_prose_stands_in_a_table_or_is_asserted_here() -> None:
    page = page_text()
    tables = " ".join(report.tables().values())
    known = set(DECIMAL.findall(tables)) | set(re.findall(r"\d*\.\d+", tables))
    # Asserted by other tests of this file.
    known |= {".098", ".236", ".041", ".190", "9.9", "35.0", "1.97", "1.34", "1.31", "1.20", "1.24"}
    known |= {".0074 ± .0048", ".0037 ± .0051", ".0081 ± .0053", ".0047 ± .0012"}
    known |= {"1.18", ".43", ".59", ".48", ".68", ".546", ".01", ".915", ".02", ".03"}
    # Versions, a threshold, letters over letters (64 / 20), steps over steps, and what other sources report.
    known |= {"2.11", ".0", "5.17", "0.1", "3.2", "1.75", ".086", ".1", "1.3", ".27 ± .03", ".47 ± .11"}
    rest = pages.MARKED.sub("", page)
    assert sorted({text for text in DECIMAL.findall(rest)} - known) == []


def test_ranges_of_small_numbers_are_quoted(prose: str) -> None:
    usual = [(run, row) for (run, name), row in variants().items() if not name.startswith(("slow_gla", "mamba2_n4:"))]
    rises = [round(records.rise(row), 2) for _, row in usual]
    assert (min(rises), max(rises)) == (0.01, 0.02) and "have +.01 to +.02" in prose
    costs = [round(over(m, "truncated_bptt", "bits 0–512")[0], 2) for m in records.MODELS if m not in records.ILL]
    assert min(costs) >= 0.02 and max(costs) <= 0.03 and "lose .02 to .03 bits to it" in prose
    strings = [pages.number(mean("mamba2_n64", arm, "strings of 20")) for arm in ("state_passing", "zero")]
    assert f"{strings[0]} of those of 20 letters instead of {strings[1]}" in prose
    control, second = (variants()[run, "gla_k16:0"] for run in ("third", "second"))
    shown = [pages.number(records.bits(row, 0, 512)) for row in (control, second)]
    assert "the control reads {} bits per byte, the same model of the second run {}".format(*shown) in prose
    worse, control_far = (
        pages.number(records.bits(variants()["third", name], 32768, 65536)) for name in ("slow_gla_k32:0", "gla_k16:0")
    )
    assert f"the worse of the two reads {worse} bits per byte, the control {control_far}" in prose


def test_against_the_paper_quotes_rises() -> None:
    page = page_text()
    rises = [
        [report.level(records.rows_of(records.record_of(m), m, arm), "rise") for arm in ("noise", "zero")]
        for m in records.ILL
    ]
    mamba, large, small = (f"{noise} (plain {plain})" for noise, plain in rises)
    assert f"rises of {mamba} and {small.replace('plain ', '')};" in page
    assert f"lowers the rise ({large.replace(' (', ', ').rstrip(')')})" in page
    copies = [pages.number(mean("mamba2_n64", arm, "64 letters")) for arm in ("zero", "state_passing")]
    assert f"| {copies[0]} → {copies[1]} at {64 / 20:.1f} times on one model" in page
    assert "it finds fewer on all six models" in page
    for model in records.MODELS:
        assert over(model, "fitted_noise", "key at 1024")[0] < 0


def test_remembrance_falls_as_the_page_says(prose: str) -> None:
    ill = records.ILL[0]
    record = records.record_of(ill)

    def value(arm: str, start: int) -> float:
        return statistics.mean(records.remembrance(r, start)["value"] for r in records.rows_of(record, ill, arm))

    arms = ("state_passing_text", "truncated_bptt")
    falls = [value("zero", t) / value(arm, t) for arm in arms for t in (64, 512, 1024, 2048)]
    assert "between a quarter and a seventh" in prose and min(falls) > 4 and max(falls) < 7


def test_copying_is_quoted(prose: str) -> None:
    def level(arm: str, length: int) -> str:
        return pages.number(mean("mamba2_n64", arm, f"{length} letters"))

    zero, passing = ([level(arm, n) for n in (40, 64)] for arm in ("zero", "state_passing"))
    assert f"from {zero[0]} to {passing[0]} in strings of 40 letters, and from {zero[1]} to {passing[1]} in" in prose
    results = [row for run in records.RUNS.values() for row in pages.read(run)["results"]]
    assert "no model gets a single string of 40 right" in prose
    assert max(row["copying"]["40"][1] for row in results) == 0


def test_differences_are_quoted(prose: str) -> None:
    ill = records.ILL[0]

    def shown(model: str, arm: str, name: str) -> str:
        return pages.signed_with_error(*over(model, arm, name)).strip("*")

    def centre(model: str, arm: str, name: str) -> str:
        return shown(model, arm, name).split(" ± ")[0]

    rises = [pages.number(mean(ill, arm, "rise"), True) for arm in ("fitted_noise", "zero")]
    assert f"({rises[0]} nats instead of {rises[1]})" in prose
    near = [centre(ill, arm, "bits 0–512") for arm in ("fitted_noise", "state_passing_text", "truncated_bptt")]
    assert f"{near[0]} bits within 512 tokens" in prose and f"cost {near[1]} and {near[2]} bits within the" in prose
    healthy = [m for m in records.MODELS if m not in records.ILL]
    lost = min(over(m, "state_passing", "key at 512")[0] for m in healthy)
    assert f"lose at most {pages.number(-lost)} of the keys in 512 tokens" in prose
    noise = [
        [centre("gla_k16:1", a, n)[1:] for a in ("noise", "fitted_noise")] for n in ("key at 1024", "strings of 20")
    ]
    assert "loses {} to noise and {} to fitted noise".format(*noise[0]) in prose
    assert "of the whole strings of 20 letters {} and {}".format(*noise[1]) in prose
    copies = [shown("mamba2_n64", "state_passing", f"{n} letters") for n in (40, 64)]
    assert f"lifts `mamba2_n64` ({copies[0]} at 40 letters; {copies[1]} at 64" in prose
    copies = [shown(model, "state_passing", "40 letters") for model in ("gla_k16", "gla_k16:1")]
    assert f"neither healthy GLA ({copies[0]} and {copies[1]} at 40)" in prose
    assert f"lifts `gla_k16` ({shown('gla_k16', 'fitted_noise', '64 letters')} at 64)" in prose
    assert f"hurts `mamba2_n64` ({shown('mamba2_n64', 'fitted_noise', '40 letters')} at 40)" in prose


def test_levels_are_quoted(prose: str) -> None:
    models = variants()
    rises = [pages.number(records.rise(models["second", name])) for name in ("mamba2_n4:6", "mamba2_n4:8")]
    assert f"rises by {rises[0]} or by {rises[1]}" in prose
    letters = [pages.number(records.letters(64)(models["second", name])) for name in ("gla_k16:0", "gla_k16:1")]
    assert f"copy {letters[0]} and {letters[1]} of 64 letters" in prose
    ill = records.ILL[0]

    def second_layer(arm: str) -> list[float]:
        rows = [records.growth(row)[1] for row in records.rows_of(records.record_of(ill), ill, arm)]
        return [statistics.mean(head) for head in zip(*rows, strict=True)]

    cured = [x for arm in ("state_passing_text", "truncated_bptt") for x in second_layer(arm)]
    pairs = [
        f"{pages.number(min(v), digits=2)}–{pages.number(max(v), digits=2)}" for v in (second_layer("before"), cured)
    ]
    assert f"shrink to {pairs[0]} of their norm, and after the cure keep {pairs[1]} of it" in prose
    first = [
        pages.number(records.remembrance(models[key], 64)["value"], digits=4)
        for key in (("second", ill), ("third", "slow_gla_k32:0"), ("third", "slow_gla_k16:0"))
    ]
    assert f"had little of it, {first[0]} at t = 64" in prose
    assert f"At t = 64 there is nothing to fall, {first[1]} and {first[2]}." in prose
    told = [
        records.stories(row, (512,)) for row in records.rows_of(records.record_of("mamba2_n64"), "mamba2_n64", "zero")
    ]
    assert f"above it in 512 tokens ({pages.number(statistics.mean(told))} after plain training)" in prose


def test_settings_are_those_of_the_records() -> None:
    page = page_text()
    runs = [pages.read(records.RUNS[run])["settings"] for run in ("third", "second", "first")]
    rows, steps = ([settings[name] for settings in runs] for name in ("rows", "steps"))
    shown = " | ".join(", ".join(map(str, r)) for r in rows)
    assert f"| rows of a batch: books, phone books, pass keys, copying, stories | {shown} |" in page
    assert f"| post-training (2%) | {' | '.join(str(n // 50) for n in steps)} |" in page


def test_figures_stand_on_the_page_and_name_every_arm(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from experiments.length import figures

    figures.draw(tmp_path)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert sorted(drawn) == sorted(re.findall(r"\((?:\.\./)?figures/(.*?)\)", page_text()))
    for name in ("length_bits.svg", "length_copying.svg"):
        assert all(f">{label}<" in drawn[name] for label in records.NAMES.values())
    assert all(f">layer {n}, one line a head<" in drawn["length_state.svg"] for n in (1, 2, 3))
    assert all(f">{records.NAMES[arm]}<" in drawn["length_remembrance.svg"] for arm in ("before", "state_passing_text"))
