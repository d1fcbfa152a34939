"""docs/length_generalization.md and its folder say of the GLA models with slow gates what the third run says."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from experiments.common import intervals, pages
from experiments.length import records, report
from tests.experiments.length.page import (
    CURES,
    SLOW_WELL,
    heads,
    last_doubling,
    mean,
    over,
    page_prose,
    page_text,
    variants,
)

THIRD = ("slow_gla_k16:0", "slow_gla_k16:1", "slow_gla_k32:0")
NOISES = ("noise", "fitted_noise")


def later(state: dict[str, Any], start: int) -> float:
    """How far the norm of any head is above that at `start` at any later position, as a factor."""
    at = state["positions"].index(start)
    return max(max(head["norm"][at:]) / head["norm"][at] for layer in state["layers"] for head in layer["heads"])


@pytest.fixture
def prose() -> str:
    return page_prose()


def test_ill_are_those_whose_interval_leaves_out_zero(prose: str) -> None:
    models = variants()
    ill = [name for name, row in models.items() if row["perplexity"][-1]["rise_low"] > 0]
    assert ill == [
        ("second", "mamba2_n4:6"),
        ("second", "mamba2_n4:8"),
        *(("third", n) for n in THIRD if n != SLOW_WELL),
    ]
    assert {records.MODELS[model] + model for model in records.ILL} <= {run + name for run, name in ill}
    assert len(models) == 13 and "Four of thirteen models are ill" in prose
    assert sum("gla" in name for _, name in models) == 8 and sum("mamba2" in name for _, name in models) == 5
    entry = models["third", SLOW_WELL]["perplexity"][-1]
    shown = [pages.number(entry[name], True) for name in ("rise", "rise_low", "rise_high")]
    assert f"`{SLOW_WELL}` rises by {shown[0]} [{shown[1]}, {shown[2]}], `slow_gla_k16:0` by +.095" in prose


def test_ill_models_alone_have_a_head_that_still_grows(prose: str) -> None:
    late = {key: max(x for layer in last_doubling([row]) for x in layer) for key, row in variants().items()}
    ill = [
        ("second", "mamba2_n4:6"),
        ("second", "mamba2_n4:8"),
        ("third", "slow_gla_k16:0"),
        ("third", "slow_gla_k32:0"),
    ]
    shown = [f"{late.pop(key):.2f}" for key in ill]
    assert (
        "{} times in `mamba2_n4:6`, {} in `mamba2_n4:8`, {} in `slow_gla_k16:0` and {} in `slow".format(*shown) in prose
    )
    assert len(late) == 9 and f"no head grows more than {max(late.values()):.2f} times" in prose
    # The third slow model stands still.
    assert max(last_doubling([variants()["third", SLOW_WELL]])[1]) < 1.02


def test_growth_is_quoted(prose: str) -> None:
    models = variants()
    grown = {key: records.growth(row) for key, row in models.items()}
    ill = [max(heads(models["second", name])) for name in ("mamba2_n4:6", "mamba2_n4:8")]
    assert "from 512 to 64k it grows {:.0f} times in `mamba2_n4:6`, {:.0f} times in `mamba2_n4:8`".format(*ill) in prose
    first, *_, last = sorted(grown["third", "slow_gla_k16:0"][0])[1:]
    assert f"three heads of layer 1 grow {first:.0f} to {last:.0f} times" in prose
    layers = grown["third", "slow_gla_k32:0"]
    assert "two of layer 3 grow {:.0f} and {:.0f} times".format(*sorted(layers[2])[2:]) in prose
    assert "and four of layer 2 as much, but these have come to rest by 32k" in prose
    assert [round(x) for x in sorted(layers[1])] == [9, 10, 10, 10]
    assert max(last_doubling([models["third", "slow_gla_k32:0"]])[1]) < 1.01
    low, *_, high = sorted(grown["third", SLOW_WELL][1])
    assert f"the heads of layer 2 grow {low:.0f} to {high:.0f} times from 512 on" in prose
    usual = [key for key in models if not key[1].startswith(("slow_gla", "mamba2_n4:"))]
    most = max(x for key in usual for layer in grown[key] for x in layer)
    assert len(usual) == 8 and f"no head grows more than {most:.2f} times" in prose
    late = [later(models[key]["state"], 2048) for key in usual if "gla" in key[1]]
    assert len(late) == 5 and f"from 2k on the norm of no head grows more than {max(late):.2f} times" in prose


def test_norms_become_flat_in_one_ill_model_alone(prose: str) -> None:
    record = records.record_of("slow_gla_k32:0")
    before, plain, *cured = (
        sorted(last_doubling(records.rows_of(record, "slow_gla_k32:0", arm))[2])[2:]
        for arm in ("before", "zero", *CURES)
    )
    assert "grow {:.2f} and {:.2f} times from 32k to 64k before".format(*before) in prose
    assert plain == pytest.approx(before, abs=0.02)
    assert f"and at most {max(x for heads in cured for x in heads):.2f} times after each" in prose
    record = records.record_of("slow_gla_k16:0")
    for arm in CURES:
        assert min(sorted(last_doubling(records.rows_of(record, "slow_gla_k16:0", arm))[0])[1:]) > 1.1
    most = [
        statistics.mean(max(heads(row)) for row in records.rows_of(record, "slow_gla_k16:0", arm))
        for arm in ("state_passing_text", "truncated_bptt")
    ]
    assert [round(x) for x in most] == [42, 42] and "in `slow_gla_k16:0` 42 times" in prose


def test_in_short_quotes_the_ill_gla_models(prose: str) -> None:
    def bits(row: dict[str, Any]) -> str:
        return " {} ".join(pages.number(records.bits(row, *span)) for span in ((0, 512), (32768, 65536)))

    models = variants()
    large, small, control = (bits(models["third", name]) for name in ("slow_gla_k32:0", "slow_gla_k16:0", "gla_k16:0"))
    assert f"reads positions 0–512 at {large.format('bits per byte and 32k–64k at')}, `slow_gla_k16:0` at" in prose
    assert (
        f"`slow_gla_k16:0` at {small.format('and')}, their control with usual gates at {control.format('and')}" in prose
    )
    rises = [pages.number(records.rise(models["third", name]), True) for name in ("slow_gla_k32:0", "slow_gla_k16:0")]
    mamba = pages.number(records.rise(models["second", "mamba2_n4:6"]), True)
    assert f"The rises are {rises[0]} and {rises[1]} nats; the Mamba-2 has {mamba}" in prose
    assert f"the rise that the control has ({pages.number(records.rise(models['third', 'gla_k16:0']), True)})" in prose
    told = {"zero": "rises of", "state_passing": "Passing leaves", "state_passing_text": "passing in text"}
    told |= {
        "truncated_bptt": "Truncated BPTT leaves",
        "noise": "plain noise the rise is",
        "fitted_noise": "fitted noise",
    }
    for arm, words in told.items():
        shown = [report.level(records.rows_of(records.record_of(m), m, arm), "rise") for m in records.ILL[1:]]
        assert f"{words} {shown[0]} and {shown[1]}" in prose, arm
    for model in records.ILL[1:]:
        plain = mean(model, "zero", "key at 512")
        assert all(mean(model, arm, "key at 512") < plain / 2 for arm in NOISES)
    costs = [[over(m, arm, "bits 0–512")[0] for m in records.ILL[1:] for arm in arms] for arms in (CURES, NOISES)]
    low, high = ([pages.number(f(part), True) for part in costs] for f in (min, max))
    assert f"Within 512 tokens they cost {low[0]} to {high[0]} bits" in prose
    assert f"a price of {low[1]} to {high[1]} bits within 512 tokens" in prose


def test_cures_of_the_ill_gla_models_take_what_the_page_says(prose: str) -> None:
    recall = [name for name in report.DIFFERENCES if not name.startswith(("bits", "rise"))]
    for model in records.ILL[1:]:
        for arm in ("state_passing_text", "truncated_bptt"):
            assert all(sum(over(model, arm, name)) >= 0 for name in recall), (model, arm)
    large, small = records.ILL[1:]

    def shown(model: str, arm: str, name: str) -> str:
        return pages.signed_with_error(*over(model, arm, name)).strip("*")

    keys, letters = ([shown(m, "state_passing", n) for m in (large, small)] for n in ("key at 512", "64 letters"))
    assert f"{keys[0]} and {keys[1]} of the pass keys in 512 tokens" in prose
    assert f"{shown(small, 'state_passing', 'key at 1024')} of those in 1024" in prose
    far = [pages.number(mean(small, arm, "key at 4096")) for arm in ("state_passing", "zero")]
    assert f"({far[0]}, plain training {far[1]})" in prose
    assert f"Of 64 letters passing takes {letters[0]} and {letters[1]}" in prose
    assert f"In strings of 64 the two ill ones lose {letters[0][1:]} and {letters[1][1:]}" in prose
    noise = [-over(m, arm, "64 letters")[0] for m in (large, small) for arm in NOISES]
    assert f"noise of either kind takes {pages.number(min(noise))} to {pages.number(max(noise))}" in prose
    little = [abs(over(m, arm, f"{n} letters")[0]) for m in (large, small) for arm in CURES[1:] for n in (20, 40, 64)]
    assert f"change letters by at most {pages.number(max(little))}" in prose
    ends = [pages.number(mean(large, arm, "64 letters")) for arm in ("before", "state_passing_text")]
    assert f"copies {ends[0]} of 64 letters before and {ends[1]} after passing in text" in prose
    worse = [shown(large, arm, "bits 32k–64k") for arm in NOISES]
    assert f"({worse[0]} and {worse[1]} bits)" in prose
    answers = [
        row["babilong"].values() for m in (large, small) for row in records.rows_of(records.record_of(m), m, NOISES[1])
    ]
    assert not any(sum(values) for values in answers)


def test_cures_of_the_ill_gla_models_pay_from_where_the_page_says(prose: str) -> None:
    assert "from 4096 on it reads every recorded range surely better" in prose
    assert "Passing in every row and truncated BPTT do so from 16k on, at the latest" in prose
    starts = {"state_passing_text": 4096, "state_passing": 16384, "truncated_bptt": 16384}
    for model in records.ILL[1:]:
        record = records.record_of(model)
        plain = records.rows_of(record, model, "zero")
        for arm, start in starts.items():
            rows = records.rows_of(record, model, arm)
            for at, entry in enumerate(plain[0]["perplexity"]):
                pairs = zip(rows, plain, strict=True)
                gain = [a["perplexity"][at]["bits_per_byte"] - b["perplexity"][at]["bits_per_byte"] for a, b in pairs]
                assert entry["start"] < start or sum(intervals.t_interval(gain)) < 0, (model, arm, entry["start"])
            assert over(model, arm, "bits 0–512")[0] > over(model, arm, "bits 0–512")[1]


def test_noise_is_small_beside_the_states_of_slow_models(prose: str) -> None:
    models = variants()
    norms = []
    for name in ("slow_gla_k16:0", "gla_k16:0"):
        state = models["third", name]["state"]
        at = state["positions"].index(records.TRAINED)
        norms.append(max(head["norm"][at] for layer in state["layers"] for head in layer["heads"]))
    assert f"up to {norms[0]:.0f} in `slow_gla_k16:0`, at most {norms[1]:.0f} in the control" in prose


def test_remembrance_of_the_ill_gla_models_is_quoted(prose: str) -> None:
    def value(row: dict[str, Any]) -> float:
        return float(records.remembrance(row, 2048)["value"])

    models = variants()
    before = [value(models["third", name]) for name in ("slow_gla_k32:0", "slow_gla_k16:0", SLOW_WELL, "gla_k16:0")]
    assert before == sorted(before, reverse=True)
    shown = [pages.number(v, digits=4) for v in before]
    assert "is {} and {}, in the slow one that is not ill {}, in the control {}".format(*shown) in prose
    quoted = {}
    for model in records.ILL[1:]:
        plain, *cured = (
            [value(row) for row in records.rows_of(records.record_of(model), model, arm)]
            for arm in ("zero", "state_passing_text", "truncated_bptt")
        )
        for arm, values in zip(("passing", "bptt"), cured, strict=True):
            error = intervals.t_interval([a - b for a, b in zip(values, plain, strict=True)])
            share = pages.number(statistics.mean(values) / statistics.mean(plain), digits=2)
            quoted[model, arm] = share, pages.signed_with_error(*error, digits=4).strip("*")
    (large, passing), (small, less) = (quoted[model, "passing"] for model in records.ILL[1:])
    assert f"training in `slow_gla_k32:0` ({passing})" in prose and f"in `slow_gla_k16:0` ({less}, which" in prose
    assert f"to {large} and {small} at t = 2048 on the GLA models" in page_text()
    (large, passing), (small, less) = (quoted[model, "bptt"] for model in records.ILL[1:])
    assert f"truncated BPTT {large} and {small} of it ({passing} and {less})" in prose


def test_diagnosis_is_quoted(prose: str) -> None:
    def verdict(name: str) -> tuple[str, dict[str, Any]]:
        (found,) = pages.read(f"length_diagnosis/{name}.json")["verdict"]
        return found["finding"], found["numbers"]

    large, small, control = (verdict(name) for name in ("slow_gla_k32-0", "slow_gla_k16-0", "gla_k16-0"))
    assert (large[0], small[0], control[0]) == ("state", "state", "healthy")
    assert (large[1]["layer"], small[1]["layer"]) == (1, 0)
    assert f"of `slow_gla_k32:0` grows {large[1]['growth']:.1f} times" in prose
    assert f"layer 0 of `slow_gla_k16:0` {small[1]['growth']:.1f} times" in prose
    ends = []
    for name in ("slow_gla_k32-0", "slow_gla_k16-0"):
        file = pages.read(f"length_diagnosis/{name}.json")
        entry = file["perplexity"][-1]
        shown = [pages.number(entry[key], True) for key in ("rise", "rise_low", "rise_high")]
        ends.append(f"{shown[0]} [{shown[1]}, {shown[2]}]")
        assert (file["settings"]["multiple"], file["settings"]["sequences"]) == (128, 16)
    assert f"at the end it is {ends[0]} and {ends[1]}" in prose
    assert verdict("slow_gla_k16-1")[0] == "state" and "`slow_gla_k16:1` has the same" in prose
