"""docs/state_recall.md and the pages of its folder say what the recorded runs say."""

from __future__ import annotations

import pytest

from experiments.common import intervals, pages
from experiments.state_recall import records, report

MEASURES = (("recall_length", "right", "asked"), ("character_recall_length", "characters_right", "characters"))


def test_recall_lengths_follow_from_the_points() -> None:
    from longrecall.evaluation.recall_search import maximum_lengths

    for file in (records.TREND, records.ABLATION):
        for row in records.joined(file)["results"]:
            for haystack, points in row["points"].items():
                for measure, right, asked in MEASURES:
                    shares = [{"length": p["length"], "value": p[right] / p[asked]} for p in points]
                    found = {threshold: length or 0 for threshold, length in maximum_lengths(shares).items()}
                    assert row[measure][haystack] == found


def test_every_model_was_run() -> None:
    record = records.joined(records.TREND)
    names = [f"{mixer}:{factor}" for mixer in ("gated_delta_net", "gla") for factor in (1, 2, 4, 8)] + ["transformer"]
    found = sorted((row["model"], row["seed"]) for row in record["results"])
    assert found == sorted((name, seed) for name in names for seed in (0, 1))
    found = sorted((row["model"], row["seed"]) for row in records.joined(records.ABLATION)["results"])
    assert found == sorted((form, seed) for form in records.FORMS for seed in range(3))


def test_runs_differ_in_their_seed_alone() -> None:
    """Settings of all runs of a study are the same but for the seed and when training had to end."""
    others = dict.fromkeys(("first_seed", "until", "seconds", "steps"))
    for pattern in (records.TREND, records.ABLATION):
        settings = [run["settings"] for run in records.joined(pattern)["runs"]]
        assert all({**one, **others} == {**settings[0], **others} for one in settings)


def page_text() -> str:
    """The pages of the study, one after the other."""
    return "\n".join(path.read_text(encoding="utf-8") for path in pages.pages_of(report.PAGE))


@pytest.fixture
def prose() -> str:
    """The pages without their tables, as one line."""
    lines = page_text().split("\n")
    return " ".join(" ".join(line for line in lines if not line.startswith("|")).split()).replace("**", "")


def lengths(mixer: str) -> dict[int, list[int]]:
    """Factor -> recall lengths of whole numbers at the lowest threshold, seed by seed."""
    groups = records.by_factor(records.joined(records.TREND), mixer)
    return {many: [records.reached(row, "needles:number", 0.5) for row in rows] for many, rows in groups.items()}


def shown(values: list[float], digits: int = 2) -> list[str]:
    """As the page has them."""
    return [pages.number(value, digits=digits) for value in values]


def test_what_the_prose_says_of_the_exponents(prose: str) -> None:
    record = records.joined(records.TREND)

    def interval(mixer: str, kind: str, threshold: float, measure: str) -> tuple[float, float]:
        power = records.fitted(record, mixer, kind, threshold, measure)[1]
        assert power.points == 8
        return power.slope - power.half, power.slope + power.half

    ends = {
        mixer: [interval(mixer, kind, t, records.SINGLE) for kind in records.KINDS for t in record["thresholds"]]
        for mixer in ("gated_delta_net", "gla")
    }
    every = [*ends["gated_delta_net"], *ends["gla"]]
    above = sum(low > 0 for low, _ in every)
    assert f"Of the {len(every)} exponents of recall length by characters {above} have an interval above zero." in prose
    assert all(low < 1 < high for low, high in ends["gated_delta_net"])
    highest = sorted(high for _, high in ends["gla"])
    assert len(highest) == 8 and highest[-1] < 1
    assert "all eight end below 1, at {} to {}".format(*shown([highest[0], highest[-1]])) in prose
    powers = [records.fitted(record, mixer, "number", 0.5)[1] for mixer in ("gated_delta_net", "gla")]
    assert powers[0].slope > powers[0].half and powers[1].slope < powers[1].half
    first, second = (report.with_half(power.slope, power.half, 2) for power in powers)
    assert f"that of Gated DeltaNet has ({first}) and that of GLA has not ({second})" in prose
    powers = [records.fitted(record, mixer, "number", 0.5, records.SINGLE)[1] for mixer in ends]
    words = [report.with_half(power.slope, power.half, 2) for power in powers]
    assert f"That of Gated DeltaNet by whole numbers is {first} (95%)." in prose
    assert "the exponent is {} (Gated DeltaNet) and {} (GLA).".format(*words) in prose
    for measure in (records.WHOLE, records.SINGLE):
        for kind in records.KINDS:
            steep, flat = (records.fitted(record, mixer, kind, 0.5, measure)[0] for mixer in ends)
            assert steep.slope > flat.slope and steep.slope - steep.half < flat.slope + flat.half


def test_every_page_says_first_what_its_intervals_are() -> None:
    for path in pages.pages_of(report.PAGE):
        first = " ".join(path.read_text(encoding="utf-8").splitlines()[:10])
        assert "±" in first and "seed" in first, path


def test_the_lengths_of_the_prose(prose: str) -> None:
    delta, gla = lengths("gated_delta_net"), lengths("gla")
    means = [sum(of[many]) / 2 for of in (delta, gla) for many in (1, 8)]
    assert "({:.0f} to {:.0f} and {:.0f} to {:.0f} bytes, whole numbers).".format(*means) in prose
    assert f"{means[1] / means[0]:.1f} times as long for Gated DeltaNet and {means[3] / means[2]:.1f} times" in prose
    assert "Gated DeltaNet with E = 4 has {} bytes in one and {} in the other".format(*delta[4]) in prose
    assert max(delta[4]) - min(delta[4]) > 0.9 * (means[1] - means[0]), "a seed moves a length as much as the state"
    rows = records.joined(records.TREND)["results"]
    furthest = max(
        records.reached(row, f"needles:{kind}", 0.5, records.SINGLE) for row in rows for kind in records.KINDS
    )
    assert furthest == 2048 and "no recurrent model recalls that far" in prose
    for row in rows:
        for kind in records.KINDS:
            far = records.reached(row, f"needles:{kind}", 0.5, records.SINGLE)
            assert far < 2048 or row["model"] == "transformer"
            if row["model"] == "transformer":
                assert records.reached(row, "needles:number", 0.5) == 64


def test_recall_in_prose(prose: str) -> None:
    record = records.joined(records.TREND)
    found = {
        mixer: [
            sum(records.share(row, "prose:uuid") for row in rows) / len(rows)
            for rows in records.by_factor(record, mixer).values()
        ]
        for mixer in ("gated_delta_net", "gla")
    }
    assert (
        "Gated DeltaNet recalls {}, {}, {} and {} of them with E = 1, 2, 4 and 8; GLA {}, {}, {} and {}.".format(
            *shown(found["gated_delta_net"]), *shown(found["gla"])
        )
        in prose
    )
    assert "Of numbers every model recalls at least .86 there, but for two without expansion" in prose
    few = [row["model"] for row in record["results"] if records.share(row, "prose:number") < 0.86]
    assert len(few) == 2 and all(name.endswith(":1") for name in few)


def test_recall_by_length_in_the_prose(prose: str) -> None:
    record = records.joined(records.TREND)

    def at(name: str, length: int) -> list[float]:
        return [records.recall_at(row, "needles:number", length) for row in record["results"] if row["model"] == name]

    names = {row["model"] for row in record["results"]}
    attention = sum(at("transformer", 1024)) / 2
    best = max(max(at(name, 1024)) for name in names - {"transformer"})
    assert "yet {} over 1,024 bytes, where the best recurrent model has {}.".format(*shown([attention, best])) in prose
    shortest = [share for name in names for share in at(name, 32)]
    assert "{} to {} from model to model".format(*shown([min(shortest), max(shortest)], 2)) in prose
    factors = [sum(at("gated_delta_net:8", length)) / sum(at("gated_delta_net:1", length)) for length in (32, 256)]
    assert "is {:.1f} over 32 bytes and {:.1f} over 256".format(*factors) in prose
    mean = {name: sum(at(name, 32)) for name in names}
    assert min(mean, key=mean.__getitem__) == "transformer"
    assert f"({shown([mean['transformer'] / 2])[0]} over 32 bytes)" in prose


def test_what_a_seed_decides(prose: str) -> None:
    record = records.joined(records.TREND)

    def ranks(rows: list[dict[str, object]]) -> list[str]:
        early, end = ([report.loss_then(row, *when) for row in rows] for when in ((0.15, 0.25), (0.9, 1.0)))
        recall = [records.share(row, "needles:number") for row in rows]
        return shown([intervals.rank_correlation(early, other) for other in (recall, end)])

    rows = [row for row in record["results"] if row["model"] != "transformer"]
    others = records.joined(records.ABLATION)["results"]
    assert (
        "a rank correlation of {} with their mean recall of numbers at the end. It has {} with".format(*ranks(rows))
        in prose
    )
    assert f"Of the {len(others)} models of the [ablation](ablation.md), whose runs are shorter, " in prose
    assert "shorter, the two are {} and {}.".format(*ranks(others)) in prose
    assert f"the mean recall of numbers by up to {shown([records.seed_spread(record)])[0]}." in prose


def test_sizes_of_the_prose(prose: str) -> None:
    record = records.joined(records.TREND)
    sizes = {row["model"]: row["parameters"] for row in record["results"]}
    text = page_text()

    assert f"| {min(sizes.values()) / 1e6:.2f}M to {max(sizes.values()) / 1e6:.2f}M |" in text
    more = [sizes[f"{mixer}:8"] / sizes[f"{mixer}:1"] - 1 for mixer in ("gated_delta_net", "gla")]
    assert f"{more[0]:.0%} at E = 8 for Gated DeltaNet, {more[1]:.0%} for GLA" in prose
    points = record["results"][0]["points"]["needles:number"]
    needles = {point["length"]: point["needles"] for point in points}
    assert needles[32] == 3 and f"2,048 bytes {needles[2048]}." in prose
    settings = record["settings"]
    assert (settings["rows"], settings["length"], settings["heads"], settings["head_dim"]) == ([1, 6, 2], 2048, 2, 32)


def test_the_ablation_of_the_prose(prose: str) -> None:
    record = records.joined(records.ABLATION)
    assert not records.apart(record, records.joined(records.TREND))
    half, forms = records.difference_half(record), records.forms(record)
    assert "no form of expansion can be told apart from head-wise expansion, nor can a model without" in prose
    assert f"The intervals over seeds of ± {pages.number(half)} (95%) are wider than every difference" in prose
    assert f"the intervals of ± {pages.number(half)} are wider than every difference" in prose
    assert {records.longest(row, "needles:number") for rows in forms.values() for row in rows} == {1024}
    means = {form: records.mean_recall(rows) for form, rows in forms.items()}
    seeds = shown([records.share(row, "needles:number") for row in forms["headwise"]])
    assert "head-wise expansion recalls {}, {} and {}, and".format(*seeds) in prose
    assert "the forms' means go from {} to {}.".format(*shown([min(means.values()), max(means.values())])) in prose
    assert f"cannot be told apart from head-wise ({pages.number(means['none'] - means['headwise'])})" in prose
    assert forms["headwise"][0]["state_size"] == 4 * forms["none"][0]["state_size"]
    for of in (means, records.PAPER):
        assert max(of["dpfp"], of["lfm"]) < of["headwise"]
    assert abs(means["low_rank"] - means["headwise"]) < 0.01
    last = [sorted(records.PAPER, key=of.__getitem__)[:2] for of in (records.PAPER, means)]
    assert set(last[0]) == {"1+elu", "whole"} and not set(last[0]) & set(last[1])
    assert "1 + ELU and the form without subheads are not the last two of the eight" in prose
    assert round(3 * (half / 0.05) ** 2) == 14 and "about fourteen seeds of each form" in prose


def row(model: str, seed: int, right: float) -> dict[str, object]:
    """A model that recalls `right` of 10 numbers."""
    points = [{"length": 32, "right": right, "asked": 10}]
    return {"model": model, "seed": seed, "points": {"needles:number": points}, "state_size": 1}


def test_forms_are_told_apart_by_their_interval() -> None:
    """Two seeds each, spread .2 within: variance .02 in both, 2 degrees of freedom, 4.3027 * sqrt(2 * .02 / 2)."""
    rows = [row("headwise", 0, 4), row("headwise", 1, 6), row("whole", 0, 6), row("whole", 1, 8)]
    record = {"results": rows}
    assert records.difference(record, "whole") == pytest.approx(0.2)
    assert records.difference_half(record) == pytest.approx(4.302653 * 0.02**0.5)
    trend = {"results": [row("gla:1", 0, 5), row("gla:1", 1, 6)]}
    assert records.seed_spread(trend) == pytest.approx(0.1)
    assert records.apart(record, trend) == {}
    # Ten seeds of two forms tell them apart; one of nine differences as large as that may come by chance.
    shares = {form: 4.0 for form in list(records.FORMS)[:10]} | {"whole": 4.55}
    seeds = {form: [row(form, seed, right + seed % 2) for seed in range(10)] for form, right in shares.items()}
    two = {"results": seeds["headwise"] + seeds["whole"]}
    assert records.apart(two, trend) == {"whole": pytest.approx(0.055)}
    ten = {"results": [run for runs in seeds.values() for run in runs]}
    assert records.difference_half(ten) < 0.055 < records.together_half(ten) and not records.apart(ten, trend)
    one = {"results": [rows[0], rows[2]]}
    assert records.difference_half(one) is None
    assert records.apart(one, trend) == {"whole": pytest.approx(0.2)}
    words = report.ablation_words(one, trend)
    assert "two seeds of one model of the trend (.100): without subheads." in words
    assert "Below head-wise expansion by more than two seeds of one model of the trend (.100): none." in words
